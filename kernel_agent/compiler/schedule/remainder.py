"""What plans leave to be added in memory: by this they are compared, and by this it is known what to try next."""

from __future__ import annotations

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import written_to


def stays_atomic(plan: BackwardPlan) -> set[str]:
    """What a plan adds to in memory."""
    return {op.base.name for step in plan.steps for op in step.kernel.ops if op.code is Code.ATOMIC_ADD}


def additions(plan: BackwardPlan) -> int:
    """What takes the place of additions, and about as long."""
    sums = 0
    for step in plan.steps:
        written = written_to(step.kernel.body)
        sums += sum(op.code is Code.LOAD and op.base in written for op in step.kernel.ops)
    return sums + sum(total.wide for total in plan.totals)
