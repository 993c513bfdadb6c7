"""`joined`: the same gradients of fewer loops, which schedules are made from."""

from __future__ import annotations

from kernel_agent.compiler.schedule.either import behind_branches
from kernel_agent.compiler.schedule.factor import factored
from kernel_agent.compiler.schedule.fuse import fused
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.ssa.order import forwards
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel


def joined(kernel: Kernel) -> Kernel:
    """The same gradients, but for rounding, of fewer loops that add to memory less often.

    Loops run forwards where they can, common factors leave their sums, which then need not wait for what the factors
    come from, the last loop adds what several add, what both sides of a branch add to one place is added behind it, and
    loops that are free of each other are one. Of the looped backward of a layer norm two loops over a row are left: one
    for its sums, one for the gradient.
    """
    return prune(fused(behind_branches(merged(prune(factored(forwards(kernel)))))))
