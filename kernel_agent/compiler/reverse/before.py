"""`separated`: a kernel that updates memory in place as one that reads an argument of its own.

What such a kernel reads is gone behind it, and the gradient of what was there before has the addresses of the cotangent
of what is there afterwards. With the loads from another argument, which holds what the memory held before the launch,
the kernel is one like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_agent.compiler.reverse.disjoint import Apart
from kernel_agent.compiler.reverse.memory import Place, accesses_to, gives, may_precede
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import FLOATS, Kernel, Op, Value


@dataclass(frozen=True)
class Separated:
    """A kernel whose loads of what it overwrites come from other arguments."""

    kernel: Kernel
    names: Mapping[str, str] = field(default_factory=dict)
    """Argument that it overwrites -> the one that holds what was there before, of the same strides."""
    facts: tuple[str, ...] = ()
    """Python over names of the launch: what has to hold for no trip to read what an earlier one stored."""


def separated(kernel: Kernel, calls: Calls) -> Separated:
    """The kernel with an argument of its own for every one that it reads before it stores there.

    Arguments stay as they are where a load may see what the launch itself has stored; programs that read what others
    store would race, and are not thought of. `calls`: launches that were seen, on whose numbers the facts rely.
    """
    apart = Apart(kernel, calls)
    targets = {base for base in written_to(kernel.body) if base.pointee in FLOATS}
    places = accesses_to(kernel, targets)
    moved: dict[Value, list[Op]] = {}
    for base, accesses in places.items():
        loads = [one for one in accesses if one.op.code is Code.LOAD and not _forwarded(one, accesses)]
        if loads and all(_sees_before(load, accesses, apart) for load in loads):
            moved[base] = [load.op for load in loads]
    if not moved:
        return Separated(kernel)
    names: dict[str, str] = {}
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    fresh: dict[Value, Value] = {}
    for base in moved:
        name = f"{base.name}_before"
        while name in taken:
            name += "_"
        taken.add(name)
        names[base.name] = name
        fresh[base] = Value(base.element, (), name)
    arguments = [*kernel.arguments, *fresh.values()]
    target = emptied(kernel, arguments=arguments)
    target.fixed = kernel.fixed
    builder = Builder(target, written_to(kernel.body))
    copy = _Moving(kernel, builder, {op: fresh[base] for base, ops in moved.items() for op in ops}).copy()
    return Separated(copy, names, tuple(apart.facts))


def _forwarded(load: Place, accesses: list[Place]) -> bool:
    """Whether a load reads what a store of the same trip, which stands last before it, has put there."""
    before = [one for one in accesses if one.op.code is not Code.LOAD and may_precede(one, load)]
    return bool(before) and gives(before[-1], load)


def _sees_before(load: Place, accesses: list[Place], apart: Apart) -> bool:
    """Whether nothing that runs before a load in its program stores where it reads: what does is stores of earlier
    trips alone, each trip at elements of its own."""
    return all(
        one.op.code is Code.STORE
        and one.position > load.position
        and one.op.offset is load.op.offset
        and one.op.mask is load.op.mask
        and apart.tells_trips(one.op)
        for one in accesses
        if one.op.code is not Code.LOAD and may_precede(one, load)
    )


class _Moving(Copier):
    """Loads from other arguments."""

    def __init__(self, source: Kernel, builder: Builder, bases: Mapping[Op, Value]) -> None:
        super().__init__(source, builder)
        self.bases = bases

    def load(self, op: Op) -> None:
        """A LOAD."""
        base = self.bases.get(op)
        if base is None:
            super().load(op)
            return
        mask, other = op.mask, op.other
        self[op.result] = self.b.load(
            base,
            self.whole(op.offset),
            None if mask is None else self[mask],
            None if other is None else self[other],
            op.result.name,
        )
