"""A backward skips what only serves gradients that nobody needs, and nothing else."""

from __future__ import annotations

from typing import Any

from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.needs import sparing

FLAGS = ["need_x", "need_w"]


def launch(name: str, *arguments: str, writes: tuple[str, ...]) -> Line:
    return Line(f"{name}(", arguments, ")", writes=writes)


BODY = [
    Line("if not size > 0:"),
    Line('raise ValueError("size")', depth=1),
    Line("BLOCK, num_warps = 64, 4"),
    Line("shared = make()"),
    launch("first", "grad", "shared", writes=("shared",)),
    Line("dx = make()"),
    launch("second", "shared", "dx", writes=("dx",)),
    Line("rows = make()"),
    launch("third", "grad", "shared", "rows", writes=("rows",)),
    Line("rows.zero_()"),
    Line("dw = total(rows)"),
]


def ran(needs: tuple[bool, bool]) -> tuple[list[str], tuple[Any, Any]]:
    """Which functions ran, in order, and what was returned."""
    found = sparing(BODY, ["dx", "dw.to(half)"], FLAGS)
    assert found is not None
    text = "\n".join(row for line in found.body for row in line.shown(str, 0))
    called: list[str] = []

    class Room:
        def zero_(self) -> None:
            called.append("zero_")

        def to(self, _: object) -> str:
            return "dw"

    scope = {name: lambda *_, name=name: called.append(name) for name in ("first", "second", "third")}
    scope |= {"make": Room, "total": lambda room: room, "grad": 0, "half": 0, "size": 1}  # type: ignore[dict-item]
    scope |= dict(zip(FLAGS, needs, strict=True))  # type: ignore[arg-type]
    exec(text, scope)
    return called, tuple(eval(one, scope) for one in found.results)  # type: ignore[return-value]


def test_everything_runs_where_everything_is_needed() -> None:
    assert ran((True, True))[0] == ["first", "second", "third", "zero_"]


def test_what_the_other_gradient_alone_needs_is_skipped_with_its_statements() -> None:
    # `first` fills what both read; a slice by what is assigned alone would miss that a launch writes to its arguments
    called, (dx, dw) = ran((True, False))
    assert called == ["first", "second"]
    assert dx is not None
    assert dw is None
    called, (dx, dw) = ran((False, True))
    assert called == ["first", "third", "zero_"]
    assert dx is None
    assert dw == "dw"


def test_what_one_gradient_alone_needs_stands_under_one_condition() -> None:
    found = sparing(BODY, ["dx", "dw"], FLAGS)
    assert found is not None
    assert found.body[:2] == BODY[:2], "checks are made whatever is needed"
    assert [line.opening for line in found.body if line.opening.startswith("if need")] == ["if need_x:", "if need_w:"]


def test_a_backward_whose_launches_all_serve_every_gradient_is_left_alone() -> None:
    body = [Line("dx = make()"), Line("dw = make()"), launch("one", "dx", "dw", writes=("dx", "dw"))]
    assert sparing([*body, Line("total_of_w = total(dw)")], ["dx", "total_of_w"], FLAGS) is None


def ran_in_loop(trip: list[Line], results: list[str], needs: tuple[bool, bool]) -> list[str]:
    """Which functions two trips of a loop run, in order."""
    found = sparing([Line("for i in range(2):"), *(line.deeper() for line in trip)], results, FLAGS)
    assert found is not None
    called: list[str] = []

    class Room:
        def __getitem__(self, _: object) -> Room:
            return self

    names = {line.opening[:-1] for line in trip if line.writes}
    scope: dict[str, Any] = {name: lambda *_, name=name: called.append(name) for name in names}
    scope |= {name: Room() for name in ("dx", "dw", "grad", "shared", "early", "later")}
    scope |= dict(zip(FLAGS, needs, strict=True))
    exec("\n".join(row for line in found.body for row in line.shown(str, 0)), scope)
    return called


SHARED = launch("first", "grad", "shared", writes=("shared",))


def test_what_one_gradient_alone_needs_is_skipped_in_each_trip() -> None:
    # A loop that serves both gradients as a whole would run all of its launches for either of them.
    trip = [
        SHARED,
        launch("second", "shared", "dx", writes=("dx",)),
        launch("third", "grad", "shared", "dw", writes=("dw",)),
    ]
    assert ran_in_loop(trip, ["dx", "dw"], (True, True)) == ["first", "second", "third"] * 2
    assert ran_in_loop(trip, ["dx", "dw"], (True, False)) == ["first", "second"] * 2
    assert ran_in_loop(trip, ["dx", "dw"], (False, True)) == ["first", "third"] * 2


def test_a_loop_that_one_gradient_alone_needs_is_skipped() -> None:
    found = sparing(
        [
            Line("for i in range(2):"),
            launch("first", "grad", "dx", writes=("dx",)).deeper(),
            launch("second", "grad", "dw", writes=("dw",)),
        ],
        ["dx", "dw"],
        FLAGS,
    )
    assert found is not None
    assert [row for line in found.body for row in line.shown(str, 0)] == [
        "if need_x:",
        "    for i in range(2):",
        "        first(grad, dx)",
        "if need_w:",
        "    second(grad, dw)",
    ]


def test_what_is_written_to_a_part_is_written_to_the_whole() -> None:
    # Nothing reads the part again: what writes to it would serve no gradient, and so be kept for either, or for none.
    trip = [
        Line("part = dx[i : i + 1]"),
        Line("row = part[0]"),
        launch("first", "grad", "row", writes=("row",)),
        launch("second", "grad", "dw", writes=("dw",)),
    ]
    assert ran_in_loop(trip, ["dx", "dw"], (True, False)) == ["first"] * 2
    assert ran_in_loop(trip, ["dx", "dw"], (False, True)) == ["second"] * 2


def test_a_launch_that_a_later_trip_needs_is_made() -> None:
    # In the text its reader stands before it. What it writes is read behind the loop for the other gradient, too: read
    # once, from the last statement to the first, it serves that one alone.
    trip = [
        launch("third", "later", "dx", writes=("dx",)),
        launch("second", "early", "later", writes=("later",)),
        launch("first", "grad", "early", writes=("early",)),
        launch("fourth", "grad", "dw", writes=("dw",)),
    ]
    called = ran_in_loop(trip, ["dx", "(dw, early, later)"], (True, False))
    assert called == ["third", "second", "first"] * 2
    assert "third" not in ran_in_loop(trip, ["dx", "(dw, early, later)"], (False, True))


def test_a_loop_whose_launches_all_serve_every_gradient_is_left_alone() -> None:
    # What the next trip serves is known when all have been asked: before, each launch but the last serves one gradient.
    trip = [launch("first", "dw", "dx", writes=("dx",)), launch("second", "dx", "dw", writes=("dw",))]
    assert sparing([Line("for i in range(2):"), *(line.deeper() for line in trip)], ["dx", "dw"], FLAGS) is None


def test_what_is_read_ahead_of_a_loop_that_changes_it_by_parts_stays_ahead() -> None:
    # A copy without effects waits for the other statements of its gradient, but not until its original is overwritten.
    copied = Line("kept = grad.clone()")
    trip = [Line("part = grad[i]"), launch("first", "part", "dx", writes=("part", "dx"))]
    body = [copied, Line("for i in range(2):"), *(line.deeper() for line in trip)]
    found = sparing([*body, launch("second", "kept", "dw", writes=("dw",))], ["dx", "dw"], FLAGS)
    assert found is not None
    shown = [line.opening for line in found.body]
    assert shown.index(copied.opening) < shown.index("for i in range(2):")
