"""`reflection`: whether a trip reflects what a loop carries, as Householder's x - 2 v <v, x> / <v, v> does.

A reflection is its own inverse: done once more it gives what the trip started with. It keeps lengths, so that rounding
errors do not grow from trip to trip as they would where other products of a carry are taken back. That the factor is
2 / <v, v> of the same v is seen in the operations; where <v, v> is zero, the forward has no numbers to differentiate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, constant

_REPEATS = frozenset((Code.EXPAND, Code.BROADCAST, Code.FULL))


@dataclass(frozen=True)
class _Factor:
    """A factor of a tile, which repeats it."""

    value: Value
    """As it is computed: smaller than the tile, or as large."""
    expanded: tuple[int, ...]
    """Axes that it was given to be repeated along, the last one first."""

    def axis(self, rank: int) -> int | None:
        """The axis of a tile of `rank` axes that a vector lies along; None of what is no vector."""
        if len(self.value.shape) != 1 or len(self.expanded) != rank - 1:
            return None
        axis = 0
        for other in reversed(self.expanded):
            axis += axis >= other
        return axis


@dataclass
class _Product:
    """Factors of a tile."""

    number: float = 1.0
    """Of constants."""
    above: list[_Factor] = field(default_factory=list)
    below: list[_Factor] = field(default_factory=list)
    """What it is divided by."""


@dataclass(frozen=True)
class Reflection:
    """What a trip does to a carry."""

    op: Op
    """The SUB of the carry and twice its part along the vector."""
    vector: Value
    """That must not depend on the carry."""


def reflection(loop: Op, place: int) -> Reflection | None:
    """What a trip reflects a carry at; None where it does something else."""
    (block,) = loop.blocks
    carry, last = block.arguments[1 + place], block.yields[place].producer
    if last is None or last.code is not Code.SUB or last.operands[0] is not carry or not carry.is_float:
        return None
    taken = _factors(last.operands[1])
    if taken.number != 2.0 or len(taken.above) != 2 or len(taken.below) != 1:
        return None
    for along, vector in (taken.above, taken.above[::-1]):
        axis = vector.axis(len(carry.shape))
        if axis is not None and _is_part(along, carry, vector, axis) and _is_square(taken.below[0].value, vector.value):
            return Reflection(last, vector.value)
    return None


def _factor(value: Value, expanded: tuple[int, ...] = ()) -> _Factor:
    """A factor without what only repeats it."""
    while value.producer is not None and value.producer.code in _REPEATS:
        op = value.producer
        expanded = (*expanded, op.attributes["axis"]) if op.code is Code.EXPAND else expanded
        value = op.operands[0]
    return _Factor(value, expanded)


def _factors(value: Value) -> _Product:
    """A product taken apart."""
    found = _Product()
    pending = [(_factor(value), False)]
    while pending:
        one, inverse = pending.pop()
        op, number = one.value.producer, constant(one.value)
        if number is not None and number and not isinstance(number, bool):
            found.number = found.number / number if inverse else found.number * number
        elif op is not None and op.code in (Code.MUL, Code.DIV):
            for place, operand in enumerate(op.operands):
                turned = inverse != (op.code is Code.DIV and place == 1)
                pending.append((_factor(operand, one.expanded), turned))
        else:
            (found.below if inverse else found.above).append(one)
    return found


def _is_part(factor: _Factor, carry: Value, vector: _Factor, axis: int) -> bool:
    """Whether a factor is `sum(carry * vector)` along an axis, repeated along that."""
    op = factor.value.producer
    if op is None or op.code is not Code.SUM or op.attributes["axis"] != axis:
        return False
    product = op.operands[0].producer
    if factor.expanded != ((axis,) if factor.value.shape else ()) or product is None or product.code is not Code.MUL:
        return False
    return any(
        one is carry and _factor(other).value is vector.value and _factor(other).axis(len(carry.shape)) == axis
        for one, other in (product.operands, product.operands[::-1])
    )


def _is_square(value: Value, vector: Value) -> bool:
    """Whether a value is the sum of the squares of a vector."""
    op = value.producer
    product = op.operands[0].producer if op is not None and op.code is Code.SUM else None
    return product is not None and product.code is Code.MUL and all(one is vector for one in product.operands)
