"""`checkpointed`: long recurrences leave what they carry once for each segment of trips, not for each trip.

The tape of n trips is n tiles of memory. Of a loop that is cut into segments of s trips the way back needs a tile for
each segment, and a tape of one segment, which the next one uses again: n / s + s tiles, least at s = sqrt(n), for a
second run of the forward (Griewank, Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation, 1992, with one level). Where that is more than half of what the trips load, segments are cut
once more: three tapes of the cube root of n tiles, for a third run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.extents import Extents
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk

LONG = 12
"""Trips from which a tape of segments is much shorter."""
LIGHT = 8
"""How many times a tape's tile a trip must load, or compute in one tile, for it not to matter."""
LONGER = 512
"""Trips from which tapes of segments of segments are much shorter."""
EVALUATED = 4
"""Trips of a segment, or segments of one, where a kernel is evaluated."""


@dataclass(frozen=True)
class Checkpointed:
    """A forward with the same results, whose recurrences go from segment to segment."""

    kernel: Kernel
    settings: Mapping[str, str]
    """Constexprs with the trips of a segment, powers of two, as in a plan."""


def checkpointed(kernel: Kernel, adjoint: Adjoint, calls: Calls) -> Checkpointed | None:
    """The forward with its long recurrences in segments; None where it has none.

    `adjoint`: of the kernel, whose tapes say which loops are recurrences. `calls`: launches that were seen: which loops
    are long, or will be at sizes of real work, is known of those alone.
    """
    tiles: dict[Op, int] = {}
    for tape in adjoint.tapes:
        loop = adjoint.recurrences.get(tape.name)
        if loop is not None and loop.code is Code.FOR:
            tiles[loop] = tiles.get(loop, 0) + math.prod(tape.shape)
    heavy = {loop for loop, lanes in tiles.items() if LIGHT * lanes >= max(_loaded(loop), _largest(loop))}
    extents = Extents({op.blocks[0].arguments[0]: op for op in kernel.ops if op.code is Code.FOR})
    segments = _Segments(kernel)
    for loop in _outermost(kernel.body, heavy):
        trips = trips_of(loop, extents)
        many = (calls.foreseen(trips) or 0) if trips else 0
        twice = many >= LONGER and 8 * math.isqrt(many) * tiles[loop] > many * _loaded(loop)
        if many >= LONG:
            root = "(1 / 3)" if twice else "0.5"
            segments.cut(loop, f"triton.next_power_of_2(max(int({trips} ** {root}), 1))", twice=twice)
    return Checkpointed(segments.copy(), segments.settings) if segments.settings else None


def _loaded(loop: Op) -> int:
    """Elements that a trip loads."""
    return sum(math.prod(op.result.shape) for op in walk(loop.blocks[0]) if op.code is Code.LOAD)


def _largest(loop: Op) -> int:
    """Elements of the largest tile of numbers that a trip computes, as those whose sum a bisection compares."""
    results = [value for op in walk(loop.blocks[0]) for value in op.results]
    return max((math.prod(value.shape) for value in results if value.is_float), default=0)


def _outermost(block: Block, loops: set[Op]) -> list[Op]:
    """Those of some loops that stand in none of the others."""
    found = []
    for op in block.ops:
        if op in loops:
            found.append(op)
        else:
            found += [inner for nested in op.blocks for inner in _outermost(nested, loops)]
    return found


def trips_of(loop: Op, extents: Extents) -> str:
    """An expression of the trips of a loop; empty where nobody knows how many."""
    try:
        return extents.trips(loop)
    except CannotDerive:
        return ""


class _Segments(Copier):
    """Writes some loops as a loop over segments with one over the trips of a segment."""

    def __init__(self, source: Kernel) -> None:
        super().__init__(source)
        self.names: dict[Op, list[str]] = {}
        """By loop: the constexprs with the trips of a segment, and with the segments of one that is cut itself."""
        self.settings: dict[str, str] = {}

    def cut(self, loop: Op, size: str, *, twice: bool = False) -> None:
        """Cut a loop into segments. `size`: the expression of their trips. `twice`: of as many segments of trips."""
        self.names[loop] = []
        for wanted in ("SEGMENT", "SEGMENTS")[: 1 + twice]:
            taken = {value.name for value in self.source.arguments} | set(self.b.kernel.constants)
            name = free_name(wanted, taken)
            self.names[loop].append(name)
            self.settings[name] = size
            self.b.kernel.constants[name] = EVALUATED

    def loop(self, op: Op) -> None:
        """A FOR."""
        if op not in self.names:
            super().loop(op)
            return
        b, (block,) = self.b, op.blocks
        start, stop, step = self.all(op.operands[:3])
        names = [value.name for value in block.arguments[1:]]
        strides = [step]
        for name in self.names[op]:
            strides.append(b.mul(strides[-1], b.cast(b.setting(name, EVALUATED), step.element)))

        def trip(index: Value, carries: list[Value]) -> list[Value]:
            self.enter(block.arguments, (index, *carries))
            return self.block(block)

        def trips(level: int, first: Value, end: Value, carries: list[Value]) -> tuple[Value, ...]:
            """Of a segment, or segments of one, from a trip on."""
            if level == 0:
                index = block.arguments[0].name
                return b.loop((first, end, step), carries, trip, index_name=index, names=names, **op.attributes)

            def segment(inner: Value, carried: list[Value]) -> tuple[Value, ...]:
                last = b.elementwise(Code.MIN, (end, b.add(inner, strides[level])))
                return trips(level - 1, inner, last, carried)

            attributes = {**op.attributes, "tape": None}
            bounds = (first, end, strides[level])
            return b.loop(bounds, carries, segment, index_name="segment", names=names, **attributes)

        starts = [self.whole(value) for value in op.operands[3:]]
        self.results(op, trips(len(strides) - 1, start, stop, starts))
