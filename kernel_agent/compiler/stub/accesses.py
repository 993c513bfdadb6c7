"""Which tensors a kernel reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import FLOATS, NARROW, Kernel


@dataclass(frozen=True)
class Accesses:
    """Pointer arguments of a kernel, by name."""

    read: frozenset[str]
    """Of floats: those that derivatives may go to."""
    written: frozenset[str]
    """Of any element."""
    stored: frozenset[str]
    """Those among them that are written in another way than by additions."""

    @classmethod
    def of(cls, kernel: Kernel) -> Accesses:
        """What the operations of a kernel touch."""
        read, written, stored = set(), set(), set()
        for op in kernel.ops:
            if op.code is Code.LOAD and op.base.pointee in FLOATS:
                read.add(op.base.name)
            elif op.code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC):
                written.add(op.base.name)
                if op.code is not Code.ATOMIC_ADD:
                    stored.add(op.base.name)
        return cls(frozenset(read), frozenset(written), frozenset(stored))


def takes_as_it_is(plan: BackwardPlan, argument: str) -> bool:
    """Whether a kernel computes with what it loads of a narrow cotangent before it is converted, as products do."""
    for step in plan.steps:
        uses = Uses.of(step.kernel)
        for op in step.kernel.ops:
            narrow = op.code is Code.LOAD and op.base.name == argument and op.result.element in NARROW
            if narrow and (op.result in uses.yielded or any(one.code is not Code.CAST for one in uses[op.result])):
                return True
    return False
