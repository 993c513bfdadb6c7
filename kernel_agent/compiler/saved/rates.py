"""`Rate`: how much of a shift is in an exponent, and along which axis of a tile the shift differs from lane to lane.

A softmax of tiles subtracts a number for each lane, and each of these may shift by itself. A value then has a part of
the shift for every lane of its own, until an operation mixes lanes that shift differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value

TOLERANCE = 1e-6
"""By which rates of a kernel that writes ln 2 in decimals may differ, relatively."""
_ALONG = frozenset((Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.CUMSUM, Code.FLIP))
"""What mixes the lanes of one axis."""
_SHORTER = frozenset((Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN))
"""What has no such axis any more."""


@dataclass(frozen=True)
class Rate:
    """So many times a shift."""

    number: float
    """The rate is this ..."""
    factors: tuple[int, ...]
    """... times the values of these ids, and divided by those of whose ids these are the complements, sorted."""
    unit: int
    """What shifts: the id of a value; -1 for what a proof is about."""
    axes: tuple[int, ...]
    """By axis of what shifts: the axis of the value that it lies along; -1 for one of extent 1."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Rates of one kind add up."""
        return (self.unit, self.factors, self.axes)

    def names(self, ids: Iterable[int]) -> bool:
        """Whether it depends on one of these values."""
        mine = {self.unit, *self.factors, *(~factor for factor in self.factors)}
        return not mine.isdisjoint(ids)


Rates = tuple[Rate, ...]
"""One for every kind, sorted; their sum is what there is of all shifts."""


def whole(value: Value, number: float = 1.0, unit: int = -1) -> Rates:
    """Of a value all lanes of which shift by themselves."""
    return (Rate(number, (), unit, tuple(axis if extent > 1 else -1 for axis, extent in enumerate(value.shape))),)


def added(a: Rates, b: Rates, sign: float = 1.0) -> Rates:
    """Of a sum; with `sign` -1 of a difference."""
    found = {rate.kind: rate for rate in a}
    for rate in b:
        mine = found.get(rate.kind, replace(rate, number=0.0))
        total = mine.number + sign * rate.number
        if abs(total) <= TOLERANCE * abs(mine.number):
            found.pop(rate.kind, None)
        else:
            found[rate.kind] = replace(mine, number=total)
    return tuple(sorted(found.values(), key=lambda rate: rate.kind))


def scaled(rates: Rates, number: float, factor: int | None = None) -> Rates:
    """Times a number, and times the value of an id (or of its complement: divided by that)."""
    found: Rates = ()
    for rate in rates:
        factors = rate.factors if factor is None else _times(rate.factors, factor)
        found = added(found, (replace(rate, number=rate.number * number, factors=factors),))
    return found


def same(a: Rates, b: Rates) -> bool:
    """Whether two are one, but for rounding."""
    return [rate.kind for rate in a] == [rate.kind for rate in b] and all(
        abs(x.number - y.number) <= TOLERANCE * max(abs(x.number), abs(y.number)) for x, y in zip(a, b, strict=True)
    )


def through(op: Op, place: int, rates: Rates) -> Rates | None:
    """Of an operand, as lanes of the result have them; None where one of these depends on several that shift apart."""
    found: Rates = ()
    for rate in rates:
        axes = tuple(axis if axis < 0 else _moved(op, place, axis) for axis in rate.axes)
        if None in axes:
            return None
        found = added(found, (replace(rate, axes=tuple(axis for axis in axes if axis is not None)),))
    return found


def _moved(op: Op, place: int, axis: int) -> int | None:
    """Where an axis of an operand lies in the result; None where lanes of it are mixed."""
    if op.code in _ALONG:
        along = op.attributes["axis"]
        return None if axis == along else axis - 1 if op.code in _SHORTER and axis > along else axis
    if op.code is Code.EXPAND:
        return axis + 1 if axis >= op.attributes["axis"] else axis
    if op.code is Code.TRANS:
        return list(op.attributes["order"]).index(axis)
    if op.code is Code.DOT:
        contracted = len(op.result.shape) - (1 if place == 0 else 2)
        return None if place < 2 and axis == contracted else axis
    if op.code is Code.RESHAPE:
        before, after = op.operands[0].shape, op.result.shape
        kept = (new for new, extent in enumerate(after) if extent == before[axis])
        return next((new for new in kept if math.prod(after[:new]) == math.prod(before[:axis])), None)
    return axis


def _times(factors: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """With one more factor, or without the one that it takes away."""
    rest = list(factors)
    if ~factor in rest:
        rest.remove(~factor)
    else:
        rest.append(factor)
    return tuple(sorted(rest))
