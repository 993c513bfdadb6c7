"""The two streams of the command line: results on stdout, everything about the way there on stderr."""

from __future__ import annotations

from functools import cache

from rich.console import Console


@cache
def out() -> Console:
    """Results: tables, traces, records."""
    return Console(highlight=False)


@cache
def err() -> Console:
    """Progress, notices and errors."""
    return Console(stderr=True, highlight=False)
