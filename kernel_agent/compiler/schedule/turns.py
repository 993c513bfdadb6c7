"""`in_turns`: the schedule `rows`: few programs take turns at what was an axis of the grid, with sums in registers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Buffer, Fact, Fill, Total
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.even import evened
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.later import owned_in_the_end
from kernel_agent.compiler.schedule.pace import Pace
from kernel_agent.compiler.schedule.reload import crowding, reloaded, streaming
from kernel_agent.compiler.schedule.rows import Persistent, persistent, summed_axes, width_of
from kernel_agent.compiler.ssa.value import Kernel


def in_turns(tidy: Kernel, gradients: Mapping[str, str], launch: Launch) -> Draft:
    """One launch of few programs and a sum of their rows, along the axis that leaves the fewest large sums beside.
    Raises DoesNotApply where nothing adds up along an axis."""
    axes = summed_axes(accumulated(tidy), gradients, launch)
    if not axes:
        raise DoesNotApply("along no axis of the grid all programs add to the same elements")
    made = [_along(axes[0], tidy, gradients, launch)]
    for axis in axes[1:] if made[0].left else ():
        with contextlib.suppress(CannotDerive):
            made.append(_along(axis, tidy, gradients, launch))
    return min(made, key=lambda draft: draft.left)


def _along(axis: int, tidy: Kernel, gradients: Mapping[str, str], launch: Launch) -> Draft:
    """The same along one axis."""
    looped = persistent(tidy, gradients, launch, axis)
    scalars = dict(looped.scalars)
    draft = Draft()
    if looped.pace is not None:
        draft.settings |= looped.pace.settings
    for name, partial in looped.partials.items():
        scalars[width_of(partial)] = f"{partial.tensor}.numel()"
        shape = (looped.count, f"{partial.tensor}.numel()")
        element = looped.kernel.argument(partial.name).pointee
        draft.partials.append(Buffer(partial.name, element, Fill.ZEROS, shape=shape, empty_if=partial.empty_if))
        draft.totals.append(Total(partial.name, name))
        reason = f"partial sums of {name} lie in rows of {partial.tensor}'s elements"
        draft.facts += [Fact(text, reason, partial.tensor) for text in partial.facts]
    rest = {tensor: name for tensor, name in gradients.items() if name not in looped.partials}
    draft.add(owned_in_the_end(looped.kernel, rest, looped.launch, few=True), rest, looped.launch, scalars)
    if looped.pace is not None and looped.pace.stages and draft.alone:
        draft.settings[looped.pace.stages] = "1"  # a row loaded ahead of its turn would miss what is stored before
    elif looped.pace is not None and looped.pace.stages:
        kernel, launch, scalars = draft.steps.pop(0)
        draft.steps.insert(0, (_paced(kernel, looped, looped.pace, draft.settings), launch, scalars))
    return draft


def _paced(kernel: Kernel, looped: Persistent, pace: Pace, settings: dict[str, str]) -> Kernel:
    """The kernel with constexprs for long rows (see `reload` and `even`); what they and its numbers are goes into the
    settings."""
    name, fetch = kernel.free_name("RELOAD"), kernel.free_name("FETCH")
    crowd, stream = crowding(kernel, pace.stages), streaming(kernel, pace.stages)
    again = reloaded(kernel, pace.stages, name, fetch if crowd or stream else "")
    if again is None:
        return kernel
    if stream:
        own = pace.streamed(stream, fetch, name)
        for key in own:
            settings.pop(key, None)
        settings |= own
    else:
        settings |= {**(pace.crowded(crowd, fetch) if crowd else {}), name: pace.is_long}
    trips, whole = next(iter(looped.scalars.values())), again.free_name("EVEN")
    even = evened(again, pace.stages, trips, whole)
    if even is None:
        return again
    # Rows that fit the registers gain nothing, and at 8,192 columns of float32 they took 1.7 times as long.
    settings[whole] = f"{pace.is_long if stream else name} and {even.condition}"
    return even.kernel
