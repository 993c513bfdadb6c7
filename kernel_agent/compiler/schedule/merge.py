"""`merged`: additions to one address in straight code as one addition of the sum."""

from __future__ import annotations

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

Address = tuple[int, Block, Form, tuple[int, ...]]


def merged(kernel: Kernel) -> Kernel:
    """A kernel in which no block adds twice to the same addresses of a buffer.

    A load that a kernel does in two places gives its gradient in two; one of them could not be a plain store.
    """
    forms = Forms(kernel, Launch.like_forward(3))
    together: dict[Address, list[Op]] = {}
    for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,))):
        offset = site.op.offset
        key = (site.op.base.id, site.block, forms.of(offset), offset.shape)
        together.setdefault(key, []).append(site.op)
    groups = {ops[-1]: ops for ops in together.values() if len(ops) > 1}
    return _Merger(kernel, groups).copy() if groups else kernel


class _Merger(Copier):
    """Lets the last addition of a group do all."""

    def __init__(self, source: Kernel, groups: dict[Op, list[Op]]) -> None:
        super().__init__(source)
        self.groups = groups
        self.dropped = {op for ops in groups.values() for op in ops[:-1]}

    def effect(self, op: Op) -> None:
        """Additions."""
        if op in self.dropped:
            return
        ops = self.groups.get(op)
        if ops is None or self.slicing:
            super().effect(op)
            return
        value, mask = self.sum(ops)
        self.b.store(self[op.base], self.whole(op.offset), value, mask, Code.ATOMIC_ADD)

    def sum(self, ops: list[Op]) -> tuple[Value, Value | None]:
        """What a group adds, and where. Under different masks each adds zero where its own does not hold."""
        b = self.b
        masks = [op.mask for op in ops]
        alike = all(mask is masks[0] for mask in masks)
        value, anywhere = None, None
        for op in ops:
            part = self[op.stored]
            mask = None if op.mask is None else self[op.mask]
            if not alike and mask is not None:
                part = b.select(mask, part, b.zero(part))
            value = part if value is None else b.add(value, part)
            if mask is not None:
                anywhere = mask if anywhere is None or alike else b.elementwise(Code.OR, (anywhere, mask))
        assert value is not None
        return value, anywhere if all(mask is not None for mask in masks) else None
