"""`fewer_loops`: sums that are linear in what they wait for need not wait: a backward goes over memory less often."""

from __future__ import annotations

from kernel_agent.compiler.saved.factor import factored
from kernel_agent.compiler.saved.fuse import fused
from kernel_agent.compiler.saved.sink import sunk
from kernel_agent.compiler.ssa.order import forwards
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel


def fewer_loops(kernel: Kernel) -> Kernel:
    """The same gradients, but for rounding.

    Loops run forwards where they can; common factors leave their sums; additions to one address move to the last loop
    that adds there; loops that are free of each other then are one. The looped backward of a layer norm takes two loops
    over a row after this: one for its sums, one for the gradient.
    """
    kernel = factored(forwards(prune(kernel)))
    return prune(fused(prune(sunk(kernel))))
