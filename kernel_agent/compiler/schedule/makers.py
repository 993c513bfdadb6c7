"""`owned` and `split`: the launches that a schedule makes of a launch's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.crossed import crossed
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.later import owned_in_the_end
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.mirror import mirrored, reversed_axes
from kernel_agent.compiler.schedule.owner import Owner, without
from kernel_agent.compiler.schedule.owners import owners_of, parted_owners, together, turned, unowned
from kernel_agent.compiler.schedule.pickers import not_picked, picked
from kernel_agent.compiler.schedule.rasters import rastered
from kernel_agent.compiler.schedule.regathered import loaded, regathered
from kernel_agent.compiler.schedule.regions import Regions
from kernel_agent.compiler.schedule.settle import settled
from kernel_agent.compiler.schedule.share import loading, shared, storing
from kernel_agent.compiler.schedule.sites import OwnRows, Site
from kernel_agent.compiler.schedule.slots import slotted
from kernel_agent.compiler.schedule.spread import spread
from kernel_agent.compiler.schedule.square import squared
from kernel_agent.compiler.schedule.swizzle import unswizzled
from kernel_agent.compiler.schedule.tied import or_tied
from kernel_agent.compiler.schedule.wraps import unwrapped
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel


def owned(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """One launch on the forward's grid, with stores. Raises DoesNotApply where there are none."""
    draft = added(tidy, gradients, launch, regions)
    if not (draft.stored or draft.alone or draft.totals):
        raise DoesNotApply("; ".join(draft.remarks))
    return draft


def added(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """One launch on the forward's grid, with stores where that is right."""
    backwards = reversed_axes(tidy)
    found = owned_in_the_end(unwrapped(accumulated(mirrored(tidy, backwards)), launch), gradients, launch)
    draft = Draft(regions)
    draft.add(replace(found, kernel=mirrored(found.kernel, backwards)), gradients, launch, {})
    return draft


def split(tidy: Kernel, gradients: Mapping[str, str], launch: Launch, regions: Regions | None = None) -> Draft:
    """A launch for all gradients that programs own, and more for those that they share. Raises DoesNotApply where none
    of these can have one."""
    draft, refusal = None, None
    try:
        draft = _cut(tidy, gradients, launch, regions)
    except DoesNotApply as reason:
        refusal = reason
    if draft is not None and draft.additions:
        with suppress(CannotDerive):
            draft = _better(draft, _cut(tidy, gradients, launch, regions, tight=True))
    if draft is None or draft.additions:
        draft = or_tied(draft, lambda kernel: _cut(kernel, gradients, launch, regions), tidy, launch)
    if draft is None or draft.additions:
        with suppress(CannotDerive):
            draft = _better(draft, _cut(tidy, gradients, launch, regions, across=True))
    if draft is None or draft.additions:
        with suppress(CannotDerive):
            tiles = rastered(tidy, launch)
            other = _cut(tiles.kernel, gradients, launch, regions)
            other.facts += [Fact(text, "tiles at fixed places have all windows") for text in tiles.facts]
            draft = _better(draft, other)
    why = ""
    if regions is None and (draft is None or draft.additions):
        draft, why = _or_picked(draft, tidy, gradients, launch)
    if draft is None:
        assert refusal is not None
        raise DoesNotApply(f"{refusal.message}; {why}") if why else refusal
    draft.remarks += [why] if why else []
    return draft


def _or_picked(
    draft: Draft | None, tidy: Kernel, gradients: Mapping[str, str], launch: Launch
) -> tuple[Draft | None, str]:
    """Owners of the tiles that trips pick, where these add less to memory, or why not; empty where none are picked."""
    try:
        other = picked(tidy, gradients, launch)
    except DoesNotApply:
        return draft, ""
    except CannotDerive as reason:
        return draft, reason.message
    if _better(draft, other) is other:
        return other, ""
    left = "; ".join(dict.fromkeys(other.remarks))
    names = [one.gradient for one in other.listings]
    return draft, not_picked(names, f"as much would be added to memory: {left}")


def _better(draft: Draft | None, other: Draft) -> Draft:
    """The other one, where it adds less to memory that others add to."""
    return other if draft is None or other.additions < draft.additions else draft


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
    small = _beside(tidy, turning, turning, gradients, launch)
    for name in _beside(tidy, set(left), turning | set(left), gradients, launch):
        del left[name]
    beside = {name for name in small if not any(_meets(added, name, small) for added in found.values())}
    found = together(wide, found, gradients, beside)
    owners, refused = owners_of(wide, found, beside, tidy.name)
    owners, facts = parted_owners(wide, owners, left, gradients, tidy.name)
    draft.facts += [Fact(text, "all parts of an axis of the grid are as large") for text in facts]
    gathers: dict[str, Draft] = {}
    homes = {one.pointer.name for one in kept if one.place is not None}
    if homes and regions is None and not (tight or across or backwards):
        shy = {name for made, names in owners if _adds(made, names, gradients) for name in names} | set(left)
        gathers = regathered(apart, kept, homes, gradients, shy, launch, (owned, split))
        owners = [(made, names) for made, names in owners if not names <= set(gathers)]
    gathers = {name: one for name, one in gathers.items() if not any(name in names for _, names in owners)}
    done = {name for _, names in owners for name in names} | set(gathers)
    draft.remarks += [f"{name} stays atomic: {reason}" for name, reason in left.items() if name not in done]
    draft.remarks += refused
    if not owners and not gathers:
        raise DoesNotApply("; ".join(draft.remarks) or "no gradient is shared by programs")
    owners = [(replace(made, kernel=merged(prune(settled(made.kernel, made.launch)))), names) for made, names in owners]
    kernels = [made.kernel for made, _ in owners] + [step for one in gathers.values() for step, _, _ in one.steps]
    wanted = {name for one in kernels for name in loaded(one)}
    kept = [one for one in kept if one.pointer.name in wanted]
    draft.partials += [one.buffer for one in kept]
    draft.facts += [fact for one in kept for fact in one.facts]
    main = without(storing(tidy, kept, len(launch.grid)), done)
    if main is not None:
        rest = {tensor: name for tensor, name in gradients.items() if name not in done}
        same = owned_in_the_end(unwrapped(accumulated(main), launch), rest, launch)
        draft.add(replace(same, kernel=mirrored(same.kernel, backwards)), rest, launch, {})
    for made, theirs in owners:
        _add_owner(draft, made, theirs, gradients)
    for one in gathers.values():
        draft.join(one)
    return draft


def _add_owner(draft: Draft, made: Owner, names: Set[str], gradients: Mapping[str, str]) -> None:
    """The launch of an owner's kernel."""
    own = {tensor: name for tensor, name in gradients.items() if name in names}
    found = owned_in_the_end(unwrapped(made.kernel, made.launch), own, made.launch)
    draft.add(found, own, made.launch, made.scalars)


def _adds(made: Owner, names: Set[str], gradients: Mapping[str, str]) -> bool:
    """Whether the kernel of an owner adds to memory that others add to."""
    draft = Draft()
    _add_owner(draft, made, names, gradients)
    return bool(draft.additions)


def _meets(added: Sequence[Site], name: str, small: Set[str]) -> bool:
    """Whether a gradient has its kernel with one that is not small: there it is a sum of what is at hand."""
    names = {site.op.base.name for site in added}
    return name in names and not names <= small


def _beside(
    kernel: Kernel, names: Set[str], candidates: Set[str], gradients: Mapping[str, str], launch: Launch
) -> set[str]:
    """Of some of the gradients that could have kernels of their own, those that the kernel of the others sums for each
    program: it reads most of what they are made of, and their rows are small beside that."""
    if not names or without(kernel, candidates) is None:
        return set()
    found: set[str] = set()
    for tensor, name in gradients.items():
        if name in names:
            alone = without(kernel, candidates - {name})
            assert alone is not None
            slots = slotted(unwrapped(accumulated(alone), launch), {tensor: name}, launch).slots
            found |= {one.name for one in slots if not one.wide}
    return found
