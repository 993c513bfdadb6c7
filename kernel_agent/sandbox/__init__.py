"""Locked-down child processes for code that nobody vouches for."""
