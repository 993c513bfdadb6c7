"""`plans`: the backward of one launch in every schedule that applies, the best first.

- `rows`: gradients that all programs along an axis add to become one partial sum of each of a few programs
- `owned`: gradients are stored where no element is added to twice, and added atomically elsewhere
- `plain`: all gradients are added atomically; right for every launch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan, Buffer, Fact, Fill, Step, Total
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.schedule.rows import persistent, summed_axis, width_of
from kernel_agent.compiler.ssa.order import forwards
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel

SCHEDULES = ("rows", "owned", "plain")
"""Names, the best first."""


def plans(kernel: Kernel, adjoint: Adjoint, axes: int) -> list[BackwardPlan]:
    """Plans of one launch of `kernel` on a grid of `axes` axes; at least `plain`, which is the last."""
    return list(_plans(kernel, adjoint, axes))


def _plans(kernel: Kernel, adjoint: Adjoint, axes: int) -> Iterator[BackwardPlan]:
    pruned = prune(adjoint.kernel)
    safe = plain(kernel, replace(adjoint, kernel=trimmed(pruned)), _grid(Launch.like_forward(axes)))
    tidy = accumulated(merged(forwards(pruned)))
    kinds: tuple[Callable[[BackwardPlan, Kernel, Adjoint, int], BackwardPlan | None], ...] = (_rows, _owned)
    for kind in kinds:
        try:
            found = kind(safe, tidy, adjoint, axes)
        except CannotDerive:
            continue  # the schedules behind it do not need what it could not do
        if found is not None:
            yield found
    yield safe


def _owned(safe: BackwardPlan, tidy: Kernel, adjoint: Adjoint, axes: int) -> BackwardPlan | None:
    """One launch on the forward's grid, with stores; None where there are none."""
    launch = Launch.like_forward(axes)
    found = owned(tidy, adjoint.gradients, launch)
    if not found.empty_if:
        return None
    return _plan("owned", safe, found, launch, {}, (), ())


def _rows(safe: BackwardPlan, tidy: Kernel, adjoint: Adjoint, axes: int) -> BackwardPlan | None:
    """One launch of few programs and a sum of their rows; None where no gradient adds up along an axis."""
    axis = summed_axis(tidy, adjoint.gradients, Launch.like_forward(axes))
    if axis is None:
        return None
    looped = persistent(tidy, adjoint.gradients, axes, axis)
    names = {name: partial.tensor for name, partial in looped.partials.items()}
    rest = {tensor: name for tensor, name in adjoint.gradients.items() if name not in names}
    found = owned(looped.kernel, rest, looped.launch)
    scalars, buffers, totals = dict(looped.scalars), [], []
    facts = list(found.facts)
    for name, partial in looped.partials.items():
        scalars[width_of(partial)] = f"{partial.tensor}.numel()"
        shape = (looped.count, f"{partial.tensor}.numel()")
        element = looped.kernel.argument(partial.name).pointee
        buffers.append(Buffer(partial.name, element, Fill.ZEROS, shape=shape, empty_if=partial.empty_if))
        totals.append(Total(partial.name, name))
        reason = f"partial sums of {name} lie in rows of {partial.tensor}'s elements"
        facts += [Fact(text, reason, partial.tensor) for text in (f"{partial.tensor}.is_contiguous()", *partial.facts)]
    whole = Ownership(found.kernel, found.empty_if, tuple(dict.fromkeys(facts)), found.remarks)
    return _plan("rows", safe, whole, looped.launch, scalars, tuple(buffers), tuple(totals))


def _plan(
    schedule: str,
    safe: BackwardPlan,
    found: Ownership,
    launch: Launch,
    scalars: Mapping[str, str],
    partials: tuple[Buffer, ...],
    totals: tuple[Total, ...],
) -> BackwardPlan:
    """The plan of one launch. `partials`: buffers that stand for those of the totals."""
    kernel = trimmed(prune(found.kernel))
    summed = {total.name for total in totals}
    buffers = [_buffer(kernel, buffer, found) for buffer in safe.buffers if buffer.name not in summed]
    needed = {value.name for value in kernel.arguments}
    return BackwardPlan(
        schedule=schedule,
        cotangents={tensor: name for tensor, name in safe.cotangents.items() if name in needed},
        buffers=(*buffers, *partials),
        steps=(Step(kernel, _grid(launch), {name: text for name, text in scalars.items() if name in needed}),),
        gradients=dict(safe.gradients),
        totals=totals,
        saved=safe.saved,
        facts=found.facts,
        remarks=(*safe.remarks, *found.remarks),
    )


def _buffer(kernel: Kernel, buffer: Buffer, found: Ownership) -> Buffer:
    """A gradient's buffer, in the input's element where it is stored to."""
    if buffer.name not in found.empty_if:
        return buffer
    element = kernel.argument(buffer.name).pointee
    return Buffer(buffer.name, element, Fill.ZEROS, buffer.like, buffer.shape, found.empty_if[buffer.name])


def _grid(launch: Launch) -> tuple[str, ...]:
    """Expressions."""
    return tuple(extent.text() for extent in launch.grid)


def trimmed(kernel: Kernel) -> Kernel:
    """The kernel without arguments that nothing reads, such as outputs whose contents the backward does not need."""
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    return Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))
