"""`lent`: gradients that are a cotangent where memory says that programs store all of them, as rows of sequences that
fill a packed batch.

A call whose sequences leave rows out needs memory with zeros there, and only the launch can tell: a constexpr says
whether the kernel stores what it copies, and the backward takes the cotangent where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.schedule.twins import source_of
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


@dataclass(frozen=True)
class Lent:
    """Kernels that store some gradients only where they are told to."""

    kernels: list[Kernel]
    """As they were given."""
    owners: dict[str, tuple[str, str]]
    """By gradient the cotangent that it may be, and the constexpr that says it is not."""


def lent(kernels: Sequence[Kernel], names: Sequence[str], cotangents: Set[str]) -> Lent:
    """Of the gradients `names` those that one kernel stores beside others, each element as a cotangent has it there."""
    owners: dict[str, tuple[str, str]] = {}
    found = []
    for kernel in kernels:
        written: dict[str, list[Site]] = {}
        for site in sites(kernel.body, WRITES):
            written.setdefault(site.op.base.name, []).append(site)
        switches: dict[str, str] = {}
        for name in names:
            stores = written.get(name, [])
            source = source_of(stores) if stores and all(site.op.code is Code.STORE for site in stores) else ""
            loaded = any(op.code is Code.LOAD and op.base.name == name for op in kernel.ops)
            if source in cotangents and not loaded and len(written) > len(switches) + 1:
                switches[name] = kernel.free_name(f"STORE_{name.upper()}")
                owners[name] = source, switches[name]
        found.append(_Switched(kernel, switches).copy() if switches else kernel)
    return Lent(found, owners)


class _Switched(Copier):
    """Stores to some arguments where constexprs say so."""

    def __init__(self, source: Kernel, switches: Mapping[str, str]) -> None:
        super().__init__(source)
        self.switches = switches
        self.b.kernel.constants.update(dict.fromkeys(switches.values(), True))

    def effect(self, op: Op) -> None:
        """Stores."""
        switch = self.switches.get(op.base.name) if op.code is Code.STORE else None
        if switch is None or self.slicing:
            super().effect(op)
            return
        mask = None if op.mask is None else self[op.mask]
        offset, stored = self.whole(op.offset), self[op.stored]

        def store() -> list[Value]:
            self.b.store(self[op.base], offset, stored, mask)
            return []

        self.b.branch(self.b.setting(switch), store, list)
