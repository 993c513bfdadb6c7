"""Readable views of a ledger."""
