"""Tapes become memory: one tile for every program and trip.

What is stored by some threads may be loaded by others, so a barrier stands between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.plan import Buffer, Fill
from kernel_agent.compiler.reverse.adjoint import Tape
from kernel_agent.compiler.reverse.extents import Extents, segment_size
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.programs import program_number
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import tapes_of, written_to
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, beneath, is_setting


@dataclass(frozen=True)
class Lowered:
    """A kernel whose tapes are arguments."""

    kernel: Kernel
    """With the arguments it had, then one pointer for each tape, then the extents of tapes."""
    buffers: tuple[Buffer, ...] = ()
    scalars: dict[str, str] = field(default_factory=dict)
    """Expressions of the new scalar arguments, for `Step.scalars`."""


def tapes(kernel: Kernel) -> tuple[Tape, ...]:
    """The tapes that a kernel stores. Loops around both the stores and the loads use them again in every trip."""
    stores = _around(kernel.body, Code.TAPE_STORE)
    loads = _around(kernel.body, Code.TAPE_LOAD)
    found = []
    for name, (op, around) in stores.items():
        shared = loads[name][1] if name in loads else ()
        (value,) = op.operands
        trips = tuple(loop for loop in around if loop not in shared)
        found.append(Tape(name, value.element, value.shape, trips))
    return tuple(found)


def lower_tapes(kernel: Kernel, axes: int = 3) -> Lowered:
    """Put tapes into memory, which the launch allocates. `axes`: of its grid.

    Raises CannotDerive where a launch cannot know how long a tape gets.
    """
    wanted = tapes(kernel)
    if not wanted:
        return Lowered(kernel)
    loops = {op.blocks[0].arguments[0]: op for op in kernel.ops if op.code is Code.FOR}
    extents = Extents(loops)
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    pointers, counts, scalars, buffers = {}, {}, {}, []
    for tape in wanted:
        pointers[tape.name] = Value(f"*{_held(tape.element)}", (), _called(tape, taken))
        shape = [f"grid{axis}" for axis in range(axes)]
        for loop in tape.trips:
            expression = extents.trips(loop)
            if loop not in counts and (loop.code is not Code.FOR or segment_size(loop) is None):
                counts[loop] = Value("i32", (), free_name(_stem(loop.attributes.get("tape") or "trips"), taken))
                scalars[counts[loop].name] = expression
            shape.append(expression)
        shape.extend(kernel.extents.get(extent, str(extent)) for extent in tape.shape)
        buffers.append(Buffer(pointers[tape.name].name, _held(tape.element), Fill.EMPTY, shape=tuple(shape)))
    arguments = [*kernel.arguments, *pointers.values(), *counts.values()]
    lowered = _Lowering(kernel, arguments, {tape.name: tape for tape in wanted}, pointers, counts, axes).copy()
    return Lowered(lowered, tuple(buffers), scalars)


class _Lowering(Copier):
    """Copies a kernel, with memory for tapes."""

    def __init__(
        self,
        source: Kernel,
        arguments: Sequence[Value],
        known: dict[str, Tape],
        pointers: dict[str, Value],
        counts: dict[Op, Value],
        axes: int,
    ) -> None:
        written = written_to(source.body) | frozenset(pointers.values())
        super().__init__(source, Builder(emptied(source, arguments=arguments), written))
        self.known = known
        self.pointers = pointers
        self.counts = counts
        self.axes = axes
        self._around: list[tuple[Op, Value]] = []
        """Loops around what is copied: with the source's index of a FOR, the copy's number of the trip of a WHILE."""

    def effect(self, op: Op) -> None:
        """A TAPE_STORE becomes a STORE."""
        if op.code is not Code.TAPE_STORE:
            super().effect(op)
            return
        tape = self.known[op.attributes["tape"]]
        value = self.whole(op.operands[0])
        self.b.store(self.pointers[tape.name], self._address(tape), self.b.cast(value, _held(tape.element)))

    def pure(self, op: Op) -> None:
        """A TAPE_LOAD becomes a LOAD."""
        if op.code is not Code.TAPE_LOAD:
            super().pure(op)
            return
        tape = self.known[op.attributes["tape"]]
        loaded = self.b.load(self.pointers[tape.name], self._address(tape), name=op.result.name)
        if tape.element == "i1":
            loaded = self.b.compare("ne", loaded, self.b.zero(loaded))
        self[op.result] = loaded

    def loop(self, op: Op) -> None:
        """A FOR, between barriers where it loads what was stored before it."""
        (block,) = op.blocks
        stored, loaded = (set(tapes_of(block, code)) for code in (Code.TAPE_STORE, Code.TAPE_LOAD))
        back = bool(loaded - stored)
        if back:
            self.b.add_op(Op(Code.BARRIER, (), ()))
        self._around.append((op, block.arguments[0]))
        super().loop(op)
        self._around.pop()
        if back and self._around:  # the next trip of a loop around writes there again
            self.b.add_op(Op(Code.BARRIER, (), ()))

    def repeat(self, op: Op) -> None:
        """A WHILE, whose trips are counted where it stores to tapes."""
        if not any(True for block in op.blocks for _ in tapes_of(block, Code.TAPE_STORE)):
            super().repeat(op)
            return

        def copied(block: Block, inner: list[Value]) -> list[Value]:
            for old, new in zip(block.arguments, inner[:-1], strict=True):
                self[old] = new
                new.name, new.source_line = old.name, old.source_line
            self._around.append((op, inner[-1]))
            self.block(block)
            self._around.pop()
            return [self.whole(value) for value in block.yields]

        def go_on(inner: list[Value]) -> list[Value]:
            return [*copied(op.blocks[1], inner), self.b.add(inner[-1], self.b.const(1))]

        starts = [*(self.whole(value) for value in op.operands), self.b.const(0)]
        found = self.b.repeat(starts, lambda inner: [*copied(op.blocks[0], inner), inner[-1]], go_on, **op.attributes)
        self.results(op, found[:-1])

    def _address(self, tape: Tape) -> Value:
        """Offsets of the present program's and trip's tile, i64."""
        b = self.b
        place = program_number(b, reversed(range(self.axes)))
        for loop in tape.trips:
            count = b.cast(self._count(loop), "i64")
            place = b.add(b.mul(place, count), b.cast(self._trip(loop), "i64"))
        rank, lanes = len(tape.shape), b.const(0)
        for axis, extent in enumerate(tape.shape):
            lane = b.arange(0, extent, self.source.extents.get(extent))
            for other in range(rank):
                if other != axis:
                    lane = b.expand(lane, other)
            size = b.extent(extent)
            lanes = b.add(b.mul(lanes, size), lane)
            place = b.mul(place, b.cast(size, "i64"))
        return b.whole(b.add(place, b.cast(lanes, "i64")), tape.shape)

    def _count(self, loop: Op) -> Value:
        """For how many trips of a loop there is room: an argument, or the constexpr of segments."""
        if loop in self.counts:
            return self.counts[loop]
        size = segment_size(loop)
        assert size is not None
        return self.b.setting(size.attributes["symbol"], size.attributes["value"])

    def _trip(self, loop: Op) -> Value:
        """Number of the present trip of the loop, or of the one that goes over the same trips."""
        b = self.b
        for around, place in self._around:
            named = around.attributes.get("tape")
            if around is loop or (named is not None and named == loop.attributes.get("tape")):
                if around.code is Code.WHILE:
                    return place
                start, _, step = (self[value] for value in around.operands[:3])
                gone = b.sub(self[place], start)
                return gone if _is_one(step) else b.elementwise(Code.FLOORDIV, (gone, step))
        raise CannotDerive(f"a tape of {loop.attributes.get('tape')} is read outside of a loop over the same trips")


def _around(body: Block, code: Code) -> dict[str, tuple[Op, tuple[Op, ...]]]:
    """Tape -> the operation of a kind that uses it, and the loops around that."""
    found: dict[str, tuple[Op, tuple[Op, ...]]] = {}

    def visit(block: Block, loops: tuple[Op, ...]) -> None:
        for op in block.ops:
            if op.code is code:
                found[op.attributes["tape"]] = (op, loops)
            inside = (*loops, op) if op.code in (Code.FOR, Code.WHILE) else loops
            for inner in op.blocks:
                visit(inner, inside)

    visit(body, ())
    return found


def _called(tape: Tape, taken: set[str]) -> str:
    """`tape_state`; `segments_state` where it keeps what segments start with."""
    steps = [_bare_factors(loop.operands[2]) for loop in tape.trips[-1:] if loop.code is Code.FOR]
    kind = "segments" if any(is_setting(value) for values in steps for value in values) else "tape"
    return free_name(f"{kind}_{_stem(tape.name)}", taken)


def _stem(name: str) -> str:
    """A name without the number that tells it from others."""
    stem, _, number = name.rpartition("_")
    return stem if stem and number.isdecimal() else name


def _bare_factors(value: Value) -> list[Value]:
    """What a step is a product of."""
    value = beneath(value, (Code.CAST,))
    op = value.producer
    return (
        [value]
        if op is None or op.code is not Code.MUL
        else [one for side in op.operands for one in _bare_factors(side)]
    )


def _is_one(value: Value) -> bool:
    op = value.producer
    return op is not None and op.code is Code.CONST and op.attributes["value"] == 1


def _held(element: str) -> str:
    """Conditions take a byte in memory."""
    return "i8" if element == "i1" else element
