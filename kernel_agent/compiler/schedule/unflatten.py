"""`unflattened`: a loop whose index is read as quotient and remainder, as two loops.

`for step in range(taps * chunks)` with `step // chunks` and `step % chunks` goes through the channels of one tap after
the other. An address that knows the chunk and not the tap depends on the inner loop alone then. So it is with a loop
over `side * side` taps: the rows and the columns of a window each move a digit of an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.visited import constant_of
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, tapes_of
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, is_constant

_PARTS = {Code.FLOORDIV, Code.REM}


@dataclass(frozen=True)
class _Parts:
    """A loop of `count * size` trips."""

    count: Value | Polynomial
    """A number of constexprs where that is all that the trips are."""
    size: Value
    quotient: str
    """What the source calls it."""
    remainder: str


def unflattened(kernel: Kernel, launch: Launch) -> Kernel:
    """The kernel with two loops for each that is one of two."""
    forms, uses = Forms(kernel, launch), Uses.of(kernel)
    found = {op: parts for op in kernel.ops if op.code is Code.FOR and (parts := _parts(forms, uses, op)) is not None}
    return _Unflattener(kernel, found).copy() if found else kernel


def _parts(forms: Forms, uses: Uses, loop: Op) -> _Parts | None:
    """None where the index is read in another way, or where two negative numbers may be a number of trips."""
    start, stop, step = loop.operands[:3]
    (block,) = loop.blocks
    index = block.arguments[0]
    if loop.attributes["reverse"] or not is_constant(start, 0) or not is_constant(step, 1) or index in uses.yielded:
        return None
    if any(next(tapes_of(block, code), None) is not None for code in (Code.TAPE_STORE, Code.TAPE_LOAD)):
        return None
    parts = [op for op in uses[index] if op.code in _PARTS and op.operands[0] is index]
    if {op.code for op in parts} != _PARTS or any(op.attributes.get("unsigned") for op in parts):
        return None
    size, *others = {op.operands[1] for op in parts}
    count = None if others else _count(forms, stop, size)
    names = {op.code: op.result.name for op in parts}
    return None if count is None else _Parts(count, size, names[Code.FLOORDIV], names[Code.REM])


def _count(forms: Forms, stop: Value, size: Value) -> Value | Polynomial | None:
    """How many times so many trips the trips of a loop are; None where that is not known."""
    if constant(stop) is not None and constant(size) is not None:
        times = forms.of(stop).base.quotient(forms.of(size).base)
        return times if times is not None and times.likely(1) else None
    product = stop.producer
    if product is None or product.code is not Code.MUL:
        return None
    for count, other in (product.operands, product.operands[::-1]):
        if other is size and any(_is_natural(forms.of(one)) for one in (count, size)):
            return count
    return None


def _is_natural(form: Form) -> bool:
    """Whether a number is not negative whatever its symbols are: a window of `side * side` taps is a square."""
    if form.not_negative:
        return True
    even = (all(monomial.count(one) % 2 == 0 or one.positive for one in monomial) for monomial, _ in form.base.terms)
    return not form.terms and all(number > 0 for _, number in form.base.terms) and all(even)


class _Unflattener(Copier):
    """Writes loops in loops."""

    def __init__(self, source: Kernel, found: dict[Op, _Parts]) -> None:
        super().__init__(source)
        self.found = found
        self.indices: dict[Value, dict[Code, Value]] = {}
        """Of the loop that is copied: what its index's quotient and remainder are now."""

    def pure(self, op: Op) -> None:
        """Quotients and remainders."""
        known = self.indices.get(op.operands[0], {}) if op.operands else {}
        if op.code in known:
            self[op.result] = known[op.code]
        else:
            super().pure(op)

    def loop(self, op: Op) -> None:
        """A FOR."""
        parts = self.found.get(op)
        if parts is None:
            super().loop(op)
            return
        (block,) = op.blocks
        b = self.b
        index, *inside = block.arguments
        names = [value.name for value in inside]
        start, _, step = self.all(op.operands[:3])
        size = self[parts.size]
        count = constant_of(b, parts.count) if isinstance(parts.count, Polynomial) else self[parts.count]
        assert count is not None

        def outer(quotient: Value, carries: list[Value]) -> Sequence[Value]:
            def inner(remainder: Value, kept: list[Value]) -> Sequence[Value]:
                self.indices[index] = {Code.FLOORDIV: quotient, Code.REM: remainder}
                self[index] = b.add(b.mul(quotient, size), remainder)
                self.enter(inside, kept)
                return self.block(block)

            return b.loop((start, size, step), carries, inner, index_name=parts.remainder, names=names)

        carries = [self.whole(value) for value in op.operands[3:]]
        made = b.loop((start, count, step), carries, outer, index_name=parts.quotient, names=names)
        self.results(op, made)
