"""`owners_of`: kernels for gradients that several programs add to, one kernel for all that are turned alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import Injectivity
from kernel_agent.compiler.schedule.owner import AXES, Owner, Turn, Turns, are_crossing, owner
from kernel_agent.compiler.schedule.ownership import WRITES, proof
from kernel_agent.compiler.schedule.ownrows import with_own_rows
from kernel_agent.compiler.schedule.part import parted
from kernel_agent.compiler.schedule.phases import phases
from kernel_agent.compiler.schedule.settle import settled
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.schedule.slots import slotted
from kernel_agent.compiler.schedule.square import Squared
from kernel_agent.compiler.schedule.wraps import unwrapped
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel

Owners = list[tuple[Owner, set[str]]]
"""Kernels, with the gradients that each adds to."""


def unowned(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Gradients that programs may share as the grid is: once loops are squared, rows that each program has a slice of
    seem to be everybody's."""
    forms, added = Forms(kernel, launch), sites(kernel.body, WRITES)
    return {
        tensor: name
        for tensor, name in gradients.items()
        if isinstance(proof(forms, [site for site in added if site.op.base.name == name]), str)
    }


def turned(
    wide: Squared, gradients: Mapping[str, str], axes: int = AXES
) -> tuple[dict[Turn, list[Site]], dict[str, str]]:
    """How additions that several programs share are to be turned, and by name of the gradient why others are left.

    `axes`: from which axis of the grid on they are parts of others.
    """
    forms = Forms(wide.kernel, wide.launch)
    turns = Turns(forms, axes)
    found: dict[Turn, list[Site]] = {}
    left: dict[str, str] = {}
    for name in gradients.values():
        added = [site for site in sites(wide.kernel.body, WRITES) if site.op.base.name == name]
        if not added or not isinstance(proof(forms, added), str):
            continue
        crossing = are_crossing(forms, added)
        mine = [turns.of(site, crossing=crossing) for site in added]
        joint = with_own_rows(forms, added, mine)
        if joint is not None:
            mine, added = [joint[0] for _ in mine], joint[1]
        reason = next((turn for turn in mine if isinstance(turn, str)), None)
        if reason is None and len(set(mine)) > 1:
            reason = "several kernels would add to it"
        if reason is not None:
            left[name] = reason
            continue
        for turn, site in zip(mine, added, strict=True):
            assert isinstance(turn, Turn)
            found.setdefault(turn, []).append(site)
    return found, left


def together(
    wide: Squared, found: Mapping[Turn, Sequence[Site]], gradients: Mapping[str, str], beside: Set[str]
) -> dict[Turn, list[Site]]:
    """The additions by turn, those of small sums moved to a turn of more programs that computes what they are sums of:
    of a product y = n(x) w, the owner of a tile of dx has that of n, whose sums over rows are the gradients of n's own
    weights. A kernel of their own would do the product again. Each program's sums get a row (see `slots`)."""
    forms, joint = Forms(wide.kernel, wide.launch), {turn: list(added) for turn, added in found.items()}
    for turn, added in found.items():
        names = {site.op.base.name for site in added}
        mine = {tensor: gradient for tensor, gradient in gradients.items() if gradient in names}
        wider = [one for one in joint if set(turn.programs) < set(one.programs)]
        for other in [one for one in wider if (one.trips, one.kept) == (turn.trips, turn.kept)]:
            if names.isdisjoint(beside) and _at_hand(forms, other, joint[other], added, mine):
                joint[other] += added
                del joint[turn]
                break
    return joint


def _at_hand(
    forms: Forms, turn: Turn, theirs: Sequence[Site], added: Sequence[Site], gradients: Mapping[str, str]
) -> bool:
    """Whether the loop of some additions, and its products, are enough to sum others, in small rows."""
    both = [*theirs, *added]
    if len(phases(forms, turn, both)) > len(phases(forms, turn, theirs)):
        return False
    try:
        alone, made = owner(forms, turn, theirs, forms.kernel.name), owner(forms, turn, both, forms.kernel.name)
    except CannotDerive:
        return False
    products = [sum(op.code is Code.DOT for op in prune(one.kernel).ops) for one in (alone, made)]
    if not products[0] or products[1] > products[0]:
        return False
    kernel = unwrapped(prune(settled(made.kernel, made.launch)), made.launch)
    slots = slotted(kernel, gradients, made.launch).slots
    return {one.name for one in slots if not one.wide} == set(gradients.values())


def owners_of(
    wide: Squared, found: Mapping[Turn, Sequence[Site]], beside: Set[str], name: str
) -> tuple[Owners, list[str]]:
    """Kernels of what is not summed `beside` others, with the gradients of each, and why others have none."""
    forms = Forms(wide.kernel, wide.launch)
    owners: Owners = []
    reasons: list[str] = []
    for turn, shared_by in found.items():
        added = [site for site in shared_by if site.op.base.name not in beside]
        if not added:
            continue
        names = list(dict.fromkeys(site.op.base.name for site in added))
        try:
            role = f"_{'_'.join(names)}"  # which the kernel of a window's taps has already
            owners.append((owner(forms, turn, added, name.removesuffix(role) + role), set(names)))
        except CannotDerive as error:
            reasons.append(f"{' and '.join(names)} stay atomic: {error.message}")
    return owners, reasons


def parted_owners(
    wide: Squared, owners: Owners, left: Mapping[str, str], gradients: Mapping[str, str], name: str
) -> tuple[Owners, tuple[str, ...]]:
    """The kernels, cut again from a grid whose axes are parted where programs would still add to the same elements,
    with kernels for gradients that have none (`left`); and facts under which that is right."""
    asked = [(made, names) for made, names in owners if not _owns(made, names)]
    parts = parted(wide.kernel, wide.launch) if asked or left else None
    if parts is None:
        return owners, ()
    better, axes = replace(wide, kernel=parts.kernel, launch=parts.launch), len(wide.launch.grid)
    done = [one for one in owners if one not in asked]
    facts: tuple[str, ...] = ()
    for made, names in [*asked, *((None, {gradient}) for gradient in left)]:
        theirs = {tensor: gradient for tensor, gradient in gradients.items() if gradient in names}
        again, _ = owners_of(better, turned(better, theirs, axes)[0], set(), name)
        if {one for _, found in again for one in found} == names and all(_owns(*one) for one in again):
            done += again
            facts = parts.facts
        elif made is not None:
            done.append((made, names))
    return done, facts


def _owns(made: Owner, names: Set[str]) -> bool:
    """Whether programs of an owner's kernel are known to store each element of its gradients once."""
    kernel = unwrapped(prune(settled(made.kernel, made.launch)), made.launch)
    forms, written = Forms(kernel, made.launch), sites(kernel.body, WRITES)
    found = [proof(forms, [site for site in written if site.op.base.name == name]) for name in names]
    return all(isinstance(one, Injectivity) for one in found)
