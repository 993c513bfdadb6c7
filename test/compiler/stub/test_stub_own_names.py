"""Loops that launch bind names that nothing else binds, and the stub does what it did."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_agent.compiler.stub.loops import flattened
from kernel_agent.compiler.stub.own_names import with_own_names


def stub_of(*lines: str) -> str:
    return "def stub(x, n):\n" + "".join(f"    {line}\n" for line in lines)


def calls(text: str) -> tuple[list[Any], Any]:
    """What the kernel was launched with, and what the stub returned."""
    found: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *given: found.append((grid, *given))

    scope: dict[str, Any] = {"kernel": Kernel()}
    exec(text, scope)
    return found, scope["stub"](list(range(7)), 7)


LOOP = ("for i in range(0, n, 2):", "    part = x[i : i + 2]  # part of ä", "    kernel[(i,)](part, n=part)")


def test_two_loops_with_the_same_names_have_names_of_their_own() -> None:
    # Under one name, what the first loop's part is would be asked of the second one, and neither could be told.
    text = stub_of(*LOOP, *LOOP, "return x").replace("n=part", "len(part)")
    found = with_own_names(text, "stub")
    assert found.split("\n")[:4] == text.split("\n")[:4]
    assert found.split("\n")[4:7] == [
        "    for i_2 in range(0, n, 2):",
        "        part_2 = x[i_2 : i_2 + 2]  # part of ä",
        "        kernel[(i_2,)](part_2, len(part_2))",
    ]
    assert calls(found) == calls(text)
    assert [loop.target for loop in flattened(found, "stub")[1]] == ["i", "i_2"]


def test_a_name_of_a_trip_that_is_there_before_or_bound_behind_has_another_one() -> None:
    # `rows` of all of x, and of a part: what is launched behind the loop would be given the last part's.
    text = stub_of("part = x", "kernel[(0,)](part)", *LOOP, "i = 3", "kernel[(i,)](x)", "return i")
    text = text.replace("n=part", "part")
    found = with_own_names(text, "stub")
    assert "        part_2 = x[i_2 : i_2 + 2]" in found
    assert "    part = x\n" in found
    assert calls(found) == calls(text)


@pytest.mark.parametrize(
    "lines",
    [
        # handed from trip to trip
        ("h = x", "for i in range(n):", "    new = kernel[(i,)](h)", "    h = new", "return h"),
        # read behind the loop: the last trip's, or that of before where there is none
        ("part = x", "for i in range(n):", "    part = x[i]", "    kernel[(i,)](part)", "return part"),
        ("part = x", "for i in range(n):", "    part = x[i]", "    kernel[(i,)](part)", "part = [part]", "return part"),
        # bound behind it in some cases alone
        ("p = x", "for i in range(n):", "    p = i", "    kernel[(i,)](p)", "if n > 9:", "    p = 3", "return p"),
        ("p = x", "for i in range(n):", "    p = i", "    kernel[(i,)](p)", "for p in range(0):", "    n", "return p"),
        ("p = x", "for i in range(n):", "    p = i", "    kernel[(i,)](p)", "y = n > 9 and (p := 3)", "return p"),
        # read by a function, at a time that its text does not tell
        ("p = x", "g = lambda: p", "for i in range(n):", "    p = i", "    kernel[(i,)](p)", "return g()"),
        # added to
        ("p = 1", "for i in range(n):", "    p += i", "    kernel[(i,)](p)", "p = 0", "return p"),
        # of loops that launch nothing
        ("p = 1", "for i in range(n):", "    p = i", "p = 0", "return p"),
    ],
)
def test_a_name_that_is_not_the_trips_alone_stays(lines: tuple[str, ...]) -> None:
    # Renamed within the loop, it would be another value that is read.
    assert with_own_names(stub_of(*lines), "stub") == stub_of(*lines)


def test_what_one_loop_leaves_to_the_next_stays() -> None:
    # The second loop's `last` is what the first one bound last, until it binds it itself.
    text = stub_of(
        "for i in range(n):",
        "    last = x[i]",
        "    kernel[(i,)](last)",
        "for i in range(n):",
        "    kernel[(i,)](last)",
        "    last = x[i]",
        "return x",
    )
    found = with_own_names(text, "stub")
    assert found.count("last_2") == 0
    assert found.count("i_2") == 3
    assert calls(found) == calls(text)
