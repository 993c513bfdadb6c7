"""`accumulated`: what a loop adds to one place in every trip, summed in registers and added once after the loop."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import implied
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk


def accumulated(kernel: Kernel) -> Kernel:
    """A kernel none of whose FORs adds atomically, in its own straight code, to an address that its trips share."""
    while any(op.code is Code.FOR and _steady(op) for op in kernel.ops):
        kernel = _Accumulator(kernel).copy()
    return kernel


def _steady(loop: Op) -> list[Op]:
    """Additions of a loop whose address is known outside of it."""
    (block,) = loop.blocks
    inside = _defined(block)
    return [op for op in block.ops if op.code is Code.ATOMIC_ADD and op.offset not in inside]


def _defined(block: Block) -> set[Value]:
    """What a block and those within define."""
    found = {*block.arguments}
    for op in walk(block):
        found.update(op.results)
        found.update(value for inner in op.blocks for value in inner.arguments)
    return found


class _Accumulator(Copier):
    """Gives loops a carry for every steady addition: the sum, and where the mask changes, where it ever held."""

    def __init__(self, source: Kernel) -> None:
        super().__init__(source)
        self.sums: dict[Op, Value] = {}
        """What a steady addition has summed so far, while its loop is copied."""
        self.ever: dict[Op, Value] = {}

    def effect(self, op: Op) -> None:
        """Steady additions only sum."""
        if op not in self.sums or self.slicing:
            super().effect(op)
            return
        part = self[op.stored]
        if op in self.ever and op.mask is not None:
            mask = self[op.mask]
            part = self.b.select(mask, part, self.b.zero(part))
            self.ever[op] = self.b.elementwise(Code.OR, (self.ever[op], mask))
        self.sums[op] = self.b.add(self.sums[op], part)

    def loop(self, op: Op) -> None:
        """A FOR."""
        steady = _steady(op)
        if not steady:
            super().loop(op)
            return
        (block,) = op.blocks
        inside = _defined(block)
        changing = [add for add in steady if add.mask is not None and add.mask in inside]
        b = self.b
        carries = [self.whole(value) for value in op.operands[3:]]
        for add in steady:
            zero = b.const(0.0, add.stored.element)
            # A mask that changes may have more lanes than the value it lets pass.
            carries.append(b.whole(zero, add.offset.shape if add in changing else add.stored.shape))
        carries += [b.whole(b.const(False, "i1"), add.offset.shape) for add in changing]
        own = len(op.operands) - 3

        def body(index: Value, inner: list[Value]) -> Sequence[Value]:
            self.enter(block.arguments, (index, *inner[:own]))
            self.sums.update(zip(steady, inner[own:], strict=False))
            self.ever.update(zip(changing, inner[own + len(steady) :], strict=True))
            yields = self.block(block)
            return [*yields, *(self.sums.pop(add) for add in steady), *(self.ever.pop(add) for add in changing)]

        names = [value.name for value in block.arguments[1:]] + [f"{add.base.name}_sum" for add in steady]
        index_name = block.arguments[0].name
        start, stop, step = self.all(op.operands[:3])
        found = b.loop((start, stop, step), carries, body, index_name=index_name, names=names, **op.attributes)
        self.results(op, found[:own])
        ever = dict(zip(changing, found[own + len(steady) :], strict=True))
        for add, value in zip(steady, found[own:], strict=False):
            mask = ever.get(add) or (None if add.mask is None else self[add.mask])
            if add in ever and add.mask is not None and mask is not None:
                for part in implied(add.mask):
                    mask = mask if part in inside else b.logical_and(mask, self[part])
            b.store(self[add.base], self.whole(add.offset), value, mask, Code.ATOMIC_ADD)
