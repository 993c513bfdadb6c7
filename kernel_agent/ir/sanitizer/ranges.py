"""Least and greatest value of integers over all programs, lanes and iterations of a launch, from its text alone.

Coarse and quick: where no integer that an address is made of can leave its type, nobody needs to look at points.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.cost.address_slice import address_slice
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import RuntimeValue


@dataclass(frozen=True)
class Range:
    """All integers from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def of(cls, *values: int) -> Range:
        """The range that the values span."""
        return cls(min(values), max(values))

    @classmethod
    def whole(cls, type_: Type) -> Range:
        """Every value of a type."""
        bits = type_.bits
        return cls(0, 1) if bits == 1 else cls(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)

    def inside(self, other: Range) -> bool:
        """Whether the other range holds all of this one."""
        return other.low <= self.low and self.high <= other.high


_PASSED_ON = frozenset(
    {"tt.splat", "tt.unsplat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "ttg.convert_layout"}
    | {"arith.extsi", "arith.index_cast"}
)
_LONGER = frozenset({"arith.addi", "arith.subi", "arith.muli", "arith.shli"})


_DIVISIONS = frozenset({"arith.divsi", "arith.divui", "arith.remsi", "arith.remui"})
_ZERO = Range(0, 0)


def division_by_zero(
    module: Module, grid: tuple[int, int, int], arguments: Sequence[RuntimeValue], reached: Collection[Block]
) -> Op | None:
    """The first division by a number that is zero in all of a launch, in a block that programs `reached`; None where
    none is known. Its result is whatever a device has for it: what comes of it is nobody's derivative.
    """
    found = _divisions(module)
    if not found.divisions:
        return None
    known = _given(module, arguments)
    for op in found.makers:
        for result in op.results:
            if result.type.scalar.kind is Kind.INT:
                known[result.id] = _result(op, known, grid) or Range.whole(result.type)
    zero = (op for op in found.divisions if known.get(op.operands[1].id) == _ZERO)
    return next((op for op in zero if module.parents[id(op)] in reached), None)


@dataclass(frozen=True)
class _Divisions:
    """Of whole numbers, in a kernel."""

    divisions: tuple[Op, ...]
    makers: tuple[Op, ...]
    """What makes the divisors, in order."""


@lru_cache(maxsize=64)
def _divisions(module: Module) -> _Divisions:
    divisions = tuple(op for op in module.all_ops if op.name in _DIVISIONS)
    needed = {op.operands[1].id for op in divisions}
    makers: list[Op] = []
    for op in reversed(module.all_ops) if divisions else ():
        if not needed.isdisjoint(op.result_ids):
            needed.update(op.operand_ids)
            makers.append(op)
    return _Divisions(divisions, tuple(reversed(makers)))


def _given(module: Module, arguments: Sequence[RuntimeValue]) -> dict[int, Range]:
    """The whole numbers of a launch, by id of the parameter."""
    return {
        parameter.id: Range(int(value), int(value))
        for parameter, value in zip(module.entry.blocks[0].arguments, arguments, strict=True)
        if isinstance(value, (bool, int))
    }


def may_wrap(module: Module, grid: tuple[int, int, int], arguments: Sequence[RuntimeValue]) -> bool:
    """Whether some integer that an address depends on may have more bits than its type."""
    needed = address_slice(module).needed
    known = _given(module, arguments)
    for op in module.all_ops:
        if op.name == "scf.for":
            _enter(op, known)
        for result in op.results:
            if result.type.scalar.kind is not Kind.INT:
                continue
            whole = Range.whole(result.type)
            found = _result(op, known, grid) or whole
            if op.name in _LONGER and result.id in needed and result.type.bits == 32 and not found.inside(whole):
                return True
            known[result.id] = found if found.inside(whole) else whole
    return False


def _enter(loop: Op, known: dict[int, Range]) -> None:
    """The induction variable of a loop whose bounds are known, and numbers that it moves evenly."""
    induction = loop.regions[0][0].arguments[0]
    low, high, step = (known.get(operand.id) for operand in loop.operands[:3])
    if low is None or high is None:
        return
    known[induction.id] = Range(low.low, max(low.low, high.high - 1))
    trips = max(0, -((low.low - high.high) // max(1, step.low if step is not None else 1)))
    body = loop.regions[0][0]
    makers = {result.id: op for op in body.ops for result in op.results}
    for argument, start, end in zip(body.arguments[1:], loop.operands[3:], body.ops[-1].operands, strict=True):
        change = _added(makers.get(end.id), argument, known)
        begins = known.get(start.id)
        if change is not None and begins is not None:
            moved = Range(begins.low + min(0, trips * change.low), begins.high + max(0, trips * change.high))
            known[argument.id] = moved


def _added(op: Op | None, argument: Value, known: dict[int, Range]) -> Range | None:
    """What an iteration adds to a carried number, where it only adds something known before the loop."""
    if op is None or op.name != "arith.addi":
        return None
    others = [operand for operand in op.operands if operand.id != argument.id]
    return known.get(others[0].id) if len(others) == 1 else None


def _result(op: Op, known: dict[int, Range], grid: tuple[int, int, int]) -> Range | None:
    """What an operation makes of ranges; None where that is not known."""
    if op.name == "arith.constant":
        value = op.attributes["value"]
        data = value.data if isinstance(value, Dense) else value
        values = data if isinstance(data, tuple) else (data,)
        return Range.of(*(int(item) for item in values))
    if op.name == "tt.make_range":
        return Range(int(op.attributes["start"]), int(op.attributes["end"]) - 1)
    if op.name == "tt.get_program_id":
        return Range(0, max(0, grid[op.attributes["axis"]] - 1))
    if op.name == "tt.get_num_programs":
        return Range(grid[op.attributes["axis"]], grid[op.attributes["axis"]])
    parts = [known.get(operand.id) for operand in op.operands]
    ranges = [part for part in parts if part is not None]
    if not ranges or len(ranges) < len(parts):
        return None
    if op.name in _PASSED_ON:
        return ranges[0]
    if op.name == "arith.select":
        return Range.of(ranges[1].low, ranges[1].high, ranges[2].low, ranges[2].high)
    return _binary(op.name, *ranges) if len(ranges) == 2 else None


def _binary(name: str, a: Range, b: Range) -> Range | None:
    if name == "arith.addi":
        return Range(a.low + b.low, a.high + b.high)
    if name == "arith.subi":
        return Range(a.low - b.high, a.high - b.low)
    if name == "arith.muli":
        return Range.of(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    if name == "arith.shli" and b.low >= 0 and b.high < 64:
        return Range.of(a.low << b.low, a.low << b.high, a.high << b.low, a.high << b.high)
    if name in ("arith.minsi", "arith.maxsi"):
        pick = min if name == "arith.minsi" else max
        return Range(pick(a.low, b.low), pick(a.high, b.high))
    if a.low < 0 or b.low <= 0:
        return None
    if name in ("arith.divsi", "arith.divui"):
        return Range(a.low // b.high, a.high // b.low)
    if name in ("arith.remsi", "arith.remui"):
        return Range(0, min(a.high, b.high - 1))
    return None
