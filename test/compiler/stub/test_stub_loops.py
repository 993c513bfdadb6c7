"""Loops that launch are followed for one trip; what a trip has alone, and what all have alike, is told from text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.hoist import hoisted
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.loops import Loop, flattened
from kernel_agent.compiler.stub.shares import counted, is_own_share
from kernel_agent.compiler.stub.source import StubSource

LAUNCH = "kernel[(1,)](x)"


def stub_of(*lines: str) -> str:
    return "def stub(x, y, n, chunk, flag):\n" + "".join(f"    {line}\n" for line in (*lines, "return x"))


def loop_of(*lines: str, head: str = "for first in range(0, n, chunk):") -> str:
    return stub_of(head, *(f"    {line}" for line in lines))


# --- one trip


def calls(text: str, n: int, chunk: int) -> tuple[list[Any], Any]:
    """What the kernel was launched with, and what the stub returned."""
    found: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *given: found.append((grid, *given))

    scope: dict[str, Any] = {"kernel": Kernel()}
    exec(text, scope)
    return found, scope["stub"](list(range(n)), None, n, chunk, True)


SPREAD = stub_of(
    "z = x",
    "for first in range(",
    "    chunk,",
    "    n,  # all",
    "):",
    "    # of the body",
    "    part = x[first : first + chunk]",
    "# further left",
    "    kernel[(first,)](",
    "   part,",
    "        z,",
    "    )",
    "    kernel[(n,)](part)",
    "kernel[(0,)](z)",
).replace("       part,", "  part,")


def test_a_loop_is_written_as_its_first_trip_where_it_stands() -> None:
    # Lines of what is followed, and of refusals, are looked up in either text: one more or less is another statement.
    flat, (loop,) = flattened(SPREAD, "stub")
    rows, flat_rows = SPREAD.split("\n"), flat.split("\n")
    assert len(flat_rows) == len(rows)
    assert flat_rows[:2] == rows[:2]
    assert flat_rows[2] == "    first = range(chunk, n)[0]"
    assert not any(flat_rows[3:6])
    assert [row.strip() for row in flat_rows[7:]] == [row.strip() for row in rows[7:]]
    assert flat_rows[14:] == rows[14:]
    assert (loop.first, loop.last) == (3, 14)
    assert (loop.has(2), loop.has(3), loop.has(14), loop.has(15)) == (False, True, True, False)
    assert (loop.target, loop.bound) == ("first", frozenset({"first", "part"}))


def test_the_first_trip_does_what_it_does_in_the_loop() -> None:
    # A row that is moved too far left loses characters, and a trip that begins at 0 is not the first of this loop.
    whole, returned = calls(SPREAD, 7, 2)
    first, same = calls(flattened(SPREAD, "stub")[0], 7, 2)
    assert first == [*whole[:2], whole[-1]]
    assert same == returned


def test_two_loops_are_each_written_as_their_first_trip() -> None:
    text = stub_of("for i in range(n):", "    kernel[(i,)](x)", "for j in range(2, n):", "    kernel[(j,)](x)")
    flat, loops = flattened(text, "stub")
    assert [(one.target, one.first, one.last) for one in loops] == [("i", 2, 3), ("j", 4, 5)]
    assert calls(flat, 5, 1)[0] == [(place, list(range(5))) for place in ((0,), (2,))]


def test_a_loop_that_calls_a_function_of_the_file_is_one_that_launches() -> None:
    # What launches in a helper that cannot be written into the loop is followed there.
    text = "def helper(x):\n    kernel[(1,)](x)\n\n\n" + loop_of("helper(x[first])")
    flat, loops = flattened(text, "stub")
    assert len(loops) == 1
    assert "for " not in flat


def test_loops_that_launch_nothing_and_other_functions_stay() -> None:
    text = loop_of("total = first + n") + loop_of(LAUNCH).replace("def stub", "def other")
    assert flattened(text, "stub") == (text, ())
    assert flattened(loop_of(LAUNCH), "another") == (loop_of(LAUNCH), ())


def test_a_range_is_known_to_rise_from_zero_only_where_it_begins_there() -> None:
    # Places below zero count from the end of a tensor, where other trips are.
    for steps, rises in (("n", True), ("0, n", True), ("0, n, chunk", True), ("1, n", False), ("-n, n, 2", False)):
        (loop,) = flattened(loop_of(LAUNCH, head=f"for i in range({steps}):"), "stub")[1]
        assert loop.rises_from_zero is rises, steps
    assert ast.unparse(flattened(loop_of(LAUNCH), "stub")[1][0].step) == "chunk"


def refusal(text: str) -> CannotDerive:
    with pytest.raises(CannotDerive) as refused:
        flattened(text, "stub")
    return refused.value


@pytest.mark.parametrize(
    "head",
    [
        "for v in x:",
        "for v in sorted(range(n)):",
        "for v in range():",
        "for v in range(n, step=2):",
        "for v, w in zip(range(n), x):",
        "for x[0] in range(n):",
        "while n:",
    ],
)
def test_loops_over_something_else_than_a_range_are_refused(head: str) -> None:
    found = refusal(stub_of("z = x", head, f"    {LAUNCH}"))
    assert "runs over something other than a range" in found.message
    assert found.line == 3


@pytest.mark.parametrize(
    "line",
    [
        "if flag: kernel[(2,)](x)",
        "for j in range(2): kernel[(j,)](x)",
        "with x: kernel[(2,)](x)",
        "z = [one for one in x]",
        "z = lambda: x",
        "kernel[(z := 1,)](x)",
        "n += 1",
    ],
)
def test_statements_within_statements_of_a_trip_are_refused(line: str) -> None:
    # One trip takes one side, and which others take is not seen.
    found = refusal(loop_of(line, LAUNCH))
    assert "has branches, loops or functions in it" in found.message
    assert found.line == 2


def test_an_else_of_a_loop_is_refused() -> None:
    # It would stand as a further statement of the trip.
    assert "has branches" in refusal(stub_of("for i in range(n):", f"    {LAUNCH}", "else:", "    x = y")).message


@pytest.mark.parametrize("line", ['z = """a\n    b"""', 'z = f"""{x}\n    b"""'])
def test_texts_of_several_lines_are_refused(line: str) -> None:
    # A body that is moved to the left would say another text.
    assert "cannot be taken apart by lines" in refusal(loop_of(line, LAUNCH)).message


def test_a_body_in_the_line_of_its_head_is_refused() -> None:
    assert "cannot be taken apart by lines" in refusal(stub_of(f"for i in range(n): {LAUNCH}")).message


def test_a_number_that_is_counted_up_by_trips_is_refused() -> None:
    # Of the first trip it is 1 behind, of the last one as many as there are trips.
    found = refusal(stub_of("count = 0", "for i in range(n):", "    kernel[(count,)](x)", "    count += 1"))
    assert "has branches, loops or functions in it" in found.message
    assert found.line == 3


def test_what_a_trip_hands_on_has_a_name_as_it_begins_and_another_from_where_it_is_bound() -> None:
    # Under one name the statements behind the assignment, and the loop, would be told the state before it.
    text = stub_of("h = x", "for i in range(n):", "    new = kernel[(i,)](h)", "    h = new", "    kernel[(1,)](h)")
    flat, (loop,) = flattened(text.replace("return x", "return h"), "stub")
    assert [(one.name, one.before, one.behind) for one in loop.carries] == [("h", "h_before", "h_behind")]
    assert "new = kernel[(i,)](h_before)" in flat
    assert "h_behind = new" in flat
    assert "kernel[(1,)](h_behind)" in flat
    assert "return h_behind" in flat


def test_what_the_trip_before_bound_is_refused_where_nothing_was_bound_before_that() -> None:
    # The first trip would not have it at all.
    assert "`last`" in refusal(loop_of("kernel[(1,)](last)", "last = x[first]")).message


@pytest.mark.parametrize("line", ["first = first + 1", "n = first", "y, z = first, 2"])
def test_names_of_the_stub_and_of_the_loop_that_a_trip_binds_again_are_refused(line: str) -> None:
    # What is followed behind the first trip would have that trip's value for the last one's.
    name = line.partition(" =")[0].partition(",")[0]
    assert f"`{name}`" in refusal(loop_of(line, LAUNCH)).message


def test_a_name_that_is_read_behind_the_loop_is_refused() -> None:
    # What follows has the value of the last trip; the first one is followed.
    text = loop_of("part = x[first]", "kernel[(1,)](part)").replace("return x", "return part")
    assert "leaves `part` of its last trip to what follows" in refusal(text).message
    assert "leaves `first` of" in refusal(loop_of(LAUNCH).replace("return x", "return first")).message


@pytest.mark.parametrize("lines", [("z = x if first else y",), ("p = x[first]", "z = x if p.numel() > 2 else y")])
def test_a_choice_that_differs_between_trips_is_refused(lines: Sequence[str]) -> None:
    # The first trip's side is followed, and its gradient would be that of all trips.
    assert "in each trip" in refusal(loop_of(*lines, "kernel[(1,)](z)")).message


def test_a_choice_that_all_trips_make_alike_is_followed() -> None:
    assert flattened(loop_of("z = x if flag else y", "kernel[(1,)](z)"), "stub")[1]


# --- parts that trips have alone


def own(part: str, head: str, lines: Sequence[str] = ()) -> bool:
    text = loop_of(*lines, LAUNCH, head=head)
    flat, loops = flattened(text, "stub")
    source = StubSource(flat, "stub", ModuleType("stub"), loops, text)
    return is_own_share(ast.parse(part, mode="eval").body, loops[0], source.definition)


def meets(part: str, head: str, lines: Sequence[str] = ()) -> bool:
    """Whether two trips have an element in common, at some sizes."""
    for n in range(1, 9):
        for chunk in range(1, 5):
            x = torch.arange(n * 9).view(n, 9)
            taken: list[torch.Tensor] = []
            scope: dict[str, Any] = {"x": x, "n": n, "chunk": chunk, "taken": taken}
            body = "".join(f"    {line}\n" for line in (*lines, f"taken.append({part})"))
            try:
                exec(f"{head}\n{body}", scope)
            except IndexError:  # fewer rows than trips
                continue
            places = torch.cat([one.flatten() for one in taken]) if taken else torch.empty(0)
            if places.unique().numel() != places.numel():
                return True
    return False


CHUNKS = "for first in range(0, n, chunk):"
ROWS = "for first in range(n):"
FEW = "for first in range(3):"


@pytest.mark.parametrize(
    ("part", "head", "lines"),
    [
        ("x[first : first + chunk]", CHUNKS, ()),
        ("x[:, first : chunk + first]", CHUNKS, ()),
        ("x[first : min(first + chunk, n), 1:]", CHUNKS, ()),
        ("x[first : min(n, first + chunk)]", CHUNKS, ()),
        ("x[begin:end]", CHUNKS, ("begin = first", "end = min(begin + chunk, n)")),
        ("x[first * chunk : (first + 1) * chunk]", ROWS, ()),
        ("x[begin : begin + chunk]", ROWS, ("begin = first * chunk",)),
        ("x[first * 2 : first * 2 + 2]", "for first in range(0, n):", ()),
        ("x[first : first + 2 * chunk]", "for first in range(0, n, chunk * 2):", ()),
        ("x[chunk + first : first + 2 * chunk]", CHUNKS, ()),
        ("x[first]", ROWS, ()),
        ("x[1:, first]", FEW, ()),
        ("x[first + 1]", FEW, ()),
        ("x[2 + first]", "for first in range(0, n, 2):", ()),
        ("x[first - 1]", "for first in range(1, n):", ()),
    ],
)
def test_parts_that_follow_each_other_are_each_a_trips_own(part: str, head: str, lines: Sequence[str]) -> None:
    # Of another part the cotangent is copied and cleared, and a gradient is read, added to and written.
    assert own(part, head, lines)
    assert not meets(part, head, lines)


@pytest.mark.parametrize(
    ("part", "head", "lines"),
    [
        ("x[first:]", CHUNKS, ()),
        ("x[: first + chunk]", CHUNKS, ()),
        ("x", CHUNKS, ()),
        ("x[0:chunk]", CHUNKS, ()),
        ("x[chunk]", CHUNKS, ()),
        ("x[first : first + chunk + 1]", CHUNKS, ()),
        ("x[first - 1 : first + chunk]", CHUNKS, ()),
        ("x[first : first + chunk]", ROWS, ()),
        ("x[first * 2 : (first + 2) * 2]", ROWS, ()),
        ("x[first : max(first + chunk, n)]", CHUNKS, ()),
        ("x[begin : begin + chunk]", CHUNKS, ("begin = min(first, 2)",)),
        ("x[first - 3]", "for first in range(9):", ()),
        ("x[first // 2]", ROWS, ()),
        ("x[first % 2]", ROWS, ()),
        ("x[first : first + chunk]", "for first in range(-2 * chunk, n, chunk):", ()),
        ("x[first]", "for first in range(-2, 2):", ()),
        ("x[first]", "for first in range(0, -4, -1):", ()),
        ("x[first]", "for first in range(0, chunk - 6, chunk - 5):", ()),
        ("x[first * (3 - first) : (first + 1) * (2 - first)]", "for first in range(4):", ()),
        ("x[first - 6 : first - 2]", "for first in range(0, n + 20, 4):", ()),
        ("x[first + a : first + a + chunk]", CHUNKS, ("a, b = chunk - first, n",)),
        ("x[first + a : first + a + chunk]", CHUNKS, ("a = chunk - first", "b = a")),
    ],
)
def test_parts_in_which_trips_meet_are_nobodys_own(part: str, head: str, lines: Sequence[str]) -> None:
    # Elements that two trips read would have the gradient of one of them.
    assert meets(part, head, lines), "which trips of this part meet?"
    assert not own(part, head, lines)


@pytest.mark.parametrize(
    ("part", "head"),
    [("x[-first]", FEW), ("x[first]", "for first in range(3, -1, -1):"), ("x[first : first + chunk : 2]", CHUNKS)],
)
def test_parts_that_are_not_plain_to_tell_are_nobodys_own(part: str, head: str) -> None:
    # Counted from the end, or with a step, they may be apart; that is not for a text to tell.
    assert not own(part, head)


def test_a_place_is_counted_by_how_far_it_is_from_the_trips_number() -> None:
    # Of places below zero, or further apart than trips are, a smaller number is not behind a larger one.
    heads = ("range(n)", "range(1, n)", "range(2, n, 2)", "range(n, 9)", "range(-1, n)", "range(9, 0, -1)")
    found = {}
    for head in heads:
        (loop,) = flattened(loop_of(LAUNCH, head=f"for t in {head}:"), "stub")[1]
        places = ("t", "t + 1", "t - 1", "2 * t", "t // 1", "n", "t + n", "t : t + 1")
        nodes = [ast.parse(f"x[{place}]", mode="eval").body for place in places]
        found[head] = [counted(node.slice, loop) for node in nodes if isinstance(node, ast.Subscript)]
    nothing = [None] * 8
    assert found == {
        "range(n)": [0, 1, *nothing[2:]],
        "range(1, n)": [0, 1, -1, *nothing[3:]],
        "range(2, n, 2)": [0, 1, -1, *nothing[3:]],
        "range(n, 9)": nothing,
        "range(-1, n)": nothing,
        "range(9, 0, -1)": nothing,
    }


# --- what need not be done in each trip


def split(*lines: Line | str) -> tuple[list[str], list[str]]:
    """What is done ahead of a loop that `i` counts, and what is done in it."""
    ahead, trip = hoisted([Line(one) if isinstance(one, str) else one for one in lines], "i")
    return ["; ".join(line.shown(str, 0)) for line in ahead], ["; ".join(line.shown(str, 0)) for line in trip]


def launch(*arguments: str, writes: str) -> Line:
    return Line("kernel[(1,)](", arguments, ")", writes=(writes,))


def test_numbers_that_no_trip_changes_are_computed_once() -> None:
    ahead, trip = split(
        "BLOCK, WARPS = 16, 4", "count = triton.cdiv(n, BLOCK)", "rows = part.shape[0]", launch("count", writes="dx")
    )
    assert ahead == ["BLOCK, WARPS = 16, 4", "count = triton.cdiv(n, BLOCK)", "rows = part.shape[0]"]
    assert trip == ["kernel[(1,)](count)"]


def test_numbers_of_a_trip_are_computed_in_it() -> None:
    # By what counts the trips, or by way of what they bind or take; or bound twice, as for two launches.
    lines = (
        "part = x[i : i + 2]",
        "rows = part.shape[0]",
        "twice = rows * 2",
        "late = n - i",
        "k = 1",
        "m = k",
        "k = 2",
    )
    assert split(*lines) == ([], list(lines))


def test_memory_of_a_trip_is_allocated_in_it() -> None:
    # A part of a tensor is another one when its elements are, and what is not zero any more is not made so again.
    lines = ("room = torch.zeros_like(x)", "half = x[1:3]", "room = use(n)")
    for line in lines:
        assert split(line) == ([], [line])


def test_checks_of_what_all_trips_are_given_are_made_once() -> None:
    whole = (Line("if not w.is_contiguous():"), Line('raise ValueError("w")', depth=1))
    own = (Line("if not part.is_contiguous():"), Line('raise ValueError("part")', depth=1))
    ahead, trip = split("part = x[i]", *own, *whole)
    assert ahead == ["if not w.is_contiguous():", '    raise ValueError("w")']
    assert trip == ["part = x[i]", "if not part.is_contiguous():", '    raise ValueError("part")']


def test_other_conditions_stay() -> None:
    lines = (Line("if flag:"), Line("g = h", depth=1))
    assert split(*lines) == ([], ["if flag:", "    g = h"])


@pytest.mark.parametrize(
    "lines",
    [
        (Line("g = g.contiguous()"),),
        (Line("if g.stride() != y.stride():"), Line("g = torch.empty_like(y).copy_(g)", depth=1)),
    ],
)
def test_a_cotangent_is_laid_out_once_unless_trips_make_or_change_it(lines: Sequence[Line]) -> None:
    # In each trip it would be a look at it; ahead of what makes it, a name that is not bound, or the wrong numbers.
    shown = [line.shown(str, 0)[0] for line in lines]
    assert split(*lines, launch("g", writes="dx")) == (shown, ["kernel[(1,)](g)"])
    assert split("g = taken(i)", *lines) == ([], ["g = taken(i)", *shown])
    assert split(*lines, launch("g", writes="g")) == ([], [*shown, "kernel[(1,)](g)"])


def test_what_is_added_to_itself_is_added_in_each_trip() -> None:
    assert split("total = total + n") == ([], ["total = total + n"])


def test_the_loop_of_a_file_is_found_by_the_lines_of_both_texts() -> None:
    text = loop_of("part = x[first]", "kernel[(1,)](part)")
    flat, loops = flattened(text, "stub")
    source = StubSource(flat, "stub", ModuleType("stub"), loops, text)
    found: list[Loop | None] = [source.loop_at(line) for line in (1, 2, 4, 5)]
    assert found == [None, loops[0], loops[0], None]
    assert source.of_trips(ast.parse("first + part + n")) == ["first", "part"]
    assert "for first in" in ast.unparse(source.whole.function)
