"""Triton IR: capture launches, lower, parse, execute, sanitize."""
