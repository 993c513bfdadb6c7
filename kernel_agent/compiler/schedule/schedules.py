"""`plans`: the backward of one launch in every schedule that applies, the best first.

- `rows`: gradients that all programs along an axis add to become one partial sum of each of a few programs
- `split`: gradients that many programs add to get kernels of their own, whose programs own what they sum
- `owned`: gradients are stored where no element is added to twice, and added atomically elsewhere
- `plain`: all gradients are added atomically; right for every launch
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import BackwardPlan, Fact
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.schedule.assembly import assembled, grid_of
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.columns import with_columns
from kernel_agent.compiler.schedule.draft import Draft, trimmed
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import Gathered, gathered
from kernel_agent.compiler.schedule.gatherers import heirs, windows
from kernel_agent.compiler.schedule.included import included
from kernel_agent.compiler.schedule.joined import joined
from kernel_agent.compiler.schedule.later import owned_in_the_end
from kernel_agent.compiler.schedule.makers import added, owned, split
from kernel_agent.compiler.schedule.nested import Nested, nested
from kernel_agent.compiler.schedule.owner import without
from kernel_agent.compiler.schedule.regions import with_regions
from kernel_agent.compiler.schedule.relaid import relaid
from kernel_agent.compiler.schedule.remainder import additions, stays_atomic
from kernel_agent.compiler.schedule.singles import as_rows
from kernel_agent.compiler.schedule.slabs import alone
from kernel_agent.compiler.schedule.tries import Defect, Tries, tried
from kernel_agent.compiler.schedule.turns import in_turns
from kernel_agent.compiler.schedule.walked import walked
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel

SCHEDULES = ("rows", "split", "owned", "plain")
"""Names, the best first."""


def plans(
    kernel: Kernel,
    adjoint: Adjoint,
    axes: int,
    *,
    spared: Adjoint | None = None,
    calls: Calls | None = None,
    schedules: Sequence[str] = SCHEDULES,
    defect: Defect | None = None,
    tries: Tries | None = None,
) -> list[BackwardPlan]:
    """Plans of one launch of `kernel` on a grid of `axes` axes, those with the fewest atomics first; `plain`, for which
    nothing has to be proved, is the last.

    `spared`: an adjoint of the same names that reads back what the forward stored (see `saved`), for all but `plain`,
    and for that where the other keeps more than memory can be had for. `calls`: launches that were seen, for all of
    which every fact of a plan holds. `defect`: a schedule whose passes raise what
    they should not is left out, and told of; by default the exception goes to the caller. `tries`: what was made in
    earlier calls with the same adjoint, launch and calls. Raises CannotDerive where no schedule is to be had.
    """
    tries = tries or Tries()
    launch = Launch.like_forward(axes, calls)
    better = (
        () if (spared or adjoint).consumed else tuple(name for name in schedules if name != "plain")
    )  # else effects have order
    base = _base(kernel, spared or adjoint, launch, tries, defect) if better else None
    found: list[BackwardPlan] = []
    refused: dict[str, dict[str, None]] = {name: {} for name in better}
    if base is not None:
        (step,) = base.steps
        digits = tries.once("nested", functools.partial(nested, step.kernel, launch), defect) or Nested(step.kernel)
        rows = tries.once("included", functools.partial(included, digits.kernel, launch), defect) or digits.kernel
        whole = tries.once("gathered", functools.partial(gathered, rows, launch), defect) or Gathered(rows)
        whole = tries.once("columns", functools.partial(with_columns, whole, launch), defect) or whole
        whole = tries.once("walked columns", functools.partial(walked, whole, launch), defect) or whole
        rowed = functools.partial(as_rows, whole, kernel, adjoint.gradients, launch)
        whole = tries.once("rows of single elements", rowed, defect) or whole
        facts = [Fact(claim.text(), "every element of a row has a lane") for claim in whole.claims]
        facts += [Fact(text, "each tile has one program") for text in digits.facts]
        made: dict[str, BackwardPlan] = {}

        def planned(name: str, gathers: Mapping[str, Draft]) -> BackwardPlan | None:
            draft = _with_gathers(name, whole.kernel, adjoint.gradients, launch, gathers)
            if draft is None:
                return None
            draft.facts += facts
            return assembled(name, base, draft)

        for name in better:
            plan = tries.once(name, functools.partial(planned, name, {}), defect, refused[name])
            if plan is not None:
                made[name] = plan
        if not made and spared is not None and "owned" in better:
            draft = tried("added", functools.partial(added, whole.kernel, adjoint.gradients, launch), defect)
            if draft is not None:  # atomics as in `plain`, but of what the forward stored
                draft.facts += facts
                made["owned"] = assembled("owned", base, draft)
        left = stays_atomic(min(made.values(), key=atomics, default=base))
        kept: dict[str, None] = {}
        gathers = windows(whole.kernel, adjoint.gradients, left, launch, tries, defect, kept) if left else {}
        gathers |= heirs(whole.kernel, adjoint.gradients, left - set(gathers), launch, tries, defect, kept)
        for name in better if gathers else ():
            of = f"{name} beside {', '.join(gathers)}"
            plan = tries.once(name, functools.partial(planned, name, gathers), defect, refused[name], of)
            if plan is not None:
                made[name] = plan
        refused = {name: reasons for name, reasons in refused.items() if name not in made}
        found += [
            replace(plan, remarks=(*plan.remarks, *kept, *_before(name, better, refused)))
            for name, plan in made.items()
        ]
        found.sort(key=lambda plan: (atomics(plan) + additions(plan), atomics(plan)))
    if "plain" in schedules:
        try:
            last = plain(kernel, replace(adjoint, kernel=trimmed(prune(adjoint.kernel))), grid_of(launch))
        except CannotDerive:
            if base is None:
                raise
            last = base
        found.append(replace(last, remarks=(*last.remarks, *_before("plain", better, refused))))
    if not found:
        raise CannotDerive(f"no schedule of {', '.join(schedules)} applies to {kernel.name}")
    return found


def _before(schedule: str, better: Sequence[str], refused: Mapping[str, Mapping[str, None]]) -> list[str]:
    """Why the schedules in front of one are not had, each reason once."""
    names = better[: better.index(schedule)] if schedule in better else better
    return list(dict.fromkeys(reason for name in names for reason in refused.get(name, {})))


def _base(kernel: Kernel, adjoint: Adjoint, launch: Launch, tries: Tries, defect: Defect | None) -> BackwardPlan | None:
    """What the better schedules are made from: a plan of one launch, its loops joined if they can be."""

    def made(text: Kernel) -> BackwardPlan:
        found = plain(kernel, replace(adjoint, kernel=text), grid_of(launch))
        steps = [replace(step, kernel=alone(step.kernel, launch.calls.single)) for step in found.steps]
        return replace(found, steps=tuple(steps))

    def made_joint() -> BackwardPlan:
        one_order = relaid(prune(adjoint.kernel), launch)
        if one_order is None:
            return made(joined(prune(adjoint.kernel)))
        found = made(joined(one_order.kernel))
        reason = "a loop over rows and columns reaches all elements"
        return replace(found, facts=(*found.facts, *(Fact(claim.text(), reason) for claim in one_order.claims)))

    joint = tries.once("joined", made_joint, defect)
    return joint or tries.once("plain", lambda: made(prune(adjoint.kernel)), defect)


def atomics(plan: BackwardPlan) -> int:
    """Additions to memory that a plan leaves: what the others would rather not have."""
    return sum(op.code is Code.ATOMIC_ADD for step in plan.steps for op in step.kernel.ops)


def _with_gathers(
    name: str, tidy: Kernel, gradients: Mapping[str, str], launch: Launch, gathers: Mapping[str, Draft]
) -> Draft | None:
    """What a schedule makes of the gradients that no launch of their own gathers, and those launches."""
    if not gathers:
        return _MAKERS[name](tidy, gradients, launch)
    main = without(tidy, set(gathers))
    rest = {tensor: one for tensor, one in gradients.items() if one not in gathers}
    draft = Draft()
    if main is None and name != "owned":
        return None
    try:
        draft = draft if main is None else _MAKERS[name](main, rest, launch)
    except DoesNotApply:
        if name != "owned" or main is None:
            raise
        draft.add(owned_in_the_end(main, rest, launch), rest, launch, {})
    for one in gathers.values():
        draft.join(one)
    return draft


_MAKERS: dict[str, Callable[[Kernel, Mapping[str, str], Launch], Draft]] = {
    "rows": in_turns,
    "split": functools.partial(with_regions, split),
    "owned": functools.partial(with_regions, owned),
}
