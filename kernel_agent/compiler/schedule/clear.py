"""`cleared`: loops of products in two parts: trips in which a mask holds for all lanes, and trips that must ask it.

Of a causal mask only the trips on the diagonal ask which keys a row sees; of a last tile that is cut only that does.
The mask is linear in the loop's index, so that the trip from which on it holds, or up to which it does, is a quotient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.visited import constant_of
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

_ORDERS = frozenset(("le", "lt", "ge", "gt"))
_SPREADS = frozenset((Code.EXPAND, Code.FULL, Code.BROADCAST))
_SUMS = frozenset((Code.ADD, Code.SUB, Code.MUL, Code.CAST, Code.NEG))


@dataclass(frozen=True)
class Mask:
    """A comparison that holds in all lanes from a trip on, or up to one."""

    op: Op
    rises: bool
    """It holds from a trip on."""
    size: Polynomial
    """By how much a step of the index changes the difference of its sides; at least 1."""
    corner: Polynomial
    """By how much the difference is less in the lane that is let pass last than in the first one."""
    step: Polynomial
    """Of the loop."""


def cleared(kernel: Kernel, launch: Launch) -> Kernel:
    """The kernel whose loops of products ask masks only in trips that they may fail in."""
    forms = Forms(kernel, launch)
    found: dict[Op, list[Mask]] = {}
    for loop in kernel.ops:
        if loop.code is not Code.FOR or loop.attributes["reverse"]:
            continue
        ops = loop.blocks[0].ops
        if not any(op.code is Code.DOT for op in ops) or any(op.blocks for op in ops):
            continue
        masks = [mask for op in _asked(ops) if (mask := _mask(forms, loop, op)) is not None]
        alike = [mask for mask in masks if mask.rises is masks[0].rises]
        if alike:
            found[loop] = alike
    return _Clearer(kernel, found).copy() if found else kernel


def _asked(ops: Iterable[Op]) -> list[Op]:
    """Comparisons that choices among floats depend on."""
    found: dict[Op, None] = {}
    for choice in ops:
        if choice.code is not Code.SELECT or not choice.result.is_float:
            continue
        stack = [choice.operands[0]]
        while stack:
            op = stack.pop().producer
            if op is not None and op.code in _SPREADS | {Code.AND}:
                stack.extend(op.operands)
            elif op is not None and op.code is Code.CMP:
                found[op] = None
    return list(found)


def _mask(forms: Forms, loop: Op, op: Op) -> Mask | None:
    """How a comparison depends on a loop; None where that is not linear, or not of one direction."""
    predicate = op.attributes["predicate"]
    if predicate not in _ORDERS or op.attributes.get("unsigned") or op.operands[0].is_float:
        return None
    left, right = op.operands if predicate in ("ge", "gt") else op.operands[::-1]
    difference = forms.of(left) - forms.of(right)
    step = forms.of(loop.operands[2]).invariant
    trip = difference.coefficients.get(forms.trip(loop))
    factor = None if trip is None or step is None else trip.quotient(step)
    if factor is None or step is None or not (_simple(forms, loop, left) and _simple(forms, loop, right)):
        return None
    corner = ZERO
    for atom, number in difference.terms:
        if atom.kind is Kind.LANE:
            if atom.extent is None or not (number.surely(1) or (-number).surely(1)):
                return None
            if not number.surely(1):
                corner = corner + number * (atom.extent - ONE)
        elif atom != forms.trip(loop) and forms.trip(loop) in atom.sources:
            return None
    rises = factor.surely(1)
    if not rises and not forms.of(loop.operands[0]).not_negative:
        return None
    size = factor if rises else -factor
    fixed = all(symbol.present is not None for number in (size, step, corner) for symbol in number.symbols)
    return Mask(op, rises, size, corner, step) if fixed and size.surely(1) and step.surely(1) else None


def _simple(forms: Forms, loop: Op, value: Value) -> bool:
    """Whether an index can be computed for one lane before a loop: sums and products of aranges and scalars."""
    op = value.producer
    if op is not None and op.code in _SPREADS | _SUMS:
        return all(_simple(forms, loop, operand) for operand in op.operands)
    if value is loop.blocks[0].arguments[0] or (op is not None and op.code is Code.ARANGE):
        return True
    return value.shape == () and forms.trip(loop) not in forms.reads(value)


class _Clearer(Copier):
    """Makes two loops of one."""

    def __init__(self, source: Kernel, found: dict[Op, list[Mask]]) -> None:
        super().__init__(source)
        self.found = found
        self.true: frozenset[Op] = frozenset()
        """Comparisons that hold in the part that is being copied."""

    def pure(self, op: Op) -> None:
        """Comparisons."""
        if op in self.true and not self.slicing:
            self[op.result] = self.b.const(True, "i1")
        else:
            super().pure(op)

    def loop(self, op: Op) -> None:
        """A FOR in two parts."""
        masks = self.found.get(op)
        if masks is None:
            super().loop(op)
            return
        b, (block,) = self.b, op.blocks
        start, stop, step = self.all(op.operands[:3])
        limits = [self._limit(op, mask, start) for mask in masks]
        middle = limits[0]
        for limit in limits[1:]:
            middle = b.elementwise(Code.MAX if masks[0].rises else Code.MIN, (middle, limit))
        name = "clear_from" if masks[0].rises else "clear_to"
        middle = b.elementwise(Code.MIN, (b.elementwise(Code.MAX, (middle, start)), stop), name=name)
        carries = [self.whole(value) for value in op.operands[3:]]
        names = [value.name for value in block.arguments]
        parts = ((start, middle, not masks[0].rises), (middle, stop, masks[0].rises))
        for first, last, clear in parts:

            def body(index: Value, inner: list[Value], clear: bool = clear) -> list[Value]:
                self.enter(block.arguments, (index, *inner))
                self.true = frozenset(mask.op for mask in masks) if clear else frozenset()
                found = self.block(block)
                self.true = frozenset()
                return found

            carries = list(
                b.loop((first, last, step), carries, body, index_name=names[0], names=names[1:], **self.attributes(op))
            )
        self.results(op, carries)

    def _limit(self, loop: Op, mask: Mask, start: Value) -> Value:
        """The index of the first trip that a mask holds from, or of the first one from which it may fail."""
        b = self.b
        predicate = mask.op.attributes["predicate"]
        left, right = (self._lane(loop, side) for side in mask.op.operands)
        if predicate in ("le", "lt"):
            left, right = right, left
        # The mask holds where left - right + corner, plus or minus the size times the index, is at least 0, or 1.
        corner = mask.corner - (ONE if predicate in ("gt", "lt") else ZERO)
        if mask.rises:
            bound, more = b.sub(right, left), mask.size - ONE - corner
        else:
            bound, more = b.sub(left, right), mask.size + corner
        if mask.size != ONE:
            bound, more = self._quotient(self._plus(bound, more), mask.size), ZERO
        bound = b.sub(b.cast(bound, start.element), start)
        if mask.step == ONE:
            return b.add(start, self._plus(bound, more))
        trips = self._quotient(self._plus(bound, more + mask.step - ONE), mask.step)
        return b.add(start, b.mul(trips, self._number(mask.step, trips)))

    def _number(self, number: Polynomial, like: Value) -> Value:
        found = constant_of(self.b, number)
        assert found is not None
        return self.b.cast(found, like.element)

    def _plus(self, value: Value, number: Polynomial) -> Value:
        return self.b.add(value, self._number(number, value))

    def _quotient(self, value: Value, divisor: Polynomial) -> Value:
        return self.b.elementwise(Code.FLOORDIV, (value, self._number(divisor, value)))

    def _lane(self, loop: Op, value: Value) -> Value:
        """An index in the first lane, at the loop's index 0."""
        op = value.producer
        if value is loop.blocks[0].arguments[0]:
            return self.b.zero(value)
        if op is None:
            return self[value]
        if op.code is Code.ARANGE:
            return self.b.const(op.attributes["start"])
        if op.code in _SPREADS:
            return self._lane(loop, op.operands[0])
        if op.code in _SUMS:
            found = self.b.again(op, [self._lane(loop, part) for part in op.operands])
            assert isinstance(found, Value)
            return found
        return self[value]
