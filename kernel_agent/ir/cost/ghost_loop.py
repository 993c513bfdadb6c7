"""Walks all iterations of a loop at once, where every one of them can be reached directly.

What an address depends on in a loop nearly always grows by the same amount in each iteration. That is assumed from the
first iteration, every iteration is then walked as if it were a program of its own, and the assumption is proven by
induction: each iteration must hand on exactly what the next one was assumed to start with. If one does not, nothing of
the attempt is kept and the loop is walked iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_agent.ir.cost.lazy import Absent, Sum, lazy_sum, merged, terms_of
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue, join_rows, take_rows

if TYPE_CHECKING:
    from kernel_agent.ir.cost.ghost import GhostMachine

_WORTH = 4
"""Loops that turn less often are walked iteration by iteration."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)

Line = list[Tensor]
"""Integer terms of a number that grows with the iterations."""


class Crooked(Exception):
    """A carried value does not grow by the same amount in each iteration."""


class Vanished(Exception):
    """Carried values that trips choose by data, an argmax say: they are known before the first trip only."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(places)
        self.places = places
        """Among what the loop carries."""


def walk_loop(
    machine: GhostMachine, op: Op, operands: Sequence[RuntimeValue], active: Active, together: int
) -> list[RuntimeValue]:
    """The results of an `scf.for`.

    Raises `Crooked` when its iterations cannot be walked at once, `Vanished` when carried values must be `ABSENT` from
    the start for that.
    """
    low, high, step = (value.to(torch.int64) for value in operands[:3])
    trips = (high - low + step - 1).div(step, rounding_mode="floor").clamp(min=0).expand(active.size)
    if int(trips.max()) < _WORTH:
        raise Crooked
    body, carried = op.regions[0][0], list(operands[3:])

    def iterate(rows: Tensor, turn: Tensor, values: list[RuntimeValue]) -> list[RuntimeValue]:
        counter = take_rows(low, rows) + turn * take_rows(step, rows)
        if bool((counter == counter[:1]).all()):
            counter = counter[:1]
        return machine.run_values(body, [counter.to(body.arguments[0].type.dtype), *values], active.subset(rows))

    begun = (trips > 0).nonzero().flatten()
    start = [take_rows(value, begun) for value in carried]
    second = iterate(begun, torch.zeros(begun.numel(), dtype=torch.int64), start)
    gone = tuple(
        place
        for place, (a, b) in enumerate(zip(start, second, strict=True))
        if isinstance(b, Absent) and not isinstance(a, Absent)
    )
    if gone:
        raise Vanished(gone)
    paths = [None if isinstance(a, Absent) else _Path(a, b) for a, b in zip(start, second, strict=True)]
    place = torch.zeros(active.size, dtype=torch.int64)
    place[begun] = torch.arange(begun.numel())
    for rows, turn in _iterations(trips, begun, together, machine):
        mine = place[rows]
        values = [a if path is None else path.at(mine, turn) for a, path in zip(start, paths, strict=True)]
        after = iterate(rows, turn, values)
        for path, value in zip(paths, after, strict=True):
            if path is not None and not path.passes(mine, turn + 1, value):
                raise Crooked
    everyone = torch.arange(begun.numel())
    ends = [a if path is None else path.at(everyone, trips[begun]) for a, path in zip(start, paths, strict=True)]
    idle = (trips == 0).nonzero().flatten()
    if not idle.numel():
        return ends
    stayed = [take_rows(value, idle) for value in carried]
    return [join_rows([(begun, a), (idle, b)], active.size) for a, b in zip(ends, stayed, strict=True)]


def _iterations(trips: Tensor, begun: Tensor, together: int, machine: GhostMachine) -> list[tuple[Tensor, Tensor]]:
    """All iterations but the first, in the order of turns: pieces of (position of the program, turn).

    Last turns, where masks cut tails off, are apart from the others, where they do not.
    """
    more = trips - 1
    rows = torch.repeat_interleave(begun, more[begun])
    starts = more[begun].cumsum(0) - more[begun]
    turn = torch.arange(rows.numel()) - torch.repeat_interleave(starts, more[begun]) + 1
    order = turn.argsort(stable=True)
    rows, turn = rows[order], turn[order]
    size = max(1, together // machine.widest)
    last = turn == more[rows]
    pieces: list[tuple[Tensor, Tensor]] = []
    for part in (~last, last):
        pieces += zip(rows[part].split(size), turn[part].split(size), strict=True)
    return [piece for piece in pieces if piece[0].numel()]


class _Path:
    """A carried value that is assumed to grow by the same amount each time."""

    def __init__(self, first: RuntimeValue, second: RuntimeValue) -> None:
        self.first = first
        if _frame(first) != _frame(second):
            raise Crooked
        a, b = _numbers(first), _numbers(second)
        if len(a) != len(b):
            raise Crooked
        self.lines = a
        self.steps = [_difference(x, y) for x, y in zip(a, b, strict=True)]

    def at(self, rows: Tensor, turn: Tensor) -> RuntimeValue:
        """The value that programs start an iteration with."""
        found = []
        for line, growth in zip(self.lines, self.steps, strict=True):
            steps = [take_rows(term, rows) * turn.view(-1, *[1] * (term.dim() - 1)) for term in growth]
            found.append([*(take_rows(term, rows) for term in line), *steps])
        return _rebuilt(self.first, found)

    def passes(self, rows: Tensor, turn: Tensor, value: RuntimeValue) -> bool:
        """Whether the value is the one assumed for that turn."""
        if _frame(value) != _frame(self.first):
            return False
        wanted = _numbers(self.at(rows, turn))
        return all(_equal(a, b) for a, b in zip(_numbers(value), wanted, strict=True))


def _frame(value: RuntimeValue) -> tuple[object, ...]:
    """What of a value does not change with its numbers."""
    if isinstance(value, Pointer):
        return ("pointer", id(value.buffer), value.view)
    if isinstance(value, BlockPointer):
        return (
            "block",
            id(value.base.buffer),
            value.base.view,
            value.pad_nan,
            len(value.extents),
            len(value.strides),
            len(value.offsets),
        )
    if isinstance(value, Sum) or (isinstance(value, Tensor) and value.dtype in _INTEGERS):
        return ("number", value.dtype)
    raise Crooked


def _numbers(value: RuntimeValue) -> list[Line]:
    """The integers that make up a value, each as terms."""
    if isinstance(value, Pointer):
        return [_line(value.offset)]
    if isinstance(value, BlockPointer):
        parts = (*value.extents, *value.strides, *value.offsets)
        return [_line(value.base.offset), *(_line(part) for part in parts)]
    return [_line(value)]


def _line(value: RuntimeValue) -> Line:
    return [term.to(torch.int64) for term in terms_of(value)]


def _rebuilt(like: RuntimeValue, numbers: list[Line]) -> RuntimeValue:
    if isinstance(like, Pointer):
        return replace(like, offset=lazy_sum(numbers[0], torch.int64))
    if isinstance(like, BlockPointer):
        base, *rest = [sum(line[1:], line[0]) for line in numbers]
        extents, strides = len(like.extents), len(like.strides)
        return replace(
            like,
            base=replace(like.base, offset=base),
            extents=rest[:extents],
            strides=rest[extents : extents + strides],
            offsets=rest[extents + strides :],
        )
    return lazy_sum(numbers[0], like.dtype)


def _difference(a: Line, b: Line) -> list[Tensor]:
    """Terms of b - a, what is equal all over a tile as a term of its own. Terms that cancel are left out."""
    found, level = [], torch.zeros((1,) * a[0].dim(), dtype=torch.int64)
    for term in merged([*b, *(-term for term in a)], torch.add):
        head = term[tuple(slice(0, 1) if dim else slice(None) for dim in range(term.dim()))]
        level = level + head
        varying = term - head
        if bool(varying.any()):
            found.append(varying)
    return [*found, level] if bool(level.any()) else found


def _equal(a: Line, b: Line) -> bool:
    return not _difference(a, b)
