"""`narrowed`: loads of what only some lanes of are used, under the condition that says so.

A forward that pads writes whole rows, and the cotangents of all of them are there to be loaded; the gradient has the
elements that were copied, and no others are looked at: what only a store reads is loaded under its mask. A loop that
searched for a threshold leaves few lanes above it, as sparsemax does: what is read of a load there, and is zero
elsewhere, is loaded there, with zeros elsewhere. Other conditions, as that of a relu, are true of many lanes, and a
mask of its own for each lane would cost more than it spares.
"""

from __future__ import annotations

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare, constant

_LOAD = frozenset((Code.LOAD,))
_WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD))
_LANEWISE = frozenset((Code.CAST, Code.ADD, Code.SUB, Code.MUL, Code.NEG, Code.SELECT))


def narrowed(kernel: Kernel) -> Kernel:
    """The kernel whose loads leave out lanes that nothing is stored of."""
    uses = Uses.of(kernel)
    stores = {site.op: site for site in sites(kernel.body, _WRITES) if site.op.mask is not None}
    wanted: dict[Op, Value] = {}
    for site in sites(kernel.body, _LOAD):
        reader = _only_reader(site.op, uses) if site.op.mask is not None else None
        store = None if reader is None else stores.get(reader)
        if store is not None and _asks_more(site, store):
            assert store.op.mask is not None
            wanted[site.op] = store.op.mask
    choices = {site.op: choice for site in sites(kernel.body, _LOAD) if (choice := _choice(site, uses)) is not None}
    if not (wanted or choices):
        return kernel
    try:
        return _Narrower(kernel, wanted, choices).copy()
    except CannotDerive:  # a mask comes of memory that is written between the load and the store
        return kernel


def _only_reader(load: Op, uses: Uses) -> Op | None:
    """The store that is given what becomes of a load, lane by lane, and is all that reads it."""
    value = load.result
    while uses.count(value) == 1 and value not in uses.yielded:
        (reader,) = uses[value]
        if reader.code in _WRITES:
            return reader if reader.stored is value and reader.offset.shape == load.result.shape else None
        if reader.code not in _LANEWISE or reader.result.shape != load.result.shape:
            return None
        value = reader.result
    return None


def _asks_more(load: Site, store: Site) -> bool:
    """Whether the mask of a store in the block of a load has a condition that the load's has not."""
    assert load.op.mask is not None
    assert store.op.mask is not None
    return store.block is load.block and not set(conjuncts(store.op.mask)) <= set(conjuncts(load.op.mask))


def _choice(load: Site, uses: Uses) -> Op | None:
    """The choice between what a load of zeros elsewhere found and zero that alone reads it, if its condition was there
    before and takes the results of a loop."""
    op, value = load.op, load.op.result
    if op.mask is None or op.other is None or constant(bare(op.other)) != 0 or not value.is_float:
        return None
    while uses.count(value) == 1 and value not in uses.yielded:
        (reader,) = uses[value]
        if reader.code is Code.SELECT and reader.operands[1] is value and reader in load.block.ops:
            condition, other = reader.operands[0], reader.operands[2]
            alike = condition.shape == op.offset.shape and constant(bare(other)) == 0
            return reader if alike and _is_before(condition, op, load.block) and _is_searched(condition) else None
        if reader.code is not Code.CAST:
            return None
        value = reader.result
    return None


def _is_before(value: Value, op: Op, block: Block) -> bool:
    """Whether a value is there when an operation of a block runs."""
    made = value.producer
    return made not in block.ops or block.ops.index(made) < block.ops.index(op)


def _is_searched(value: Value) -> bool:
    """Whether a value is computed of what a loop ends in."""
    stack, seen = [value], {value}
    while stack:
        op = stack.pop().producer
        if op is None:
            continue
        if op.code is Code.FOR:
            return True
        stack += [operand for operand in op.operands if operand not in seen]
        seen.update(op.operands)
    return False


class _Narrower(Copier):
    """Gives some loads another mask, beside their own."""

    def __init__(self, source: Kernel, wanted: dict[Op, Value], choices: dict[Op, Op]) -> None:
        """`choices`: of loads that are made under their conditions, which leaves nothing to choose."""
        super().__init__(source)
        self.wanted = {**wanted, **{load: choice.operands[0] for load, choice in choices.items()}}
        self.needless = frozenset(choices.values())

    def pure(self, op: Op) -> None:
        """Choices."""
        if op in self.needless:
            self[op.result] = self[op.operands[1]]
        else:
            super().pure(op)

    def load(self, op: Op) -> None:
        """Loads."""
        if op not in self.wanted or op.mask is None:
            super().load(op)
            return
        b, own, theirs = self.b, op.mask, self.wanted[op]
        known = set(conjuncts(theirs))
        mask = self[theirs]
        for part in conjuncts(own):
            if part not in known:
                mask = b.logical_and(self[part], mask)
        other = None if op.other is None else self[op.other]
        hints = {key: value for key, value in op.attributes.items() if key not in ("base", "masked", "padded")}
        self[op.result] = b.load(self[op.base], self.whole(op.offset), mask, other, op.result.name, **hints)
