"""`regathered`: gradients of windows, gathered from what another launch of the same backward keeps.

A convolution that its kernel ends with a bias and an activation has the derivative of that in each program. The owner
of an element of its input would take it again for every tap, with all the forward's products in it. Where it is kept
for other owners anyway (see `share`), taps load it: then they add what they know lane by lane, and a window's elements
can be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.joined import joined
from kernel_agent.compiler.schedule.share import Shared
from kernel_agent.compiler.schedule.unflatten import unflattened
from kernel_agent.compiler.schedule.windows import Window, windowed
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

Maker = Callable[[Kernel, Mapping[str, str], Launch], Draft]
"""A schedule."""


def of_window(maker: Maker, made: Window, joint: Kernel, tensor: str, name: str) -> Draft:
    """The launches that gather a gradient. Raises DoesNotApply where something is added atomically."""
    draft = maker(joint, {tensor: name}, made.launch)
    if draft.additions:
        raise DoesNotApply("; ".join(draft.remarks) or "several add to one element")
    reason = f"the forward's programs compute all outputs that {name} is gathered from"
    draft.facts += [Fact(claim.text(), reason) for claim in made.claims]
    draft.tell(made.launch)
    return draft


def regathered(
    apart: Kernel,
    kept: Sequence[Shared],
    homes: Collection[str],
    gradients: Mapping[str, str],
    wanted: Collection[str],
    launch: Launch,
    makers: Sequence[Maker],
) -> dict[str, Draft]:
    """By gradient, of those wanted, the launches that gather it where the kernel `apart` loads what is `kept`, and
    nothing is added atomically then. `homes`: of what each value is kept at an address of its own in, which alone they
    load."""
    found: dict[str, Draft] = {}
    taken = {one.pointer.name for one in kept}
    if not wanted:
        return found
    flat = unflattened(apart, launch)
    for tensor, name in gradients.items():
        draft = _gathered(flat, homes, taken, tensor, name, launch, makers) if name in wanted else None
        if draft is not None:
            found[name] = draft
            taken |= {buffer.name for buffer in draft.partials}
    return found


def _gathered(
    flat: Kernel,
    homes: Collection[str],
    taken: Collection[str],
    tensor: str,
    name: str,
    launch: Launch,
    makers: Sequence[Maker],
) -> Draft | None:
    """The launches for one gradient; None where there are none, or they load nothing that is kept in a `homes`, or make
    memory of a name that is taken."""
    try:
        made = windowed(flat, name, launch)
    except CannotDerive:
        return None
    loads = loaded(made.kernel) if made is not None else set()
    if made is None or not loads & set(homes) or loads & (set(taken) - set(homes)):
        return None
    joint = joined(made.kernel)
    for maker in makers:
        try:
            draft = of_window(maker, made, joint, tensor, name)
        except CannotDerive:
            continue
        if not {buffer.name for buffer in draft.partials} & set(taken):
            return draft
    return None


def loaded(kernel: Kernel) -> set[str]:
    """Names of what a kernel loads from."""
    return {op.base.name for op in kernel.ops if op.code is Code.LOAD}
