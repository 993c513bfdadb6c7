"""Integers that know what they would be without a limit of bits, and which operation they left it at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind

Lane = tuple[int, ...]


class Untold(Exception):
    """A number depends on data, or on an operation that points do not follow."""


@dataclass(frozen=True)
class Wrap:
    """The operation whose result first had more bits than its type."""

    op: Op
    true: int
    """The result without a limit."""
    left: int
    right: int
    """Its operands."""


@dataclass(frozen=True)
class Number:
    """One integer."""

    actual: int
    """As the device computes it."""
    true: int
    """Without a limit of bits."""
    origin: Wrap | None = None
    """Where the two parted."""


def signed(value: int, bits: int) -> int:
    """The number that remains of `value` in a signed integer of some bits."""
    if bits == 1:
        return value & 1
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _unsigned(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def _divide(a: int, b: int) -> int:
    """Towards zero."""
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_EXACT: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.shli": lambda a, b: a << min(max(b, 0), 64),
}
"""Operations that make numbers longer."""
_ALONG: dict[str, Callable[[int, int], int]] = {
    "arith.divsi": _divide,
    "arith.floordivsi": lambda a, b: 0 if b == 0 else a // b,
    "arith.ceildivsi": lambda a, b: 0 if b == 0 else -(-a // b),
    "arith.maxsi": max,
    "arith.minsi": min,
    "arith.shrsi": lambda a, b: a >> min(max(b, 0), 64),
}
"""Operations that are computed of both numbers."""
_CUT: dict[str, Callable[[int, int], int]] = {
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.remsi": lambda a, b: 0 if b == 0 else a - b * _divide(a, b),
}
"""Operations that hashes are made of: what wraps before them wraps on purpose."""
_CUT_UNSIGNED: dict[str, Callable[[int, int], int]] = {
    "arith.remui": lambda a, b: 0 if b == 0 else a % b,
    "arith.divui": lambda a, b: 0 if b == 0 else a // b,
    "arith.ceildivui": lambda a, b: 0 if b == 0 else -(-a // b),
    "arith.shrui": lambda a, b: a >> min(b, 64),
    "arith.maxui": max,
    "arith.minui": min,
}
_CONVERSIONS = frozenset(
    {"arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui", "tt.bitcast"}
)
_COMPARE: tuple[Callable[[int, int], bool], ...] = (
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
)


def arithmetic(op: Op, operands: list[Number]) -> Number:
    """The result of an operation on integers. Raises `Untold` for any other."""
    if op.results[0].type.scalar.kind is not Kind.INT:
        raise Untold(op.name)
    bits = op.results[0].type.bits
    origin = next((number.origin for number in operands if number.origin is not None), None)
    if op.name in _CONVERSIONS:
        return _converted(op, operands[0], bits)
    if len(operands) != 2:
        raise Untold(op.name)
    a, b = operands
    if op.name == "arith.cmpi":
        predicate = op.attributes["predicate"]
        width = op.operands[0].type.bits
        compare = _COMPARE[predicate if predicate < 6 else predicate - 4]
        if predicate >= 6:
            a, b = (exactly(_unsigned(number.actual, width)) for number in (a, b))
        return Number(int(compare(a.actual, b.actual)), int(compare(a.true, b.true)), origin)
    if bits == 1 or op.name in _CUT:
        function = _CUT.get(op.name)
        if function is None:
            raise Untold(op.name)
        actual = signed(function(a.actual, b.actual), bits)
        return Number(actual, int(function(a.true, b.true)) & 1 if bits == 1 else actual)
    if op.name in _CUT_UNSIGNED:
        actual = signed(_CUT_UNSIGNED[op.name](_unsigned(a.actual, bits), _unsigned(b.actual, bits)), bits)
        return Number(actual, actual)
    exact = _EXACT.get(op.name) or _ALONG.get(op.name)
    if exact is None:
        raise Untold(op.name)
    true, actual = exact(a.true, b.true), signed(exact(a.actual, b.actual), bits)
    if true != actual and origin is None:
        origin = Wrap(op, true, a.true, b.true)
    return Number(actual, true, origin if true != actual else None)


def _converted(op: Op, number: Number, bits: int) -> Number:
    before = op.operands[0].type.bits
    if op.name in ("arith.extui", "arith.index_castui"):
        actual = _unsigned(number.actual, before)
        return Number(actual, actual) if number.origin is None else Number(actual, number.true, number.origin)
    if op.name == "arith.extsi" and before == 1:
        return Number(-number.actual, -number.true, number.origin)
    actual = signed(number.actual, bits)
    if op.name == "arith.trunci" and (bits == 1 or number.origin is None):
        return Number(actual, actual)
    return Number(actual, number.true, number.origin)


def total(a: Number, b: Number) -> Number:
    """A sum in 64 bits, as addresses are added up."""
    return Number(a.actual + b.actual, a.true + b.true, a.origin or b.origin)


def exactly(value: int) -> Number:
    """A number that fits its type."""
    return Number(value, value)


def constant(op: Op, lane: Lane) -> Number:
    """An integer constant at a lane. Raises `Untold` for floats."""
    value = op.attributes["value"]
    data = value.data if isinstance(value, Dense) else value
    if isinstance(data, tuple):
        flat = 0
        for at, n in zip(lane, op.results[0].type.tile, strict=True):
            flat = flat * n + at
        data = data[flat]
    if isinstance(data, float):
        raise Untold(op.name)
    return exactly(int(data))
