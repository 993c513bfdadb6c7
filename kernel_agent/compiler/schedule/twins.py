"""`without_twins`: gradients that are, a cotangent or another gradient have no memory of their own.

The gradient of a residual is the cotangent of the sum, and often that of the other summand, too: what a kernel would
store again is there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.inorder import in_order
from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op

_WIDE = ("f32", "f64")


@dataclass(frozen=True)
class Single:
    """Kernels without stores of what is elsewhere."""

    kernels: list[Kernel | None]
    """As they were given; None for one that has nothing left to store."""
    same: dict[str, str]
    """Gradient -> the cotangent, or the gradient, that lies in memory as it would, under the same offsets, or that has
    the same elements under the same indices."""
    by_index: dict[str, tuple[Fact, ...]]
    """Of the latter, facts for that."""


def without_twins(
    kernels: Sequence[Kernel],
    gradients: Mapping[str, str],
    covered: Set[str],
    cotangents: Set[str],
    launches: Sequence[Launch] = (),
) -> Single:
    """The same gradients of fewer stores.

    `gradients`: those that are stored to, each element once, with the tensors they belong to. `covered`: those of them
    whose every element is. The first of several gradients that are the same is kept, and so is a kernel that would have
    been the last one. `launches`: of the kernels; without them nothing is asked of indices.
    """
    written: dict[str, list[Site]] = {}
    homes: dict[str, set[int]] = {}
    for place, kernel in enumerate(kernels):
        for site in sites(kernel.body, WRITES):
            written.setdefault(site.op.base.name, []).append(site)
            homes.setdefault(site.op.base.name, set()).add(place)
    stored = [name for name in gradients if all(site.op.code is Code.STORE for site in written[name])]
    same: dict[str, str] = {}
    by_index: dict[str, tuple[Fact, ...]] = {}
    for at, name in enumerate(stored):
        source = source_of(written[name]) if name in covered else ""
        if source in cotangents and len(written) > len(same) + 1:
            same[name] = source
            continue
        load = _loaded(written[name][0].op) if name in covered and len(written[name]) == 1 and launches else None
        if load is not None and load.base.name in cotangents and len(written) > len(same) + 1:
            (place,) = homes[name]
            facts = in_order(Forms(kernels[place], launches[place]), written[name][0], load, gradients[name], name)
            if facts is not None:
                same[name], by_index[name] = load.base.name, facts
                continue
        for other in stored[:at]:
            if other not in same and _alike(written[other], written[name]):
                same[name] = other
                break
    left: list[Kernel | None] = []
    for place, kernel in enumerate(kernels):
        if any(place in homes[name] for name in same):
            made = prune(_Without(kernel, same).copy())
            left.append(made if any(op.code in WRITES for op in made.ops) else None)
        else:
            left.append(kernel)
    return Single(left, same, by_index)


def source_of(stores: Sequence[Site]) -> str:
    """The argument that all stores copy, each element to where it was; empty where there is none."""
    found = {_copied(site.op) for site in stores}
    return found.pop() if len(found) == 1 else ""


def _copied(store: Op) -> str:
    load = _loaded(store)
    return "" if load is None or load.offset is not store.offset else load.base.name


def _loaded(store: Op) -> Op | None:
    """The load of what a store stores as it is; None where it stores something else."""
    value, element = store.stored, store.base.pointee
    while value.producer is not None and value.producer.code is Code.CAST:
        (value,) = value.producer.operands
        if value.element not in (element, *_WIDE):
            return None
    load = value.producer
    if load is None or load.code is not Code.LOAD or load.base.pointee != element:
        return None
    return load if load.mask is None or load.mask is store.mask else None


def _alike(some: Sequence[Site], others: Sequence[Site]) -> bool:
    """Whether two gradients are stored to in the same places, the same values."""
    return len(some) == len(others) and all(
        one.block is other.block
        and one.op.offset is other.op.offset
        and one.op.mask is other.op.mask
        and one.op.stored is other.op.stored
        for one, other in zip(some, others, strict=True)
    )


class _Without(Copier):
    """Copies all but the stores to some arguments."""

    def __init__(self, source: Kernel, dropped: Mapping[str, str]) -> None:
        super().__init__(source)
        self.dropped = dropped

    def effect(self, op: Op) -> None:
        """Stores."""
        if op.code not in (Code.STORE, Code.STORE_BLOCK) or op.base.name not in self.dropped:
            super().effect(op)
