"""Puts the memory of a process onto large pages, so that a fork copies the entries of few pages.

The server forks twice for every job, and each time its two hundred megabytes of torch and Triton were fifty thousand
entries to copy and to drop again: most of what a child cost. Only Linux since 6.1 does this on demand, and not
everywhere; elsewhere all stays as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_SIZE = 2 << 20
_MADV_COLLAPSE = 25


def collapse() -> Iterator[None]:
    """Put one large page after the other in the place of small ones: a step takes some milliseconds at most."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in list(_own_memory()):
        for address in range(-(-start // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _MADV_COLLAPSE)  # fails where it cannot
            yield


def _own_memory() -> Iterator[tuple[int, int]]:
    """Where what this process may write lies, but for files and stacks."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, access, _, _, _, *name = line.split(maxsplit=5)
            if access == "rw-p" and (not name or name[0].strip() == "[heap]"):
                start, end = (int(part, 16) for part in span.split("-"))
                yield start, end
