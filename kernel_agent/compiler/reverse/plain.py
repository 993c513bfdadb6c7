"""`plain`: the plan that is always right: one launch on the forward's grid, which adds to gradients that start at zero.

Every other plan is made from it, and stands or falls by giving the same gradients.
"""

from __future__ import annotations

from kernel_agent.compiler.plan import BackwardPlan, Buffer, Fill, Step
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.ssa.value import Kernel


def plain(kernel: Kernel, adjoint: Adjoint, grid: tuple[str, ...] = ("grid0", "grid1", "grid2")) -> BackwardPlan:
    """The plan of one launch of an adjoint. `kernel`: the forward; `grid`: expressions of the forward's grid.

    A gradient of a float scalar is a buffer of one element, under the scalar's name in `gradients`.
    """
    buffers = []
    for source, name in adjoint.gradients.items():
        element = adjoint.kernel.argument(name).pointee
        if kernel.argument(source).is_pointer:
            buffers.append(Buffer(name, element, Fill.ZEROS, like=source))
        else:
            buffers.append(Buffer(name, element, Fill.ZEROS, shape=("1",)))
    return BackwardPlan(
        schedule="plain",
        cotangents=dict(adjoint.cotangents),
        buffers=tuple(buffers),
        steps=(Step(adjoint.kernel, grid),),
        gradients=dict(adjoint.gradients),
        remarks=adjoint.remarks,
    )
