"""`together`: launches on one grid that read tiles of the same tensors, as one launch: what both read is read once.

The kernel that gathers windows counts elements, and that of the sums beside it outputs; where there are as many
programs of one as of the other, each program has about the same part of both, and what the first part of a program
loaded is in a cache when the second one asks for it. Where few programs of the first launch take turns at what each
program of the second has, each turn does both.

The owner of rows has one program where the owner of each row's few columns has one for every column: where both read
the same tiles whatever the column is, as the cotangent of all pairs, the one program does the columns in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.plan import written_by
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant

Step = tuple[Kernel, Launch, dict[str, str]]
"""A kernel, how it is launched, and expressions of arguments that the forward did not have."""

APART = frozenset((Code.DOT, Code.WHILE, Code.LEAVE_IF, Code.TAPE_STORE))
"""Products have tiles of a size of their own, and what follows the end of a program would not run."""
FEW = 16
"""Columns that one program does in turn: of more, programs of their own are needed to fill the device."""


def together(steps: Sequence[Step]) -> list[Step]:
    """The same launches, but for those that can be part of an earlier one."""
    made: list[Step] = []
    for step in steps:
        for place, earlier in enumerate(made):
            both = _both(earlier, step, made[place + 1 :])
            if both is not None:
                made[place] = both
                break
        else:
            made.append(step)
    return made


def _both(one: Step, other: Step, between: Sequence[Step]) -> Step | None:
    """Two launches as one in the place of the first; None where that is not right or saves nothing."""
    if launch_of(one).grid != launch_of(other).grid:
        for lone, several in ((one, other), (other, one)):
            columns = _columns(lone, several)
            if columns is not None and _independent(one, other, between):
                return _in_columns(lone, several, columns)
    turns, few, each = None, one, other
    if launch_of(one).grid != launch_of(other).grid:
        for few, each in ((one, other), (other, one)):
            turns = _turns(few, each)
            if turns is not None:
                break
        else:
            return None
    if any(op.code in APART for kernel, _, _ in (one, other) for op in kernel.ops):
        return None
    if not _independent(one, other, between):
        return None
    (kernel, launch, scalars), (second, second_launch, second_scalars) = few, each
    known = {value.name: value for value in kernel.arguments}
    same = {value: known.get(value.name, value) for value in second.arguments}
    numbers = {**launch.scalars, **second_launch.scalars}
    joint = prune(_joined(kernel, second, same, turns))
    joint.name = one[0].name
    return joint, Launch(launch.grid, numbers, launch.calls), {**scalars, **second_scalars}


def launch_of(step: Step) -> Launch:
    """Of a step."""
    return step[1]


def _independent(one: Step, other: Step, between: Sequence[Step]) -> bool:
    """Whether the second of two launches may run with the first, in front of those between, and they mean the same by
    what they name alike."""
    (first, launch, scalars), (second, second_launch, second_scalars) = one, other
    written = [set(written_by(kernel)) for kernel in (first, second)]
    if written[0] & written[1] or not (_tiles(first) & _tiles(second)) - written[0] - written[1]:
        return False
    if any(set(written_by(kernel)) & _loaded(second) for kernel, _, _ in (one, *between)):
        return False
    if any(written[1] & (_loaded(kernel) | set(written_by(kernel))) for kernel, _, _ in (one, *between)):
        return False
    if any(first.extents.get(size, name) != name for size, name in second.extents.items()):
        return False
    if any(first.constants.get(name, number) != number for name, number in second.constants.items()):
        return False
    known = {value.name: value.element for value in first.arguments}
    if any(known.get(value.name, value.element) != value.element for value in second.arguments):
        return False
    if any(scalars[name] != text for name, text in second_scalars.items() if name in scalars):
        return False
    return not any(second_launch.scalars.get(name, extent) != extent for name, extent in launch.scalars.items())


def _loaded(kernel: Kernel) -> set[str]:
    """What a kernel reads, tapes apart."""
    adds = (Code.STORE, Code.STORE_BLOCK, Code.ATOMIC_ADD)
    return {op.base.name for op in kernel.ops if "base" in op.attributes and op.code not in adds}


def _tiles(kernel: Kernel) -> set[str]:
    """What a kernel loads tiles of."""
    return {op.base.name for op in kernel.ops if op.code is Code.LOAD and op.result.shape}


@dataclass(frozen=True)
class _Columns:
    """What one program does in turn."""

    axis: int
    """Of the grid, whose programs would each have one."""
    count: Polynomial


def _columns(lone: Step, several: Step) -> _Columns | None:
    """The axis along which a launch has one program, and another one a few that load the same tiles of two axes as the
    one program does; None where there is no such axis. Products of theirs keep programs of their own."""
    (_, launch, _), (kernel, other, _) = lone, several
    apart = [axis for axis, (one, all_of) in enumerate(zip(launch.grid, other.grid, strict=False)) if one != all_of]
    if len(launch.grid) != len(other.grid) or len(apart) != 1:
        return None
    (axis,) = apart
    count = other.grid[axis]
    most = other.calls.at_work(count.text()) or other.calls.most(count.text())
    if launch.grid[axis] != ONE or not count.printable or most is None or most > FEW:
        return None
    if any(
        op.code is Code.NUM_PROGRAMS and op.attributes["axis"] == axis for one in (kernel, lone[0]) for op in one.ops
    ):
        return None
    if any(op.code in APART for op in kernel.ops) or any(op.code in APART - {Code.DOT} for op in lone[0].ops):
        return None
    forms, theirs = Forms(kernel, other), _planes(lone[0])
    shared = [op for op in kernel.ops if op.code is Code.LOAD and len(op.result.shape) > 1 and op.base.name in theirs]
    same = [op for op in shared if forms.program(axis) not in forms.reads(op.offset)]
    return _Columns(axis, count) if same else None


def _planes(kernel: Kernel) -> set[str]:
    """What a kernel loads tiles of two axes of."""
    return {op.base.name for op in kernel.ops if op.code is Code.LOAD and len(op.result.shape) > 1}


def _in_columns(lone: Step, several: Step, columns: _Columns) -> Step:
    """The one program's work, and then that of the others in turn."""
    (first, launch, scalars), (second, other, other_scalars) = lone, several
    known = {value.name: value for value in first.arguments}
    same = {value: known.get(value.name, value) for value in second.arguments}
    arguments = list(dict.fromkeys((*first.arguments, *same.values())))
    names = {value.name: value for value in arguments}
    column = next(
        op.result for op in second.ops if op.code is Code.PROGRAM_ID and op.attributes["axis"] == columns.axis
    )
    count = names.get(columns.count.text())
    numbers = {**launch.scalars, **other.scalars}
    told = {**scalars, **other_scalars}
    if count is None:
        name = f"num_{column.name or 'columns'}"
        while name in names or first.free_name(name) != name or second.free_name(name) != name:
            name += "_"
        count = Value("i32", (), name)
        arguments.append(count)
        numbers, told = {**numbers, name: columns.count}, {**told, name: columns.count.text()}
    made = Kernel(
        f"{first.name}_{'_'.join(written_by(second))}",
        arguments,
        extents={**first.extents, **second.extents},
        constants={**first.constants, **second.constants},
        fixed=first.fixed | second.fixed,
    )
    b = Builder(made, frozenset((*written_to(first.body), *(same[value] for value in written_to(second.body)))))
    Copier(first, b).block(first.body)

    def turn(index: Value, _: list[Value]) -> list[Value]:
        behind = _Turn(second, b, columns.axis, index)
        for old, new in same.items():
            behind[old] = new
        behind.block(second.body)
        return []

    zero = b.zero(count)
    b.loop((zero, count, b.const(1, count.element)), [], turn, index_name=column.name)
    return prune(made), Launch(launch.grid, numbers, launch.calls), told


@dataclass(frozen=True)
class _Turns:
    """What few programs take turns at."""

    loop: Op
    axis: int
    """Of the grid, whose programs would each have one turn."""


def _turns(few: Step, each: Step) -> _Turns | None:
    """The turns of the first launch that are the programs of the second one; None where it has none, or where the
    second asks how many programs there are."""
    (kernel, launch, _), (second, other, _) = few, each
    apart = [axis for axis, (some, all_of) in enumerate(zip(launch.grid, other.grid, strict=False)) if some != all_of]
    if len(launch.grid) != len(other.grid) or len(apart) != 1:
        return None
    (axis,) = apart
    if any(op.code is Code.NUM_PROGRAMS and op.attributes["axis"] == axis for op in second.ops):
        return None
    for loop in kernel.body.ops:
        if loop.code is not Code.FOR or launch.scalars.get(loop.operands[1].name) != other.grid[axis]:
            continue
        start, stop, step = (value.producer for value in loop.operands[:3])
        own = start is not None and start.code is Code.PROGRAM_ID and start.attributes["axis"] == axis
        by_all = step is not None and step.code is Code.NUM_PROGRAMS and step.attributes["axis"] == axis
        if own and by_all and stop is None:
            return _Turns(loop, axis)
        alone = launch.grid[axis] == ONE and [constant(loop.operands[place]) for place in (0, 2)] == [0, 1]
        # One program in the place of many keeps them waiting for what it loads, but not for what it stores.
        if alone and stop is None and _loads(loop.blocks[0].ops) >= _large(second):
            return _Turns(loop, axis)
    return None


def _loads(ops: Iterable[Op]) -> set[tuple[str, int]]:
    """Tiles that are loaded: of what, and of how many lanes."""
    return {(op.base.name, math.prod(op.result.shape)) for op in ops if op.code is Code.LOAD and op.result.shape}


def _large(kernel: Kernel) -> set[tuple[str, int]]:
    """Those that are as large as any."""
    loads = _loads(kernel.ops)
    return {one for one in loads if one[1] == max(lanes for _, lanes in loads)}


def _joined(first: Kernel, second: Kernel, same: dict[Value, Value], turns: _Turns | None) -> Kernel:
    """One kernel after the other, or with `turns` one turn of it after the other's. `same`: arguments of the second as
    they are called then."""
    arguments = list(dict.fromkeys((*first.arguments, *same.values())))
    made = Kernel(
        first.name,
        arguments,
        extents={**first.extents, **second.extents},
        constants={**first.constants, **second.constants},
        fixed=first.fixed | second.fixed,
    )
    written = {*written_to(first.body), *(same[value] for value in written_to(second.body))}
    b = Builder(made, frozenset(written))
    if turns is not None:
        _InTurns(first, b, turns, second, same).block(first.body)
        return made
    Copier(first, b).block(first.body)
    behind = Copier(second, b)
    for old, new in same.items():
        behind[old] = new
    behind.block(second.body)
    return made


class _InTurns(Copier):
    """Copies a kernel with another one in a loop of its own."""

    def __init__(self, source: Kernel, b: Builder, turns: _Turns, other: Kernel, same: dict[Value, Value]) -> None:
        super().__init__(source, b)
        self.turns = turns
        self.other = other
        self.same = same

    def entered(self, op: Op) -> None:
        """A turn: what the other kernel stores, then what this one sums."""
        if op is not self.turns.loop:
            return
        turn = _Turn(self.other, self.b, self.turns.axis, self[op.blocks[0].arguments[0]])
        for old, new in self.same.items():
            turn[old] = new
        turn.block(self.other.body)


class _Turn(Copier):
    """Copies the work of one program, whose number along an axis is a turn."""

    def __init__(self, source: Kernel, b: Builder, axis: int, turn: Value) -> None:
        super().__init__(source, b)
        self.axis = axis
        self.turn = turn

    def pure(self, op: Op) -> None:
        """Numbers of programs."""
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] == self.axis:
            self[op.result] = self.b.cast(self.turn, op.result.element)
        else:
            super().pure(op)
