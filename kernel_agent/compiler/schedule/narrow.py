"""`narrowed`: loads of what only a store reads, under the mask of that store.

A forward that pads writes whole rows, and the cotangents of all of them are there to be loaded; the gradient has the
elements that were copied, and no others are looked at.
"""

from __future__ import annotations

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.accumulate import conjuncts
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

_WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD))
_LANEWISE = frozenset((Code.CAST, Code.ADD, Code.SUB, Code.MUL, Code.NEG, Code.SELECT))


def narrowed(kernel: Kernel) -> Kernel:
    """The kernel whose loads leave out lanes that nothing is stored of."""
    uses = Uses.of(kernel)
    stores = {site.op: site for site in sites(kernel.body, _WRITES) if site.op.mask is not None}
    wanted: dict[Op, Value] = {}
    for site in sites(kernel.body, frozenset((Code.LOAD,))):
        reader = _only_reader(site.op, uses) if site.op.mask is not None else None
        store = None if reader is None else stores.get(reader)
        if store is not None and _asks_more(site, store):
            assert store.op.mask is not None
            wanted[site.op] = store.op.mask
    if not wanted:
        return kernel
    try:
        return _Narrower(kernel, wanted).copy()
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


class _Narrower(Copier):
    """Gives some loads another mask, beside their own."""

    def __init__(self, source: Kernel, wanted: dict[Op, Value]) -> None:
        super().__init__(source)
        self.wanted = wanted

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
