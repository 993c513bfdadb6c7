"""`parted`: an axis of the grid that a kernel itself divides, as two axes.

`head // GROUP` tells which keys a head of queries reads: all heads of a group add to the same. With groups and members
as axes of their own, the one can become programs of an owner and the other its loop. A grid of more than three axes is
no grid: what is parted is only for owners to be cut from, and these take three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.forms import Forms, Launch, quotient
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath

MOST_AXES = 6
"""Of what is parted."""


@dataclass(frozen=True)
class Parted:
    """The same work on a grid of more axes."""

    kernel: Kernel
    launch: Launch
    facts: tuple[str, ...]
    """Python: parts are as large as each other."""


@dataclass(frozen=True)
class _Cut:
    """program = quotient * width + remainder."""

    axis: int
    """Of the quotients from now on."""
    width: Value
    count: Polynomial
    """The width as a number of the launch."""
    fact: str


def parted(kernel: Kernel, launch: Launch) -> Parted | None:
    """The kernel with an axis for every quotient and remainder that it takes of numbers of programs; None for none."""
    facts: dict[str, None] = {}
    while len(launch.grid) < MOST_AXES:
        cut = next(_cuts(Forms(kernel, launch)), None)
        if cut is None:
            break
        whole = launch.grid[cut.axis]
        grid = [*launch.grid, cut.count]
        grid[cut.axis] = quotient(whole, cut.count)
        kernel = prune(_Parter(kernel, launch, cut).copy())
        launch = replace(launch, grid=tuple(grid))
        facts[cut.fact] = None
    return Parted(kernel, launch, tuple(facts)) if facts else None


def _cuts(forms: Forms) -> Iterator[_Cut]:
    """Divisions of numbers of programs by what a launch fixes and fits."""
    launch = forms.launch
    for op in forms.kernel.ops:
        axis = _divided(op)
        count = None if axis is None else forms.of(op.operands[1]).invariant
        if axis is None or count is None or not count.printable or not launch.grid[axis].printable:
            continue
        fact = f"({launch.grid[axis].text()}) % ({count.text()}) == 0"
        if not launch.calls.refute((fact,)):
            yield _Cut(axis, op.operands[1], count, fact)


def _divided(op: Op) -> int | None:
    """The axis whose number of a program an operation divides."""
    if op.code not in (Code.FLOORDIV, Code.REM) or op.result.shape:
        return None
    value = beneath(op.operands[0], (Code.CAST,))
    if value.producer is None or value.producer.code is not Code.PROGRAM_ID:
        return None
    axis: int = value.producer.attributes["axis"]
    return axis


class _Parter(Copier):
    """Puts programs of two axes in the place of quotients, remainders and numbers of one."""

    def __init__(self, source: Kernel, launch: Launch, cut: _Cut) -> None:
        super().__init__(source)
        self.forms = Forms(source, launch)
        self.cut = cut
        self.added = len(launch.grid)

    def pure(self, op: Op) -> None:
        """Programs."""
        b, cut = self.b, self.cut
        if _divided(op) == cut.axis and self.forms.of(op.operands[1]).invariant == cut.count:
            part = cut.axis if op.code is Code.FLOORDIV else self.added
            self[op.result] = b.cast(b.program_id(part, op.result.name), op.result.element)
        elif op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS) and op.attributes["axis"] == cut.axis:
            width = b.cast(self[cut.width], "i32")
            if op.code is Code.NUM_PROGRAMS:
                self[op.result] = b.mul(b.num_programs(cut.axis), width)
            else:
                self[op.result] = b.add(b.mul(b.program_id(cut.axis), width), b.program_id(self.added))
        else:
            super().pure(op)
