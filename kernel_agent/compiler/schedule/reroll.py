"""`rerolled`: a loop whose source does several steps in a trip, as one of a step in each.

A kernel may take four classes in a trip so that four loads are in flight. Its adjoint adds at four places then, of
which only together it is known that they are all classes. Where each is what the first one is some steps later, a loop
of single steps does the same.
"""

from __future__ import annotations

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import limit_of
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.ssa.code import CONTROL, EFFECTS, Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, walk

_INNER = EFFECTS | CONTROL


def rerolled(kernel: Kernel, loop: Op, launch: Launch) -> Kernel | None:
    """The kernel with a loop of single steps; None where the loop's trips have one step, or do more than to add once
    for each. Raises CannotDerive where steps of a trip are not alike."""
    (block,) = loop.blocks
    steps, added = constant(loop.operands[2]), [op for op in walk(block) if op.code in _INNER]
    if len(block.arguments) != 1 or steps != len(added) or steps == 1:
        return None
    if any(op.code is not Code.ATOMIC_ADD or op not in block.ops for op in added):
        return None
    ordered = _in_order(Forms(kernel, launch), loop, added)
    return None if ordered is None else prune(_Reroller(kernel, loop, ordered).copy())


def _in_order(forms: Forms, loop: Op, added: list[Op]) -> list[Op] | None:
    """A trip's additions by their steps, if none is made where the index of its step is not before the loop's end."""
    index, stop = forms.of(loop.blocks[0].arguments[0]), forms.of(loop.operands[1])
    found: dict[int, Op] = {}
    for op in added:
        for part in [] if op.mask is None else conjuncts(op.mask):
            for step in range(len(added)):
                end = limit_of(forms, part, index + Form(base=Polynomial.integer(step)))
                if end is not None and forms.of(end) == stop:
                    found[step] = op
    return [found[step] for step in range(len(added))] if len(found) == len(added) else None


class _Reroller(Copier):
    """Makes the loop one of single steps."""

    def __init__(self, source: Kernel, rolled: Op, added: list[Op]) -> None:
        super().__init__(source)
        self.rolled = rolled
        self.added = added

    def loop(self, op: Op) -> None:
        """The one."""
        if self.slicing or op is not self.rolled:
            super().loop(op)
            return
        b, (argument,) = self.b, op.blocks[0].arguments
        start, stop, step = self.bounds(op)

        def body(index: Value, _: list[Value]) -> list[Value]:
            for number, one in enumerate(self.added):
                later = b.add(index, b.const(number, index.element))
                if self._of(self.added[0], argument, later) != self._of(one, argument, index):
                    raise CannotDerive("steps of a trip are not alike")
            self[argument] = index
            first = self.added[0]
            mask = None if first.mask is None else self[first.mask]
            b.store(self[first.base], self.whole(first.offset), self.whole(first.stored), mask, Code.ATOMIC_ADD)
            return []

        b.loop((start, stop, b.const(1, step.element)), [], body, index_name=argument.name, **self.attributes(op))

    def _of(self, op: Op, argument: Value, index: Value) -> list[Value]:
        """Where, what and under which mask an addition adds where the loop's index is `index`: what is equal to the
        builder is the same value."""
        copier = self.aside()
        copier[argument] = index
        parts = [op.base, op.offset, op.stored, *([] if op.mask is None else [op.mask])]
        return [copier[part] for part in parts]
