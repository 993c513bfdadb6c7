"""`assembled`: a plan with what a draft changes: buffers that are still wanted, launches, facts."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.plan import BackwardPlan, Listing, Step
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.pace import WARPS
from kernel_agent.compiler.schedule.together import together
from kernel_agent.compiler.ssa.code import Code


def assembled(schedule: str, base: BackwardPlan, draft: Draft) -> BackwardPlan:
    """The plan of a schedule, from that of one launch and a draft."""
    spared = draft.spare(base)
    same = spared.same
    draft.steps = together(draft.steps)
    needed = {value.name for kernel, _, _ in draft.steps for value in kernel.arguments} | set(same.values())
    summed = {total.name for total in draft.totals} | set(same)
    buffers = []
    for buffer in base.buffers:
        if buffer.name in draft.stored and buffer.name not in same:
            one = draft.stored[buffer.name]
            lent = replace(buffer, lender=one.lender, unless=one.unless)
            buffers.append(replace(lent, element=one.element, empty_if=one.empty_if, axes=one.axes))
        elif buffer.name in needed or buffer.name in set(base.gradients.values()) - summed:
            buffers.append(buffer)
    asked = {op.attributes.get("symbol") for kernel, _, _ in draft.steps for op in kernel.ops if op.code is Code.CONST}
    warps = WARPS if WARPS in draft.settings else ""
    steps = [_asked(Step(text, grid_of(launch), scalars, warps), base) for text, launch, scalars in draft.steps]
    return replace(
        base,
        schedule=schedule,
        cotangents={tensor: name for tensor, name in base.cotangents.items() if name in needed},
        buffers=(*buffers, *draft.partials),
        steps=tuple(steps),
        gradients={
            tensor: same.get(name, name) for tensor, name in sorted(base.gradients.items(), key=lambda g: g[1] in same)
        },
        by_index=frozenset(tensor for tensor, name in base.gradients.items() if name in spared.by_index),
        totals=tuple(draft.totals),
        censuses=tuple(replace(one, step=_asked(one.step, base)) for one in draft.censuses if one.gradient not in same),
        listings=tuple(_listing(one, base) for one in draft.listings),
        inverses=tuple(draft.inverses),
        settings={**{name: text for name, text in base.settings.items() if name in asked}, **draft.settings},
        facts=tuple(dict.fromkeys((*base.facts, *draft.facts))),
        remarks=(*base.remarks, *dict.fromkeys(draft.remarks)),
    )


def _listing(one: Listing, base: BackwardPlan) -> Listing:
    """The listing, with the scalars that its kernels ask for."""
    counting = one.counting and replace(one.counting, step=_asked(one.counting.step, base))
    return replace(one, step=_asked(one.step, base), counting=counting)


def _asked(step: Step, base: BackwardPlan) -> Step:
    """The step with the scalars that its kernel asks for."""
    own = {value.name for value in step.kernel.arguments}
    known = {**base.steps[0].scalars, **step.scalars}
    return replace(step, scalars={name: text for name, text in known.items() if name in own})


def grid_of(launch: Launch) -> tuple[str, ...]:
    """Expressions."""
    return tuple(extent.text() for extent in launch.grid)
