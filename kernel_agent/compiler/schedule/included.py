"""`included`: rows that leave out the element that a single addition is to, as rows that add zero to it.

The margin of a loss is on one logit: the others are gone through with `cols != label` in the mask, and that of the
label is added to alone. With its place, that is the row of a cross entropy, of which `gathered` makes one addition.
"""

from __future__ import annotations

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import few_and_rows, own_parts, sum_of
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, unspread


def included(kernel: Kernel, launch: Launch) -> Kernel:
    """The kernel with additions to whole rows where these leave out what it adds to alone."""
    forms = Forms(kernel, launch)
    found: dict[Op, Value] = {}
    for singles, row in few_and_rows(forms, kernel):
        for single in singles:
            part = _leaving_out(forms, row, single)
            if part is not None:
                found[row.op] = part
    return prune(_Including(kernel, found).copy()) if found else kernel


def _leaving_out(forms: Forms, row: Site, single: Site) -> Value | None:
    """What a row's mask asks for that fails at the element of a single addition alone."""
    mine, theirs = own_parts(single, row)
    if not mine or not theirs or single.op.offset.shape or row.op.mask is None:
        return None
    gap = sum_of(forms, theirs) - sum_of(forms, mine)
    for part in conjuncts(row.op.mask):
        test = unspread(part).producer
        if test is not None and test.code is Code.CMP and test.attributes["predicate"] == "ne":
            one, other = map(forms.of, test.operands)
            if one - other in (gap, Form() - gap):
                return part
    return None


class _Including(Copier):
    """Adds zero where a mask leaves an element out."""

    def __init__(self, source: Kernel, parts: dict[Op, Value]) -> None:
        super().__init__(source)
        self.parts = parts

    def effect(self, op: Op) -> None:
        """An addition to a row."""
        part = None if self.slicing else self.parts.get(op)
        if part is None or op.mask is None:
            super().effect(op)
            return
        b, kept = self.b, self[part]
        value = b.select(kept, self[op.stored], b.zero(op.stored))
        mask: Value | None = None
        for other in conjuncts(op.mask):
            if other is not part:
                mask = self[other] if mask is None else b.logical_and(mask, self[other])
        b.store(self[op.base], self.whole(op.offset), value, mask, op.code)
