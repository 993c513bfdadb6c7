"""`unfolded`: additions at places that are folded, as those of a reflected border, one for each side of the fold.

`abs(i)` is i or -i, and `where(i < n, i, 2 * (n - 1) - i)` one of two places: on each side of the fold the address is a
linear form of indices again, and a condition says which side it is. So a mirrored tap is a tap whose place falls while
outputs are counted upwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, hints
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

MOST = 16
"""Sides of one addition: a reflected image has four for each of its axes."""

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
_THROUGH = frozenset(
    (Code.ADD, Code.SUB, Code.MUL, Code.NEG, Code.CAST, Code.ABS, Code.SELECT, Code.EXPAND, Code.BROADCAST, Code.FULL)
)

Sides = dict[Value, bool]
"""By fold, whether its operand is not negative, or its condition holds."""


def unfolded(kernel: Kernel) -> Kernel | None:
    """The kernel with an addition for every side of each fold; None where there are no folds, or too many."""
    ways = {op: list(_ways(op.offset)) for op in kernel.ops if op.code is Code.ATOMIC_ADD}
    if all(len(found) == 1 for found in ways.values()) or any(len(found) > MOST for found in ways.values()):
        return None
    return _Unfolder(kernel, ways).copy()


def _ways(offset: Value) -> Iterator[Sides]:
    """All sides that an address has; one more than `MOST` where there are more."""
    left: list[Sides] = [{}]
    found = 0
    while left and found <= MOST:
        sides = left.pop()
        fold = _open(offset, sides)
        if fold is None:
            found += 1
            yield sides
        else:
            left += [{**sides, fold: False}, {**sides, fold: True}]


def _open(value: Value, sides: Sides) -> Value | None:
    """A fold whose side is not chosen, with none within it; None where there is none."""
    op = value.producer
    if op is None or value.is_float or op.code not in _THROUGH:
        return None
    asked = op.operands
    if op.code is Code.SELECT:
        condition = op.operands[0].producer
        if condition is None or condition.code is not Code.CMP or condition.operands[0].is_float:
            return None
        asked = condition.operands if value not in sides else (op.operands[1 if sides[value] else 2],)
    for operand in asked:
        inner = _open(operand, sides)
        if inner is not None:
            return inner
    return value if op.code in (Code.ABS, Code.SELECT) and value not in sides else None


class _Unfolder(Copier):
    """Writes an addition for each way."""

    def __init__(self, source: Kernel, ways: dict[Op, list[Sides]]) -> None:
        super().__init__(source)
        self.ways = ways

    def effect(self, op: Op) -> None:
        """Additions."""
        ways = self.ways.get(op, [{}])
        if self.slicing or len(ways) == 1:
            super().effect(op)
            return
        b, stored = self.b, self[op.stored]
        for sides in ways:
            known: dict[Value, Value] = {}
            mask = None if op.mask is None else self.on(op.mask, sides, known)
            for fold, side in sides.items():
                here = self.condition(fold, side, sides, known)
                mask = here if mask is None else b.logical_and(mask, here)
            offset = b.whole(self.on(op.offset, sides, known), op.offset.shape)
            b.store(self[op.base], offset, stored, mask, op.code, **hints(op))

    def condition(self, fold: Value, side: bool, sides: Sides, known: dict[Value, Value]) -> Value:
        """That a fold has a side."""
        b, op = self.b, fold.producer
        assert op is not None
        if op.code is Code.ABS:
            inner = self.on(op.operands[0], sides, known)
            return b.compare("ge" if side else "lt", inner, b.const(0, inner.element))
        asked = op.operands[0].producer
        assert asked is not None
        left, right = (self.on(value, sides, known) for value in asked.operands)
        predicate = asked.attributes["predicate"]
        if not asked.attributes.get("unsigned") and (side or predicate in _NEGATED):
            return b.compare(predicate if side else _NEGATED[predicate], left, right)
        holds = self.on(op.operands[0], sides, known)
        return holds if side else b.elementwise(Code.XOR, (holds, b.const(True, "i1")))

    def on(self, value: Value, sides: Sides, known: dict[Value, Value]) -> Value:
        """The copy of a value on some sides. `known`: what was made for these."""
        if value not in known:
            known[value] = self._on(value, sides, known)
        return known[value]

    def _on(self, value: Value, sides: Sides, known: dict[Value, Value]) -> Value:
        op = value.producer
        if value in sides:
            assert op is not None
            if op.code is Code.SELECT:
                return self.on(op.operands[1 if sides[value] else 2], sides, known)
            inner = self.on(op.operands[0], sides, known)
            return inner if sides[value] else self.b.neg(inner)
        if op is None or op.blocks or len(op.results) != 1 or not self._folded(value, sides):
            return self[value]
        if op.code in (Code.LOAD, Code.TAPE_LOAD):
            return self[value]
        made = self.b.again(op, [self.on(operand, sides, known) for operand in op.operands])
        assert isinstance(made, Value)
        return made

    def _folded(self, value: Value, sides: Sides) -> bool:
        """Whether a value is made of one that has a side."""
        op = value.producer
        if value in sides:
            return True
        if op is None or op.blocks or op.code in (Code.LOAD, Code.TAPE_LOAD):
            return False
        return any(self._folded(operand, sides) for operand in op.operands)
