"""`fills`, `own_row`: whether a loop fills a tile row by row, as one whose trips each add a key to those before it.

Of `keys = where(rows == t, k, step(keys))` the way back cannot know what row t held before trip t, unless that is
zero: rows start at zero, each is chosen in one trip, and until then a step leaves zeros of them. Of `inverse -=
where(rows == t, f(inverse), 0)` row t is as the loop began with it until trip t, since no other trip has that number.
"""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, bare, constant, is_constant

_PASSES = frozenset((Code.CAST, Code.NEG, Code.KNOWN))
_REPEATS = frozenset((Code.BROADCAST, Code.FULL, Code.CAST))


def fills(loop: Op, place: int, choice: Op, kept: Value) -> bool:
    """Whether what a trip makes of a carry is zero in all lanes that a choice puts something else into.

    `choice`: the SELECT between `kept`, which the trip made of the carry, and that.
    """
    (block,) = loop.blocks
    carry, step = block.arguments[1 + place], constant(loop.operands[2])
    axis = _chosen(choice.operands[0], block.arguments[0])
    if axis is None or not step or choice.operands[2] is not kept or not is_constant(bare(loop.operands[3 + place]), 0):
        return False
    return block.yields[place] is choice.result and _vanishes(kept, axis, carry, axis, {})


def own_row(loop: Op, place: int) -> Op | None:
    """The choice of the one row that a trip changes of a carry, which no trip before did; None where there is none.

    What the row becomes may be anything. The SELECT has lanes of other rows as they were, or nothing to add to them.
    """
    (block,) = loop.blocks
    carry, last, step = block.arguments[1 + place], block.yields[place].producer, constant(loop.operands[2])
    if last is None or not step:
        return None
    if last.code in (Code.ADD, Code.SUB) and carry in last.operands[: 2 if last.code is Code.ADD else 1]:
        parts = [bare(operand).producer for operand in last.operands if operand is not carry]
        choice = parts[0] if len(parts) == 1 else None
        kept = choice is not None and choice.code is Code.SELECT and is_constant(bare(choice.operands[2]), 0)
    else:
        choice, kept = last, last.code is Code.SELECT and last.operands[2] is carry
    if choice is None or not kept or choice.result.shape != carry.shape:
        return None
    return choice if _chosen(choice.operands[0], block.arguments[0]) is not None else None


def _chosen(mask: Value, index: Value) -> int | None:
    """Of `rows == t` the axis that rows are counted along; None of what is not one row that the trip's number names."""
    moves: list[int] = []
    op = mask.producer
    while op is not None and op.code in (Code.EXPAND, Code.BROADCAST):
        moves += [op.attributes["axis"]] if op.code is Code.EXPAND else []
        op = op.operands[0].producer
    if op is None or op.code is not Code.CMP or op.attributes["predicate"] != "eq":
        return None
    for number, rows in (op.operands, op.operands[::-1]):
        named, inner, lanes = bare(number) is index, list(moves), rows.producer
        while lanes is not None and lanes.code in (Code.EXPAND, *_REPEATS):
            inner += [lanes.attributes["axis"]] if lanes.code is Code.EXPAND else []
            lanes = lanes.operands[0].producer
        if named and lanes is not None and lanes.code is Code.ARANGE:
            axis = 0
            for other in reversed(inner):
                axis += axis >= other
            return axis
    return None


def _vanishes(value: Value, axis: int, carry: Value, own: int, seen: dict[tuple[Value, int], bool]) -> bool:
    """Whether a value is zero in the lanes along an axis in which the carry is, along `own`."""
    if value is carry:
        return axis == own
    key = (value, axis)
    if key not in seen:
        seen[key] = False
        seen[key] = any(
            all(_vanishes(operand, place, carry, own, seen) for operand, place in parts)
            for parts in _zero_if(value, axis)
        )
    return seen[key]


def _zero_if(value: Value, axis: int) -> list[list[tuple[Value, int]]]:
    """Alternatives: operands that must all be zero for a value to be, with the axis that lanes lie along there."""
    op = value.producer
    if op is None:
        return []
    if constant(bare(value)) == 0:
        return [[]]
    along = [(operand, axis) for operand in op.operands if len(operand.shape) == len(value.shape)]
    along = [(operand, place) for operand, place in along if operand.shape[place] == value.shape[place]]
    if op.code in (Code.ADD, Code.SUB):
        return [along] if len(along) == len(op.operands) else []
    if op.code is Code.MUL:
        return [[part] for part in along]
    if op.code in _PASSES or op.code is Code.BROADCAST:
        return [along[:1]] if along[:1] and along[0][0] is op.operands[0] else []
    if op.code is Code.SUM:
        return [[(op.operands[0], axis + (axis >= op.attributes["axis"]))]]
    if op.code is Code.EXPAND and axis != op.attributes["axis"]:
        return [[(op.operands[0], axis - (axis > op.attributes["axis"]))]]
    return []
