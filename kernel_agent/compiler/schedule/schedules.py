"""`plans`: the backward of one launch in every schedule that applies, the best first.

- `rows`: gradients that all programs along an axis add to become one partial sum of each of a few programs
- `split`: gradients that many programs add to get kernels of their own, whose programs own what they sum
- `owned`: gradients are stored where no element is added to twice, and added atomically elsewhere
- `plain`: all gradients are added atomically; right for every launch
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import BackwardPlan, Fact
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.assembly import assembled, grid_of
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.columns import with_columns
from kernel_agent.compiler.schedule.crossed import crossed
from kernel_agent.compiler.schedule.draft import Draft, trimmed
from kernel_agent.compiler.schedule.either import behind_branches
from kernel_agent.compiler.schedule.factor import factored
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.fuse import fused
from kernel_agent.compiler.schedule.gather import Gathered, gathered
from kernel_agent.compiler.schedule.heirs import inherited
from kernel_agent.compiler.schedule.later import owned_in_the_end
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.mirror import mirrored, reversed_axes
from kernel_agent.compiler.schedule.nested import Nested, nested
from kernel_agent.compiler.schedule.owner import without
from kernel_agent.compiler.schedule.owners import owners_of, parted_owners, together, turned, unowned
from kernel_agent.compiler.schedule.regions import Regions, with_regions
from kernel_agent.compiler.schedule.relaid import relaid
from kernel_agent.compiler.schedule.remainder import additions, stays_atomic
from kernel_agent.compiler.schedule.settle import settled
from kernel_agent.compiler.schedule.share import loading, shared, storing
from kernel_agent.compiler.schedule.singles import as_rows
from kernel_agent.compiler.schedule.sites import OwnRows, Site
from kernel_agent.compiler.schedule.slabs import alone
from kernel_agent.compiler.schedule.slots import slotted
from kernel_agent.compiler.schedule.spread import spread
from kernel_agent.compiler.schedule.square import squared
from kernel_agent.compiler.schedule.swizzle import unswizzled
from kernel_agent.compiler.schedule.tied import or_tied
from kernel_agent.compiler.schedule.tries import Defect, Tries, tried
from kernel_agent.compiler.schedule.turns import in_turns
from kernel_agent.compiler.schedule.unflatten import unflattened
from kernel_agent.compiler.schedule.windows import Window, windowed
from kernel_agent.compiler.schedule.wraps import unwrapped
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.order import forwards
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
        whole = tries.once("gathered", functools.partial(gathered, digits.kernel, launch), defect)
        whole = whole or Gathered(digits.kernel)
        whole = tries.once("columns", functools.partial(with_columns, whole, launch), defect) or whole
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
            draft = tried("added", functools.partial(_added, whole.kernel, adjoint.gradients, launch), defect)
            if draft is not None:  # atomics as in `plain`, but of what the forward stored
                draft.facts += facts
                made["owned"] = assembled("owned", base, draft)
        left = stays_atomic(min(made.values(), key=atomics, default=base))
        kept: dict[str, None] = {}
        gathers = _windows(whole.kernel, adjoint.gradients, left, launch, tries, defect, kept) if left else {}
        gathers |= _heirs(whole.kernel, adjoint.gradients, left - set(gathers), launch, tries, defect, kept)
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


def joined(kernel: Kernel) -> Kernel:
    """The same gradients, but for rounding, of fewer loops that add to memory less often.

    Loops run forwards where they can, common factors leave their sums, which then need not wait for what the factors
    come from, the last loop adds what several add, what both sides of a branch add to one place is added behind it, and
    loops that are free of each other are one. Of the looped backward of a layer norm two loops over a row are left: one
    for its sums, one for the gradient.
    """
    return prune(fused(behind_branches(merged(prune(factored(forwards(kernel)))))))


def _owned(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """One launch on the forward's grid, with stores. Raises DoesNotApply where there are none."""
    draft = _added(tidy, gradients, launch, regions)
    if not (draft.stored or draft.alone or draft.totals):
        raise DoesNotApply("; ".join(draft.remarks))
    return draft


def _added(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """One launch on the forward's grid, with stores where that is right."""
    backwards = reversed_axes(tidy)
    found = owned_in_the_end(unwrapped(accumulated(mirrored(tidy, backwards)), launch), gradients, launch)
    draft = Draft(regions)
    draft.add(replace(found, kernel=mirrored(found.kernel, backwards)), gradients, launch, {})
    return draft


def _split(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """A launch for all gradients that programs own, and more for those that they share. Raises DoesNotApply where none
    of these can have one."""
    draft, refusal = None, None
    try:
        draft = _cut(tidy, gradients, launch, regions)
    except DoesNotApply as reason:
        refusal = reason
    if draft is not None and draft.additions:
        with suppress(CannotDerive):
            closer = _cut(tidy, gradients, launch, regions, tight=True)
            draft = closer if closer.additions < draft.additions else draft
    if draft is None or draft.additions:
        draft = or_tied(draft, lambda kernel: _cut(kernel, gradients, launch, regions), tidy, launch)
    if draft is None or draft.additions:
        with suppress(CannotDerive):
            other = _cut(tidy, gradients, launch, regions, across=True)
            draft = other if draft is None or other.additions < draft.additions else draft
    if draft is None:
        assert refusal is not None
        raise refusal
    return draft


def _cut(
    tidy: Kernel,
    gradients: Mapping[str, str],
    launch: Launch,
    regions: Regions | None,
    *,
    tight: bool = False,
    across: bool = False,
) -> Draft:
    """The same, with loops that end at a diagonal as they are, or `tight`, and programs that do what is theirs, or
    what those `across` would; then it raises where there are none."""
    draft = Draft(regions)
    tidy, launch = spread(tidy, launch)
    cut = unswizzled(tidy, launch)
    if cut is not None:
        tidy, launch = cut.kernel, cut.launch
        draft.facts += [Fact(text, "each tile has one program") for text in cut.facts]
    backwards = reversed_axes(tidy)
    tidy = mirrored(tidy, backwards)
    kept = shared(tidy, launch)
    apart, on = loading(tidy, kept, len(launch.grid)), launch
    if across:
        other = crossed(apart, on)
        apart, on = other.kernel, other.launch
        draft.facts += other.facts
    wide = squared(apart, on, tight=tight)
    wide = replace(wide, kernel=settled(wide.kernel, wide.launch))
    draft.facts += [Fact(text, "loops of all programs step through the same indices") for text in wide.facts]
    found, left = turned(wide, unowned(tidy, gradients, launch))
    reason = "programs with rows of their own have an owner each"
    beside_loops = [site for added in found.values() for site in added if isinstance(site, OwnRows)]
    draft.facts += [Fact(site.fact, reason) for site in beside_loops if site.fact]
    turning = {site.op.base.name for added in found.values() for site in added}
    small = _beside(tidy, turning, gradients, launch)
    for name in _beside(tidy, turning | set(left), gradients, launch):
        left.pop(name, None)
    beside = {name for name in small if not any(_meets(added, name, small) for added in found.values())}
    found = together(wide, found, gradients, beside)
    owners, refused = owners_of(wide, found, beside, tidy.name)
    owners, facts = parted_owners(wide, owners, left, gradients, tidy.name)
    draft.facts += [Fact(text, "all parts of an axis of the grid are as large") for text in facts]
    done = {name for _, names in owners for name in names}
    draft.remarks += [f"{name} stays atomic: {reason}" for name, reason in left.items() if name not in done]
    draft.remarks += refused
    if not owners:
        raise DoesNotApply("; ".join(draft.remarks) or "no gradient is shared by programs")
    owners = [(replace(made, kernel=merged(prune(settled(made.kernel, made.launch)))), names) for made, names in owners]
    loaded = {op.base for made, _ in owners for op in made.kernel.ops if op.code is Code.LOAD}
    kept = [one for one in kept if one.pointer in loaded]
    draft.partials += [one.buffer for one in kept]
    draft.facts += [fact for one in kept for fact in one.facts]
    main = without(storing(tidy, kept, len(launch.grid)), done)
    if main is not None:
        rest = {tensor: name for tensor, name in gradients.items() if name not in done}
        same = owned_in_the_end(unwrapped(accumulated(main), launch), rest, launch)
        draft.add(replace(same, kernel=mirrored(same.kernel, backwards)), rest, launch, {})
    for made, theirs in owners:
        own = {tensor: name for tensor, name in gradients.items() if name in theirs}
        draft.add(
            owned_in_the_end(unwrapped(made.kernel, made.launch), own, made.launch), own, made.launch, made.scalars
        )
    return draft


def _meets(added: Sequence[Site], name: str, small: Set[str]) -> bool:
    """Whether a gradient has its kernel with one that is not small: there it is a sum of what is at hand."""
    names = {site.op.base.name for site in added}
    return name in names and not names <= small


def _beside(kernel: Kernel, candidates: Set[str], gradients: Mapping[str, str], launch: Launch) -> set[str]:
    """Of gradients that could have kernels of their own, those that the kernel of the others sums for each program:
    it reads most of what they are made of, and their rows are small beside that."""
    if without(kernel, candidates) is None:
        return set()
    found: set[str] = set()
    for tensor, name in gradients.items():
        if name in candidates:
            alone = without(kernel, candidates - {name})
            assert alone is not None
            slots = slotted(unwrapped(accumulated(alone), launch), {tensor: name}, launch).slots
            found |= {one.name for one in slots if not one.wide}
    return found


def _windows(
    tidy: Kernel,
    gradients: Mapping[str, str],
    wanted: Set[str],
    launch: Launch,
    tries: Tries,
    defect: Defect | None,
    refused: dict[str, None],
) -> dict[str, Draft]:
    """By gradient, of those wanted, the launches that gather it for the elements of windows, where nothing is added
    atomically then. `refused` is told why there are none of others."""
    found: dict[str, Draft] = {}
    tidy = unflattened(tidy, launch)
    for tensor, name in gradients.items():
        if name not in wanted:
            continue
        made = tries.once(f"windows of {name}", functools.partial(windowed, tidy, name, launch), defect, refused)
        if made is None:
            continue
        joint = tries.once(f"joined windows of {name}", functools.partial(joined, made.kernel), defect)
        if joint is None:
            continue
        why: dict[str, None] = {}
        for maker in ("owned", "split"):
            making = functools.partial(_of_windows, maker, made, joint, tensor, name)
            draft = tries.once(f"{maker} windows of {name}", making, defect, why)
            if draft is not None:
                found[name] = draft
                break
        else:
            refused |= why
    return found


def _heirs(
    tidy: Kernel,
    gradients: Mapping[str, str],
    wanted: Set[str],
    launch: Launch,
    tries: Tries,
    defect: Defect | None,
    refused: dict[str, None],
) -> dict[str, Draft]:
    """By gradient, of those wanted, the launches that sum its rows by the additions that name them."""
    found: dict[str, Draft] = {}
    for tensor, name in gradients.items():
        if name in wanted:
            making = functools.partial(_of_heirs, tidy, tensor, name, launch)
            draft = tries.once(f"sorted rows of {name}", making, defect, refused)
            if draft is not None:
                found[name] = draft
    return found


def _of_heirs(tidy: Kernel, tensor: str, name: str, launch: Launch) -> Draft | None:
    """The launch for one gradient. Raises DoesNotApply where something is added atomically."""
    made = inherited(tidy, tensor, name, launch)
    if made is None:
        return None
    draft = _owned(joined(made.kernel), {tensor: name}, made.launch)
    if draft.additions or draft.totals:
        raise DoesNotApply("; ".join(draft.remarks) or "several add to one element")
    draft.facts += made.facts
    draft.listings.append(made.listing)
    told = {text: extent.text() for text, extent in made.launch.scalars.items()}
    draft.steps = [(text, where, {**told, **scalars}) for text, where, scalars in draft.steps]
    return draft


def _of_windows(maker: str, made: Window, joint: Kernel, tensor: str, name: str) -> Draft:
    """The launches that gather a gradient. Raises DoesNotApply where something is added atomically."""
    draft = (_split if maker == "split" else _owned)(joint, {tensor: name}, made.launch)
    if draft.additions:
        raise DoesNotApply("; ".join(draft.remarks) or "several add to one element")
    reason = f"the forward's programs compute all outputs that {name} is gathered from"
    draft.facts += [Fact(claim.text(), reason) for claim in made.claims]
    told = {name: extent.text() for name, extent in made.launch.scalars.items()}
    draft.steps = [(text, where, {**told, **scalars}) for text, where, scalars in draft.steps]
    return draft


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
    "split": functools.partial(with_regions, _split),
    "owned": functools.partial(with_regions, _owned),
}
