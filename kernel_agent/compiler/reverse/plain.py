"""`plain`: the plan that is always right: one launch on the forward's grid, which adds to gradients that start at zero.

Every other plan is made from it, and stands or falls by giving the same gradients.
"""

from __future__ import annotations

from kernel_agent.compiler.plan import BackwardPlan, Buffer, Fact, Fill, Step
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.tapes import lower_tapes
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel


def plain(kernel: Kernel, adjoint: Adjoint, grid: tuple[str, ...] = ("grid0", "grid1", "grid2")) -> BackwardPlan:
    """The plan of one launch of an adjoint. `kernel`: the forward; `grid`: expressions of the forward's grid.

    A gradient of a float scalar is a buffer of one element, under the scalar's name in `gradients`. Raises CannotDerive
    where a launch cannot know how much memory tapes need.
    """
    lowered = lower_tapes(adjoint.kernel, len(grid))
    buffers = [*lowered.buffers]
    for source, name in adjoint.gradients.items():
        element = lowered.kernel.argument(name).pointee
        if kernel.argument(source).is_pointer:
            buffers.append(Buffer(name, element, Fill.ZEROS, like=source))
        else:
            buffers.append(Buffer(name, element, Fill.ZEROS, shape=("1",)))
    left = {base.name for base in written_to(kernel.body)}
    read = {op.base.name for op in lowered.kernel.ops if op.code is Code.LOAD}
    return BackwardPlan(
        schedule="plain",
        cotangents=dict(adjoint.cotangents),
        buffers=tuple(buffers),
        steps=(Step(lowered.kernel, grid, lowered.scalars),),
        gradients=dict(adjoint.gradients),
        settings=dict(adjoint.settings),
        saved=tuple(sorted(left & read)),
        consumed=adjoint.consumed,
        facts=tuple(Fact(text, "what the forward stored can be read back") for text in adjoint.facts),
        remarks=adjoint.remarks,
    )
