"""`unflattened`: a loop whose index is read as quotient and remainder alone, as two loops.

`for step in range(taps * chunks)` with `step // chunks` and `step % chunks` goes through the channels of one tap after
the other. An address that knows the chunk and not the tap depends on the inner loop alone then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, tapes_of
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant


@dataclass(frozen=True)
class _Parts:
    """A loop of `count * size` trips."""

    count: Value
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
    index, product = block.arguments[0], stop.producer
    if loop.attributes["reverse"] or not is_constant(start, 0) or not is_constant(step, 1) or index in uses.yielded:
        return None
    if any(next(tapes_of(block, code), None) is not None for code in (Code.TAPE_STORE, Code.TAPE_LOAD)):
        return None
    readers = uses[index]
    if product is None or product.code is not Code.MUL or any(op.operands[0] is not index for op in readers):
        return None
    if {op.code for op in readers} != {Code.FLOORDIV, Code.REM} or any(op.attributes.get("unsigned") for op in readers):
        return None
    sizes = {op.operands[1] for op in readers}
    for count, size in (product.operands, product.operands[::-1]):
        if sizes == {size} and any(_is_natural(forms.of(one)) for one in (count, size)):
            names = {op.code: op.result.name for op in readers}
            return _Parts(count, size, names[Code.FLOORDIV], names[Code.REM])
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
        known = self.indices.get(op.operands[0]) if op.operands else None
        if known is None:
            super().pure(op)
        else:
            self[op.result] = known[op.code]

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

        def outer(quotient: Value, carries: list[Value]) -> Sequence[Value]:
            def inner(remainder: Value, kept: list[Value]) -> Sequence[Value]:
                self.indices[index] = {Code.FLOORDIV: quotient, Code.REM: remainder}
                for old, new in zip(inside, kept, strict=True):
                    self[old] = new
                    new.source_line = old.source_line
                return self.block(block)

            return b.loop((start, size, step), carries, inner, index_name=parts.remainder, names=names)

        carries = [self.whole(value) for value in op.operands[3:]]
        made = b.loop((start, self[parts.count], step), carries, outer, index_name=parts.quotient, names=names)
        self.results(op, made)
