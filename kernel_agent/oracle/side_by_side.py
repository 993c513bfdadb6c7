"""Work of truth children at the same time: none of them is a candidate, so that no wall need stand between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Share = TypeVar("Share")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Share, threading.Event], Result], shares: Sequence[Share]) -> list[Result]:
    """The results of `work`, in the order of the shares. What the first of them raises is raised.

    The event is set when nobody waits any more, on Ctrl-C for instance: work ends then.
    """
    left = threading.Event()
    with ThreadPoolExecutor(max(1, len(shares)), "truth") as threads:
        try:
            return [begun.result() for begun in [threads.submit(work, share, left) for share in shares]]
        finally:
            left.set()
