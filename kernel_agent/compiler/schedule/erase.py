"""`erasing`: what a launch leaves of a cotangent: zeros where it stored, and nothing to do where it stored everywhere.

The cotangent of what a buffer holds after a launch belongs to the launch at the elements that it stored to, and at all
others to what was there before.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan, Fact, Step
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


def erasing(kernel: Kernel, name: str, axes: int, calls: Calls, *, whole: bool) -> BackwardPlan:
    """A plan that sets the cotangent of the argument `name` to zero wherever the kernel stores to it.

    It has no steps, and facts instead, where stores are known to reach every element in all calls that were seen:
    nothing is left then. `whole`: the launch is given the whole tensor. Raises CannotDerive where what decides about
    the stores is gone.
    """
    launch = Launch.like_forward(axes, calls)
    facts = _covering(kernel, name, launch) if whole else None
    given = f"d{name.removesuffix('_ptr')}"
    if facts is not None:
        return BackwardPlan("owned", {name: given}, (), (), {}, facts=facts)
    eraser = _erased(kernel, name, given, Code.STORE)
    lost = written_to(kernel.body)
    for op in eraser.ops:
        if op.code is Code.LOAD and op.base in lost:
            raise CannotDerive(
                f"where {kernel.name} stores to {name} depends on {op.base.name}, which it overwrites",
                remedy="write the result to a tensor of its own",
            )
    grid = tuple(extent.text() for extent in launch.grid)
    return BackwardPlan("owned", {name: given}, (), (Step(eraser, grid),), {})


def _covering(kernel: Kernel, name: str, launch: Launch) -> tuple[Fact, ...] | None:
    """What has to hold for stores to reach every element; None where that is not known, or fails in a call."""
    given = f"d{name.removesuffix('_ptr')}"
    try:
        adding = _erased(kernel, name, given, Code.ATOMIC_ADD)
    except CannotDerive:
        return None
    found = owned(adding, {name: given}, launch)
    covered = found.empty_if.get(given, "")
    if not covered or not launch.calls.show((covered, *(fact.expression for fact in found.facts))):
        return None
    reason = f"nothing is left of what {name} held before"
    return (*(Fact(fact.expression, reason, name) for fact in found.facts), Fact(covered, reason))


def _erased(kernel: Kernel, name: str, given: str, code: Code) -> Kernel:
    """The kernel with nothing but its stores to one argument, as stores or additions of zeros to another one."""
    base = kernel.argument(name)
    target = Value("*f32", (), _free(given, kernel))  # a zero of any float
    blank = emptied(kernel, name=f"{kernel.name}_left", arguments=[*kernel.arguments, target])
    return prune(_Erasing(kernel, Builder(blank, frozenset((target,))), {base: target}, code).copy())


def _free(name: str, kernel: Kernel) -> str:
    if any(value.name == name for value in kernel.arguments) or name in kernel.constants:
        raise CannotDerive(f"{kernel.name} has an argument `{name}`", remedy="Call it otherwise.")
    return name


class _Erasing(Copier):
    """Zeros for what is stored."""

    def __init__(self, source: Kernel, builder: Builder, targets: Mapping[Value, Value], code: Code) -> None:
        super().__init__(source, builder)
        self.targets = targets
        self.writing = code

    def effect(self, op: Op) -> None:
        """A store to another argument, with which nothing is done, or one to be erased."""
        if self.slicing or op.results or op.code is Code.LEAVE_IF:
            super().effect(op)
        elif op.code is Code.STORE and op.base in self.targets:
            target = self.targets[op.base]
            zero = self.b.whole(self.b.const(0.0, target.pointee), op.offset.shape)
            mask = None if op.mask is None else self[op.mask]
            self.b.store(target, self.whole(op.offset), zero, mask, self.writing)
