"""`use_winners`: a largest number that the forward kept together with its index, as a sum that the index picks from.

A loop that keeps the largest number so far, and where it was, compares each trip with what earlier ones left: its
adjoint would find every comparison again on a tape. But the index tells the trip: the number is the sum over all places
of what is there, if the place is the one that was named, else zero. The adjoint of that sum needs the index alone. It
is known when the loop has ended, and often stored (see `outputs`): then nothing is read but what was stored.

Lanes that keep numbers of their own and are compared behind the loop are places, too, if the lane is found by its
index. Where all numbers are minus infinity the named one counts, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial, parsed
from kernel_agent.compiler.schedule.sites import mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import repeated_conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, beneath, constant, unspread

_LARGEST = {Code.REDUCE_MAX: (Code.ARG_MAX, -math.inf), Code.REDUCE_MIN: (Code.ARG_MIN, math.inf)}
_BEYOND = {"gt": -math.inf, "ge": -math.inf, "lt": math.inf, "le": math.inf}
"""What a search that keeps what compares so with the number before starts with."""


@dataclass(frozen=True)
class Winner:
    """A number, and how its index was found: in the trips of a loop, then among lanes."""

    value: Value
    name: Value
    """The index that tells its place."""
    loop: Op
    held: Value
    """What the loop carries of the index, after its last trip."""
    number: Value
    """What a trip competes with: a number or, before that was reduced, a tile."""
    place: Value
    """Its index; of a tile, without the index along the axis."""
    conditions: tuple[Value, ...]
    """Without which a trip does not compete."""
    axis: int | None = None
    """Of the tile that a trip's number is the largest of; None where it is a number for each lane."""
    over: int | None = None
    """The axis of lanes that are compared behind the loop; None where each is a result of its own."""
    beside: tuple[Value, ...] = ()
    """What must hold of `held` for a lane to be the one."""


def use_winners(kernel: Kernel, calls: Calls | None = None) -> Saved:
    """A kernel that picks its largest numbers by their indices, as far as its adjoint is concerned.

    `calls`: launches that were seen. What has to hold for an index to belong to one trip, as that the step of a dilated
    window is not 0, holds in all of them.
    """
    forms = Forms(kernel, Launch.like_forward(3))
    found: dict[Value, Winner] = {}
    for loop in kernel.ops:
        if loop.code is Code.FOR and not loop.attributes["reverse"]:
            found |= {one.value: one for one in _kept(loop)}
    for op in kernel.ops:
        if op.code is Code.SUM:
            chosen = _among_lanes(forms, op, found)
            if chosen is not None:
                found[op.result] = chosen
    asked = {value: () if one.over is not None else _telling(forms, one) for value, one in found.items()}
    told = {value: facts for value, facts in asked.items() if facts is not None and _seen(facts, calls)}
    if not told:
        return Saved(kernel, frozenset())
    facts = tuple(dict.fromkeys(fact for some in told.values() for fact in some))
    try:
        return Saved(_Picked(kernel, {value: found[value] for value in told}).copy(), frozenset(), facts=facts)
    except CannotDerive:
        return Saved(kernel, frozenset())


def _kept(loop: Op) -> Iterator[Winner]:
    """The largest numbers that a loop keeps together with their indices. Whether these tell trips apart is open."""
    (block,) = loop.blocks
    carries, last, starts = block.arguments[1:], block.yields, loop.operands[3:]
    for at, held in enumerate(carries):
        choice = last[at].producer
        if held.element not in ("i32", "i64") or choice is None or choice.code is not Code.SELECT:
            continue
        condition, place, before = choice.operands
        if before is not held:
            continue
        parts = repeated_conjuncts(condition)
        for of, best in enumerate(carries):
            number = _competitor(last[of], best, condition) if best.is_float else None
            tests = [part for part in parts if number is not None and _beyond(part, number, best) is not None]
            if number is None or len(tests) != 1:
                continue
            lowest = _beyond(tests[0], number, best)
            if constant(unspread(starts[of])) != lowest or number.shape != best.shape:
                continue
            rest = tuple(part for part in parts if part is not tests[0])
            if rest and condition not in (last[of].producer or choice).operands:
                continue  # the larger of both is taken whatever else a trip asks
            found = Winner(loop.results[of], loop.results[at], loop, loop.results[at], number, place, rest)
            yield _unreduced(found, place)


def _competitor(after: Value, best: Value, condition: Value) -> Value | None:
    """What a trip's largest number is chosen from beside the one before, under a condition or as the larger of both."""
    op = after.producer
    if op is None:
        return None
    if op.code is Code.SELECT and op.operands[0] is condition and op.operands[2] is best:
        return op.operands[1]
    if op.code in (Code.MAX, Code.MIN) and best in op.operands:
        one, other = op.operands
        return other if one is best else one
    return None


def _beyond(test: Value, number: Value, best: Value) -> float | None:
    """What a search starts with whose trips test so whether a number is beyond the best; None for another test."""
    op = test.producer
    if op is None or op.code is not Code.CMP:
        return None
    left, right = (beneath(one, (Code.BROADCAST, Code.FULL)) for one in op.operands)
    number = beneath(number, (Code.BROADCAST, Code.FULL))
    start = _BEYOND.get(op.attributes["predicate"])
    if start is None or {left, right} != {number, best}:
        return None
    return start if left is number else -start


def _unreduced(found: Winner, place: Value) -> Winner:
    """With the tile that each trip's number is the largest of, where its index is one along that."""
    op = found.number.producer
    if op is None or op.code not in _LARGEST or op.result.shape != found.place.shape:
        return found
    code, _ = _LARGEST[op.code]
    sum_of = place.producer
    for side in (0, 1) if sum_of is not None and sum_of.code is Code.ADD else ():
        assert sum_of is not None
        index = beneath(sum_of.operands[side], (Code.CAST,)).producer
        if (
            index is not None
            and index.code is code
            and index.operands[0] is op.operands[0]
            and index.attributes["axis"] == op.attributes["axis"]
        ):
            return replace(found, number=op.operands[0], place=sum_of.operands[1 - side], axis=op.attributes["axis"])
    return found


def _among_lanes(forms: Forms, op: Op, known: dict[Value, Winner]) -> Winner | None:
    """A sum over an axis that picks a lane by its index: the least, or the greatest, of lanes with the best number."""
    axis, choice = op.attributes["axis"], op.operands[0].producer
    if choice is None or choice.code is not Code.SELECT or constant(unspread(choice.operands[2])) != 0:
        return None
    inner = known.get(choice.operands[1])
    if inner is None or inner.over is not None or inner.axis is not None:
        return None
    parts = repeated_conjuncts(choice.operands[0])
    for part in parts:
        name = _equal_to(part, inner.held, axis)
        spare = None if name is None else _index_of_best(name, inner, axis)
        if name is None or spare is None:
            continue
        beside = tuple(other for other in parts if other is not part)
        if not all(_is_of(other, inner.held) for other in beside):
            continue
        found = replace(inner, value=op.result, name=name, over=axis, beside=beside)
        if _telling(forms, found) == () and _off_at(forms, found, spare):
            return found
    return None


def _equal_to(test: Value, held: Value, axis: int) -> Value | None:
    """The number, one for all lanes along an axis, that a test asks `held` to be."""
    op = test.producer
    if op is None or op.code is not Code.CMP or op.attributes["predicate"] != "eq" or held not in op.operands:
        return None
    other = unspread(op.operands[1] if op.operands[0] is held else op.operands[0])
    if not other.shape and len(held.shape) == 1:
        return beneath(other, (Code.CAST,))
    made = other.producer
    if made is None or made.code is not Code.EXPAND or made.attributes["axis"] != axis:
        return None
    return beneath(made.operands[0], (Code.CAST,))


def _is_of(test: Value, held: Value) -> bool:
    """Whether a test compares an index with a number."""
    op = test.producer
    if op is None or op.code is not Code.CMP or held not in op.operands:
        return False
    return any(constant(unspread(side)) is not None for side in op.operands)


def _index_of_best(name: Value, inner: Winner, axis: int) -> Value | None:
    """What an index is where no lane has the best number, if it is the extreme index of those that have."""
    op = name.producer
    if op is None or op.code not in _LARGEST or op.attributes["axis"] != axis:
        return None
    choice = op.operands[0].producer
    if choice is None or choice.code is not Code.SELECT or choice.operands[1] is not inner.held:
        return None
    test = choice.operands[0].producer
    if test is None or test.code is not Code.CMP or test.attributes["predicate"] != "eq":
        return None
    start = constant(unspread(inner.loop.operands[3 + inner.loop.results.index(inner.value)]))
    for side in (0, 1):
        best = bare(test.operands[1 - side]).producer
        if (
            test.operands[side] is inner.value
            and best is not None
            and best.code in _LARGEST
            and best.operands[0] is inner.value
            and best.attributes["axis"] == axis
            and _LARGEST[best.code][1] == start
        ):
            return unspread(choice.operands[2])
    return None


def _off_at(forms: Forms, found: Winner, spare: Value) -> bool:
    """Whether no place has the index `spare` and a number: a condition says so, or the mask of the number's load."""
    number = constant(spare)
    for part in found.beside:
        op = part.producer
        if op is not None and op.code is Code.CMP and op.attributes["predicate"] == "ne":
            sides = [unspread(operand) for operand in op.operands]
            if found.held in sides and number is not None and number in map(constant, sides):
                return True
    load = beneath(found.number, (Code.CAST,)).producer
    masks = [*found.conditions, *([load.mask] if load is not None and load.code is Code.LOAD and load.mask else [])]
    limit = _place(forms, found) - forms.of(spare)
    return any(part is not None and part == limit for mask in masks for part in mask_forms(forms, mask))


def _place(forms: Forms, found: Winner) -> Form:
    """The form of an index, as seen from the tile of numbers. It is taken to fit its element, as the forward does."""
    form = forms.of(beneath(found.place, (Code.CAST,)))
    if found.axis is None:
        return form
    axis, size = found.axis, found.number.shape[found.axis]
    symbol = forms.kernel.extents.get(size)
    extent = parsed(symbol, size, forms.positive, forms.kernel.constants) if symbol else Polynomial.integer(size)
    along = Form.of({Atom(Kind.LANE, axis, extent=extent): ONE})
    return form.moved(lambda old: old + (old >= axis)) + along


def _telling(forms: Forms, found: Winner) -> tuple[str, ...] | None:
    """What has to hold for an index to belong to one trip, and one lane of those that are compared; None where it may
    belong to several."""
    needed = {forms.trip(found.loop), *(Atom(Kind.LANE, axis) for axis in (found.axis, found.over) if axis is not None)}
    form = _place(forms, found)
    own = {atom: factor for atom, factor in form.terms if not needed.isdisjoint(atom.sources)}
    if not needed.issuperset(own):
        return None
    proof = injective(Form.of(own), (), frozenset(needed))
    return None if proof is None else tuple(proof.facts())


def _seen(facts: tuple[str, ...], calls: Calls | None) -> bool:
    """Whether facts hold in all launches that were seen."""
    return not facts or (calls is not None and calls.show(facts))


class _Picked(Copier):
    """Takes winners for the sums that their indices pick from."""

    def __init__(self, source: Kernel, found: dict[Value, Winner]) -> None:
        super().__init__(source)
        self.found = found

    def op(self, op: Op) -> None:
        super().op(op)
        for result in op.results:
            if result in self.found and not self.slicing:
                self[result] = self.b.known(self.picked(self.found[result]), self[result])

    def picked(self, one: Winner) -> Value:
        """The sum over all places of what is there, where it is the one that is named."""
        b, (block,) = self.b, one.loop.blocks
        name = self[one.name]
        for axis in (one.over, one.axis):
            name = name if axis is None else b.expand(name, axis)

        def trip(index: Value, carried: list[Value]) -> list[Value]:
            aside = self.aside()
            aside[block.arguments[0]] = index
            place, number = aside[one.place], aside[one.number]
            if one.axis is not None:
                size = one.number.shape[one.axis]
                along = b.arange(0, size, self.source.extents.get(size))
                for axis in (axis for axis in range(len(one.number.shape)) if axis != one.axis):
                    along = b.expand(along, axis)
                place = b.add(b.expand(place, one.axis), b.cast(along, place.element))
            hit = b.compare("eq", place, name)
            for condition in one.conditions:
                hit = b.logical_and(hit, aside[condition])
            for condition in one.beside:
                test = condition.producer
                assert test is not None
                sides = [place if side is one.held else self[side] for side in test.operands]
                hit = b.logical_and(hit, b.compare(test.attributes["predicate"], *sides))
            part = b.select(hit, number, b.zero(number))
            return [b.add(carried[0], part if one.axis is None else b.sum(part, one.axis))]

        start, stop, step = self.all(one.loop.operands[:3])
        zeros = b.whole(b.const(0.0, one.value.element), one.held.shape)
        (total,) = b.loop((start, stop, step), [zeros], trip, index_name=block.arguments[0].name)
        return total if one.over is None else b.sum(total, one.over)
