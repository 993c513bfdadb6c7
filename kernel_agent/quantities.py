"""Seconds, bytes and operations as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`0.31 ms`, `12.4 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    return "0 us"


def size(count: float) -> str:
    """Bytes for people: `33.6 MB` (10**6)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """Operations for people: `137 G`."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"
