"""Integers of a kernel at single points: one program, one lane, one iteration of each loop.

Every number is known twice: as the device computes it, wrapping at its declared width, and as it would be without any
limit. Where the two differ in an address, a 32-bit offset has wrapped. Nothing is executed and no memory is needed, so
that a launch can be looked at in its real sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.sanitizer.address import Lane, lane_before, makers
from kernel_agent.ir.sanitizer.unlimited import Number, Untold, Wrap, arithmetic, constant, exactly, signed, total
from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import BlockPointer, Pointer, RuntimeValue

_LAYOUT = frozenset({"tt.splat", "tt.unsplat", "tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape"})
_ITERATED = 3
"""Iterations that are followed one by one; what changes evenly in them is taken to go on so."""


@dataclass(frozen=True)
class Address:
    """One pointer."""

    buffer: Buffer
    view: View | None
    element: Number
    """Elements from the start of the buffer."""


@dataclass(frozen=True)
class Area:
    """One block pointer or descriptor."""

    base: Address
    extents: tuple[Number, ...]
    strides: tuple[Number, ...]
    offsets: tuple[Number, ...]


Told = Number | Address | Area
Contents = Callable[[Buffer, int], int | None]
"""What memory holds at an element, None where nobody knows."""


@dataclass
class Launched:
    """A launch to look at."""

    module: Module
    grid: tuple[int, int, int]
    arguments: dict[int, RuntimeValue]
    """By id of the entry's parameters."""
    contents: Contents


class Point:
    """One program of a launch at one iteration of each loop."""

    def __init__(self, launched: Launched, program: tuple[int, int, int], iterations: dict[int, int]) -> None:
        self.launched = launched
        self.program = program
        self.iterations = iterations
        """Iteration of each enclosing loop, by the id of its induction variable."""
        self._known: dict[tuple[int, Lane], Told] = {}

    def value(self, value: Value, lane: Lane = ()) -> Told:
        """A value at a lane. Raises `Untold`."""
        key = (value.id, lane)
        if key not in self._known:
            self._known[key] = self._find(value, lane)
        return self._known[key]

    def number(self, value: Value, lane: Lane = ()) -> Number:
        """An integer at a lane. Raises `Untold`."""
        found = self.value(value, lane)
        if not isinstance(found, Number):
            raise Untold(value.name)
        return found

    def _find(self, value: Value, lane: Lane) -> Told:
        op = makers(self.launched.module).get(value.id)
        if op is not None:
            return self._result(op, value, lane)
        if value.id in self.launched.arguments:
            return _argument(self.launched.arguments[value.id])
        for loop in _loops(self.launched.module):
            for place, argument in enumerate(loop.regions[0][0].arguments):
                if argument.id == value.id:
                    return self._in_loop(loop, place, lane)
        raise Untold(value.name)

    def _result(self, op: Op, value: Value, lane: Lane) -> Told:
        if op.name == "arith.constant":
            return constant(op, lane)
        if op.name == "tt.make_range":
            return exactly(int(op.attributes["start"]) + lane[0])
        if op.name == "tt.get_program_id":
            return exactly(self.program[op.attributes["axis"]])
        if op.name == "tt.get_num_programs":
            return exactly(self.launched.grid[op.attributes["axis"]])
        if op.name in _LAYOUT:
            before = lane_before(op, op.operands[0], lane)
            if before is None:
                raise Untold(op.name)
            return self.value(op.operands[0], before)
        if op.name == "arith.select":
            condition = op.operands[0]
            chosen = self.number(condition, lane if condition.type.tile else ())
            return self.value(op.operands[1 if chosen.actual else 2], lane)
        if op.name in ("tt.addptr", "tt.make_tensor_ptr", "tt.make_tensor_descriptor", "tt.advance"):
            return self._pointer(op, lane)
        if op.name == "scf.if":
            return self._chosen(op, op.results.index(value), lane)
        if op.name == "scf.for":
            return self._after_loop(op, op.results.index(value), lane)
        if op.name == "tt.load" and value.type.scalar.kind is Kind.INT:
            return self._loaded(op, lane)
        if not op.name.startswith("arith.") and op.name != "tt.bitcast":
            raise Untold(op.name)
        return arithmetic(op, [self.number(operand, lane) for operand in op.operands])

    def _pointer(self, op: Op, lane: Lane) -> Told:
        base = self.value(op.operands[0], lane)
        numbers = [self.number(operand, lane) for operand in op.operands[1:]]
        if op.name == "tt.addptr" and isinstance(base, Address):
            return replace(base, element=total(base.element, numbers[0]))
        if op.name == "tt.advance" and isinstance(base, Area):
            moved = tuple(total(offset, step) for offset, step in zip(base.offsets, numbers, strict=True))
            return replace(base, offsets=moved)
        if isinstance(base, Address):
            parts = 3 if op.name == "tt.make_tensor_ptr" else 2
            rank = len(numbers) // parts
            return Area(base, tuple(numbers[:rank]), tuple(numbers[rank : 2 * rank]), tuple(numbers[2 * rank :]))
        raise Untold(op.name)

    def _chosen(self, op: Op, place: int, lane: Lane) -> Told:
        region = op.regions[0 if self.number(op.operands[0]).actual else 1]
        return self.value(region[0].ops[-1].operands[place], lane)

    def _loaded(self, op: Op, lane: Lane) -> Number:
        address = self.value(op.operands[0], lane)
        if not isinstance(address, Address) or not 0 <= address.element.actual < address.buffer.size:
            raise Untold(op.name)
        held = self.launched.contents(address.buffer, address.element.actual)
        if held is None:
            raise Untold(op.name)
        return exactly(held)

    # --- loops

    def trips(self, loop: Op) -> int:
        """How often a loop runs here."""
        low, high, step = (self.number(operand).actual for operand in loop.operands[:3])
        return max(0, -((low - high) // step)) if step > 0 else 0

    def _in_loop(self, loop: Op, place: int, lane: Lane) -> Told:
        turn = self.iterations.get(loop.regions[0][0].arguments[0].id, 0)
        if place == 0:
            low, step = self.number(loop.operands[0]), self.number(loop.operands[2])
            return exactly(low.actual + turn * step.actual)
        return self._carried(loop, place - 1, turn, lane)

    def _after_loop(self, loop: Op, place: int, lane: Lane) -> Told:
        return self._carried(loop, place, self.trips(loop), lane)

    def _carried(self, loop: Op, place: int, turn: int, lane: Lane) -> Told:
        """What a loop carries into an iteration: the first ones step by step, later ones by their even change."""
        induction = loop.regions[0][0].arguments[0].id
        last = loop.regions[0][0].ops[-1].operands[place]
        start = self.value(loop.operands[3 + place], lane)
        steps = [start]
        for before in range(min(turn, _ITERATED)):
            there = self.iterations.get(induction) == before
            point = self if there else Point(self.launched, self.program, {**self.iterations, induction: before})
            steps.append(point.value(last, lane))
        if turn < len(steps):
            return steps[turn]
        return _even(steps, turn, last, makers(self.launched.module).get(last.id))


def _even(steps: Sequence[Told], turn: int, value: Value, op: Op | None) -> Told:
    """Step `turn` of values that change by the same amount every time, by operation `op`."""
    first, second, third = steps[-3], steps[-2], steps[-1]
    ahead = turn - (len(steps) - 1)
    if isinstance(first, Number) and isinstance(second, Number) and isinstance(third, Number):
        change = (third.actual - second.actual, third.true - second.true)
        if change != (second.actual - first.actual, second.true - first.true):
            raise Untold(value.name)
        wide = value.type.scalar.kind is not Kind.INT
        actual, true = third.actual + ahead * change[0], third.true + ahead * change[1]
        actual = actual if wide else signed(actual, value.type.bits)
        origin = third.origin
        if origin is None and actual != true and op is not None:
            origin = Wrap(op, true, true - change[1], change[1])
        return Number(actual, true, origin)
    if isinstance(first, Address) and isinstance(second, Address) and isinstance(third, Address):
        element = _even([first.element, second.element, third.element], 2 + ahead, value, op)
        assert isinstance(element, Number)
        return replace(third, element=element)
    if isinstance(first, Area) and isinstance(second, Area) and isinstance(third, Area):
        trio = zip(first.offsets, second.offsets, third.offsets, strict=True)
        moved = [_even(list(three), 2 + ahead, value, op) for three in trio]
        return replace(third, offsets=tuple(number for number in moved if isinstance(number, Number)))
    raise Untold(value.name)


def _argument(given: RuntimeValue) -> Told:
    if isinstance(given, (bool, int)):
        return exactly(int(given))
    if isinstance(given, Pointer) and given.buffer is not None:
        return Address(given.buffer, given.view, exactly(int(given.offset)))
    if isinstance(given, BlockPointer):
        base = _argument(given.base)
        if isinstance(base, Address):
            extents, strides = ([exactly(int(part)) for part in parts] for parts in (given.extents, given.strides))
            return Area(base, tuple(extents), tuple(strides), ())
    raise Untold("argument")


def _loops(module: Module) -> list[Op]:
    return [op for op in module.all_ops if op.name == "scf.for"]


def entered(point: Point, blocks: list[Block]) -> list[Block]:
    """Blocks of a function body that the program of a point may come to."""
    order = {block.label: block for block in blocks}
    waiting, seen = [blocks[0]], []
    while waiting:
        block = waiting.pop(0)
        if block in seen:
            continue
        seen.append(block)
        end = block.ops[-1] if block.ops else None
        if end is None or not end.successors:
            continue
        taken = list(end.successors)
        if end.name == "cf.cond_br":
            with contextlib.suppress(Untold):
                taken = [taken[0 if point.number(end.operands[0]).actual else 1]]
        waiting += [order[label] for label in taken]
    return seen
