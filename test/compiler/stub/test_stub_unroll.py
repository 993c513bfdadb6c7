"""Loops over what stands in the text are written out; what they compute stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_agent.compiler.stub.unroll import unrolled

HEAD = """
class Kernel:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: LOG.append((grid, args, kwargs))


LOG = []
kernel = Kernel()
"""
LOOPS = [
    "for n in range(3):\n        kernel[n](a, n)\n    return n",
    "for n, (left, right) in enumerate(((a, b), (b, a))):\n        kernel[n](left, right)\n    return left",
    "found = []\n    for one, two in zip((a, b), [a + b, a - b].copy(), strict=True):\n        c = one * two\n"
    "        kernel[c](two)\n        found.append(c)\n    return found, c",
    "source = a\n    for n in range(2):\n        low = source + n\n        kernel[n](low)\n        source = low\n"
    "    source = source + 1\n    return source, low",
    "for n in range(2):\n        low = a + n\n        kernel[n](low)\n    pick = lambda n: n + low\n    return pick(b)",
    "for n in range(2):\n        low = a + n\n        kernel[n](low)\n    def pick(n, m=n):\n        low = n + m\n"
    "        return low\n    return pick(b), low",
    "for place, x in ((0, a), (2, b)):\n        x = x + 1\n        kernel[place](x)\n    a = x\n    return a, b",
]


def results(source: str) -> tuple[Any, Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    returned = scope["stub"](5, 7)
    return returned, scope["LOG"]


@pytest.mark.parametrize("body", LOOPS)
def test_loops_are_written_out_and_give_the_same(body: str) -> None:
    # what a trip binds is read by later trips and after the loop: a name that is not followed gives other numbers, and
    # so does one that is followed into a function which has a name like it
    source = f"{HEAD}\n\ndef stub(a, b):\n    {body}\n"
    changed = unrolled(source, "stub")
    assert "for " not in changed[changed.index("def stub") :]
    assert results(changed) == results(source)


@pytest.mark.parametrize(
    "body",
    [
        "for n in range(a):\n        kernel[n](n)\n    return a",
        "for n in range(99):\n        kernel[n](n)\n    return a",
        "for n in range(2):\n        if n:\n            break\n        kernel[n](n)\n    return a",
        "for one, two in zip((a, b), [a]):\n        kernel[one](two)\n    return a",
        "for n in range(2):\n        a = a + n\n    return a",
    ],
)
def test_loops_whose_trips_the_text_does_not_tell_or_that_launch_nothing_stay(body: str) -> None:
    source = f"{HEAD}\n\ndef stub(a, b):\n    {body}\n"
    assert unrolled(source, "stub") == source
