"""`without_prefetch`: what a loop loads for its next trip, loaded in that trip: nothing is carried then.

A kernel may load ahead to have memory and arithmetic overlap. For its derivative such a carry is one more tape, and the
load before the loop a place of its own. Trip k has what trip k - 1 loaded, trip 0 what was loaded before the loop: one
load at the address of trip k - 1, if that at -1 is the address of the load before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath, constant


@dataclass(frozen=True)
class Ahead:
    """A carry that holds what the trip before loaded."""

    load: Op
    """Of the next trip's value, in the loop."""
    first: Op
    """Of the first one, before it."""
    offset: Value | None
    """What the loop computes itself of the address for the present trip, as for a store; None where it does not."""


def without_prefetch(kernel: Kernel) -> Kernel:
    """The kernel with loads in the trips that use them; the same where none is proved to be ahead."""
    uses, forms = Uses.of(kernel), Forms(kernel, Launch.like_forward(3))
    found: dict[Op, dict[int, Ahead]] = {}
    for loop in kernel.ops:
        if loop.code is not Code.FOR or loop.attributes["reverse"]:
            continue
        for place, result in enumerate(loop.results):
            ahead = None if uses.count(result) else _ahead(forms, loop, place)
            if ahead is not None:
                found.setdefault(loop, {})[place] = ahead
    return prune(_InPlace(kernel, found).copy()) if found else kernel


def _ahead(forms: Forms, loop: Op, place: int) -> Ahead | None:
    """What a carry is, if it is loaded ahead."""
    (block,) = loop.blocks
    load, first = _loaded(block.yields[place]), _loaded(loop.operands[3 + place])
    if load is None or first is None or load not in block.ops or load.base is not first.base:
        return None
    if load.base in written_to(forms.kernel.body) or load.result.shape != first.result.shape:
        return None
    trip = forms.trip(loop)
    before = _moved(forms.of(load.offset), trip, at=True)
    if before is None or before != forms.of(first.offset) or not _same_padding(load, first):
        return None
    runs = forms.of(block.arguments[0]) - forms.of(loop.operands[1])
    own = [] if load.mask is None else mask_forms(forms, load.mask)
    given = [] if first.mask is None else mask_forms(forms, first.mask)
    # That the next trip is one is no condition of the trip itself.
    rest = [one for one in own if one is not None and _moved(one, trip) != runs]
    if None in own or None in given or not _alike(rest, given):
        return None
    here = _moved(forms.of(load.offset), trip)
    alike = (load.offset.shape, load.offset.element)
    values = (op.result for op in block.ops if op.code is Code.ADD and (op.result.shape, op.result.element) == alike)
    return Ahead(load, first, next((value for value in values if forms.of(value) == here), None))


def _alike(some: Sequence[Form | None], others: Sequence[Form | None]) -> bool:
    return all(one in others for one in some) and all(one in some for one in others)


def _moved(form: Form, trip: Atom, *, at: bool = False) -> Form | None:
    """The form in the trip before; with `at`, in the trip before the first. None where it is not linear in trips."""
    if any(trip in atom.sources for atom, _ in form.terms if atom != trip):
        return None
    step = form.coefficients.get(trip, Polynomial())
    less = Form.of({trip: step}) if at else Form()
    return form - less - Form(base=step)


def _same_padding(load: Op, first: Op) -> bool:
    values = [None if op.other is None else constant(op.other) for op in (load, first)]
    return values[0] == values[1] and (values[0] is not None or (load.other is None and first.other is None))


def _loaded(value: Value) -> Op | None:
    """The load that a value is, but for a conversion."""
    op = beneath(value, (Code.CAST, Code.BROADCAST, Code.FULL)).producer
    return op if op is not None and op.code is Code.LOAD else None


class _InPlace(Copier):
    """Loads what is used in the trip that uses it."""

    def __init__(self, source: Kernel, found: dict[Op, dict[int, Ahead]]) -> None:
        super().__init__(source)
        self.found = found

    def kept(self, op: Op) -> Sequence[int]:
        """Carries that are not loaded ahead."""
        return [place for place in super().kept(op) if place not in self.found.get(op, {})]

    def entered(self, op: Op) -> None:
        """In a trip: what the one before loaded."""
        (block,) = op.blocks
        b, index = self.b, self[block.arguments[0]]
        for place, ahead in self.found.get(op, {}).items():
            offset = ahead.offset
            aside: Copier = self
            if offset is None:
                aside, offset = self.aside(), ahead.load.offset
                aside[block.arguments[0]] = b.sub(index, self[op.operands[2]])
            mask, other = (None if one is None else self[one] for one in (ahead.first.mask, ahead.first.other))
            carry = block.arguments[1 + place]
            value = b.load(self[ahead.load.base], aside.whole(offset), mask, other, carry.name)
            self[carry] = b.whole(b.cast(value, carry.element), carry.shape)
