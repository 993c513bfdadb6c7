"""Passes that make a backward fast: stores for atomics, one program for each gradient, partial sums of rows."""
