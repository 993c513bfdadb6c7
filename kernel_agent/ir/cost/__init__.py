"""Counts what a call moves and computes at its real sizes, and the time that a device needs for it at least."""
