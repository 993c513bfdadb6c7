"""`undoable`: carries of a loop that are found again from what a trip made of them, so that no tape keeps them.

A trip that adds to a carry, or divides it, by what does not depend on any carry can be undone: state + k e becomes
state by taking k e away. The way back starts with what the loop ended in and undoes trip after trip, as reversible
networks do (Gomez and others, "The reversible residual network", 2017). Rounding errors of the trips add up, so this is
done only where the forward has left numbers in memory that the steps are made of, as the errors of the delta rule or
the sums of Sinkhorn's steps: nobody else knows them apart from the carry. Rows that a trip overwrites were zero where
`fills` proves it. Where a trip changes nothing but a row that is its own, as forward substitution does, that row held
until then what the loop began with (`own_row`): that is exact, whatever the row is made of. A trip that reflects a
carry is done once more (`reflection`): it keeps lengths, and so do the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.reverse.early import FREED
from kernel_agent.compiler.reverse.filling import fills, own_row
from kernel_agent.compiler.reverse.reflection import reflection
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk

UNDONE = "what a loop carries is found again from what it became: no tape"
_WIDE = frozenset(("f32", "f64"))


@dataclass(frozen=True)
class Step:
    """An operation of a trip on what becomes of a carry."""

    op: Op
    place: int
    """Which of its operands that is."""
    again: bool = False
    """It takes itself back: done once more, it gives what it was done to."""
    held: Value | None = None
    """Of a choice: what the lanes held before that it puts something else into; None for zeros."""


Steps = Sequence[Step]
"""From what a trip ends in to what it starts with."""


def undoable(loop: Op) -> Mapping[int, Steps]:
    """By place among the carries of a FOR, the steps to undo."""
    (block,) = loop.blocks
    carries = frozenset(block.arguments[1:])
    found: dict[int, Steps] = {}
    for place, (carry, last) in enumerate(zip(block.arguments[1:], block.yields, strict=True)):
        choice = own_row(loop, place)
        if choice is not None:
            found[place] = [Step(choice, 2, held=loop.operands[3 + place])]
            continue
        mirror = reflection(loop, place) if carry.element in _WIDE else None
        if mirror is not None and _seen(mirror.vector, carries) is not None:
            found[place] = [Step(mirror.op, 0, again=True)]
            continue
        steps = _steps(carry, last, carries, frozenset(block.ops)) if carry.element in _WIDE else None
        chosen = [step for step in steps or () if step.op.code is Code.SELECT]
        if steps and all(fills(loop, place, step.op, step.op.operands[step.place]) for step in chosen):
            found[place] = steps
    return found


def before(copier: Copier, steps: Steps, after: Value) -> Value:
    """What a trip started with, whose index and loads `copier` has in sight, of what it ended in."""
    b, value = copier.b, after
    for step in steps:
        if step.again:
            aside = copier.aside()
            aside[step.op.operands[step.place]] = value
            value = aside[step.op.result]
            continue
        known = [operand for place, operand in enumerate(step.op.operands) if place != step.place]
        known = known[:1] if step.op.code is Code.SELECT else known
        for operand in known:
            for op in _known(operand):  # the number alone: what it stands for was computed of the carry
                copier[op.result] = copier[op.operands[1]]
        others = copier.all(known)
        if step.op.code is Code.SELECT:
            held = b.zero(value) if step.held is None else copier.whole(step.held)
            value = b.select(others[0], *((value, held) if step.place == 1 else (held, value)))
        elif step.op.code is Code.DIV:
            value = b.mul(value, others[0])
        elif step.op.code is Code.FMA:
            value = b.sub(value, b.mul(*others))
        elif step.op.code is Code.SUB:
            value = b.sub(others[0], value) if step.place else b.add(value, others[0])
        else:
            value = b.sub(value, others[0])
    return b.whole(value, after.shape)


def freed(kernel: Kernel, lanes: int) -> Kernel:
    """The kernel, whose additions in loops are told how many numbers of a trip lie on no tape any more."""
    return _Freed(kernel, lanes).copy()


class _Freed(Copier):
    """Notes that on additions in loops."""

    def __init__(self, source: Kernel, lanes: int) -> None:
        super().__init__(source)
        self.lanes = lanes
        loops = [op for op in source.ops if op.code is Code.FOR]
        self.inside = {op for loop in loops for op in walk(loop.blocks[0]) if op.code is Code.ATOMIC_ADD}

    def effect(self, op: Op) -> None:
        """Additions."""
        if op in self.inside and not self.slicing:
            op = Op(op.code, op.operands, (), {**op.attributes, FREED: self.lanes})
        super().effect(op)


def _steps(carry: Value, last: Value, carries: frozenset[Value], ops: frozenset[Op]) -> Steps | None:
    """None where what a trip does to a carry cannot be undone; none for a carry that stays."""
    steps: list[Step] = []
    stored, value = False, last
    while value is not carry:
        op = value.producer
        if op not in ops or value.shape != carry.shape or value.element != carry.element:
            return None
        places = {Code.ADD: (0, 1), Code.SUB: (0, 1), Code.DIV: (0,), Code.FMA: (2,), Code.SELECT: (1, 2)}.get(
            op.code, ()
        )
        seen = [_seen(operand, carries) for operand in op.operands]
        moved = [place for place, part in enumerate(seen) if part is None]
        if len(moved) != 1 or moved[0] not in places:
            return None
        stored = stored or any(part for part in seen)
        steps.append(Step(op, moved[0]))
        value = op.operands[moved[0]]
    return steps if stored or not steps else None


def _seen(value: Value, carries: frozenset[Value]) -> bool | None:
    """Whether a value is made of what the forward left in memory; None where it depends on a carry, or cannot be
    computed out of turn."""
    stored, seen, pending = False, set[Value](), [value]
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        op = one.producer
        if one in carries or (op is not None and (op.blocks or op.code in EFFECTS or op.code is Code.TAPE_LOAD)):
            return None
        if op is not None:
            stored = stored or bool(op.attributes.get("saved"))
            pending += op.operands[1:] if op.code is Code.KNOWN else op.operands
    return stored


def _known(value: Value) -> list[Op]:
    """Every KNOWN that a value is made of, those that others are made of first."""
    found: list[Op] = []
    seen: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        one, ready = stack.pop()
        op = one.producer
        if op is None or (one in seen and not ready):
            continue
        if ready:
            found.append(op)
            continue
        seen.add(one)
        if op.code is Code.KNOWN:
            stack.append((one, True))
        stack += [(operand, False) for operand in (op.operands[1:] if op.code is Code.KNOWN else op.operands)]
    return found
