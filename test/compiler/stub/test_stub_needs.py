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
