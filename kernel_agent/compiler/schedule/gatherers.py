"""`windows` and `heirs`: gradients that launches of their own gather, where all other schedules add atomically."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Listing
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.heirs import inherited
from kernel_agent.compiler.schedule.inverse import inverted
from kernel_agent.compiler.schedule.joined import joined
from kernel_agent.compiler.schedule.makers import added, owned, split
from kernel_agent.compiler.schedule.regathered import of_window
from kernel_agent.compiler.schedule.relane import relaned
from kernel_agent.compiler.schedule.tries import Defect, Tries
from kernel_agent.compiler.schedule.unflatten import unflattened
from kernel_agent.compiler.schedule.windows import windowed
from kernel_agent.compiler.ssa.value import Kernel


def windows(
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
    lanes = tries.once("lanes of taps", functools.partial(relaned, tidy, launch), defect) if wanted else None
    flat = unflattened(tidy, launch)
    by_tap = None if lanes is None else unflattened(lanes, launch)
    for tensor, name in gradients.items():
        if name not in wanted:
            continue
        made = tries.once(f"windows of {name}", functools.partial(windowed, flat, name, launch), defect, refused)
        if made is None and by_tap is not None:
            making_it = functools.partial(windowed, by_tap, name, launch)
            made = tries.once(f"windows of {name}, tap by tap", making_it, defect, refused)
        if made is None:
            continue
        joint = tries.once(f"joined windows of {name}", functools.partial(joined, made.kernel), defect)
        if joint is None:
            continue
        why: dict[str, None] = {}
        for maker, text in ((owned, "owned"), (split, "split")):
            making = functools.partial(of_window, maker, made, joint, tensor, name)
            draft = tries.once(f"{text} windows of {name}", making, defect, why)
            if draft is not None:
                found[name] = draft
                break
        else:
            refused |= why
    return found


def heirs(
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
    if len(wanted) == 1 < len(gradients) and any(draft.inverses for draft in found.values()):
        (name,) = found
        making = functools.partial(_of_heirs_alone, tidy, name, gradients, launch)
        draft = tries.once(f"sorted rows of {name} beside the others", making, defect)
        if draft is not None:
            found = {name: draft} | {other: Draft() for other in gradients.values() if other != name}
    return found


def _of_heirs(tidy: Kernel, tensor: str, name: str, launch: Launch) -> Draft | None:
    """The launch for one gradient. Raises DoesNotApply where something is added atomically."""
    try:
        made = inherited(tidy, tensor, name, launch)
    except CannotDerive:
        made = inverted(tidy, tensor, name, launch)
        if made is None:
            raise
    if made is None:
        return None
    draft = owned(joined(made.kernel), {tensor: name}, made.launch)
    if draft.additions or draft.totals:
        raise DoesNotApply("; ".join(draft.remarks) or "several add to one element")
    draft.facts += made.facts
    if isinstance(made.listing, Listing):
        draft.listings.append(made.listing)
    else:
        draft.inverses.append(made.listing)
    draft.tell(made.launch)
    return draft


def _of_heirs_alone(tidy: Kernel, name: str, gradients: Mapping[str, str], launch: Launch) -> Draft | None:
    """One launch for all gradients, if what programs store for the others is stored place by place of the list that
    names rows of the one: what the sums are made of is read once. Raises DoesNotApply where something is added
    atomically."""
    whole = added(tidy, gradients, launch)
    if len(whole.steps) != 1 or whole.additions != 1 or whole.censuses or whole.alone or name in whole.stored:
        return None
    ((kernel, _, scalars),) = whole.steps
    (tensor,) = (one for one, gradient in gradients.items() if gradient == name)
    made = inverted(kernel, tensor, name, launch, beside=True)
    if made is None or isinstance(made.listing, Listing):
        return None
    draft = owned(joined(made.kernel), {tensor: name}, made.launch)
    if draft.additions or draft.totals or len(draft.steps) != 1:
        raise DoesNotApply("; ".join(draft.remarks) or "several add to one element")
    draft.facts += made.facts
    draft.inverses.append(made.listing)
    draft.tell(made.launch)
    draft.steps = [(text, where, {**scalars, **own}) for text, where, own in draft.steps]
    draft.join(replace(whole, steps=[], remarks=[one for one in whole.remarks if not one.startswith(f"{name} stays")]))
    return draft
