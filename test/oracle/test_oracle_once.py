"""What several threads ask for at once is found once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernel_agent.oracle.once import Once


def test_who_asks_while_another_looks_waits_for_that_answer() -> None:
    # A second look would start a second child, beside the first one.
    once: Once[int] = Once()
    begun, go_on, looks = threading.Event(), threading.Event(), []

    def look() -> int:
        looks.append(1)
        begun.set()
        assert go_on.wait(10)
        return 7

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(once.of, "M=8", look)
        assert begun.wait(10)
        second = threads.submit(once.of, "M=8", look)
        go_on.set()
        assert (first.result(10), second.result(10)) == (7, 7)
    assert once.of("M=8", look) == 7
    assert len(looks) == 1


def test_what_could_not_be_found_is_looked_for_again() -> None:
    once: Once[int] = Once()

    def fail() -> int:
        raise ValueError("not this time")

    with pytest.raises(ValueError, match="not this time"):
        once.of("M=8", fail)
    assert once.of("M=8", lambda: 7) == 7
