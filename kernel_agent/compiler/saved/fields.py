"""`use_fields`: small numbers that the forward packed into words, of which each has some bits, are read from these.

`sum(place << (4 * lane))` over lanes is a word of places, if none takes more than four bits and the word has four for
each lane. Then `(word >> (4 * lane)) & 15` is the place again, and what it was searched in is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.saved.outputs import Place, Saved, is_heavy, load_back, places
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim, Claims, open_claims
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ZERO, Polynomial, parsed
from kernel_agent.compiler.schedule.sites import mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, unspread


@dataclass(frozen=True)
class Field:
    """Numbers that have some bits of each word."""

    value: Value
    place: Place
    """Of the words."""
    axis: int
    """That the words are sums over."""
    shift: Value
    """Where the bits of a lane begin."""
    bits: int
    facts: tuple[str, ...]
    """Python over names of the launch: the bits of a lane hold its number, and every lane that is read has a word."""


def use_fields(kernel: Kernel, calls: Calls | None = None) -> Saved:
    """A kernel with numbers KNOWN from the words that it packed them into. `calls`: launches that were seen."""
    sums = [op for op in kernel.ops if op.code is Code.SUM and not op.result.is_float and _shifted(op) is not None]
    if not sums:
        return Saved(kernel, frozenset())
    forms, lanes = Forms(kernel, Launch.like_forward(3)), Lanes(kernel)
    found: dict[Value, Field] = {}
    for place in places(kernel, [], calls):
        if place.value.producer in sums and not place.lossy:
            found |= {one.value: one for one in _fields(forms, lanes, place, calls or Calls())}
    if not found:
        return Saved(kernel, frozenset())
    read = frozenset(one.place.store.base.name for one in found.values())
    facts = tuple(dict.fromkeys(fact for one in found.values() for fact in (*one.place.facts, *one.facts)))
    remarks = tuple(
        f"`{one.value.name}` is read from the bits of {one.place.store.base.name}" for one in found.values()
    )
    return Saved(_Unpacked(kernel, found).copy(), read, remarks, facts)


def _shifted(op: Op) -> Op | None:
    """The shift to the left of the numbers that a sum is of."""
    shift = op.operands[0].producer
    return shift if shift is not None and shift.code is Code.SHL and shift.result.element == op.result.element else None


def _fields(forms: Forms, lanes: Lanes, place: Place, calls: Calls) -> Iterator[Field]:
    """The numbers in words that are stored."""
    op = place.value.producer
    shift = None if op is None else _shifted(op)
    assert op is not None
    assert shift is not None
    axis, (packed, by) = op.attributes["axis"], shift.operands
    if packed.shape != op.operands[0].shape:
        return
    value, mask = _chosen(packed)
    step, below = forms.of(by), _below(forms, value)
    if below is None or len(step.terms) != 1 or not is_heavy(value, ()):
        return
    ((lane, number),) = step.terms
    bits = number.number
    if lane.kind is not Kind.LANE or lane.number != axis or lane.extent is None or step.base.terms or not bits:
        return
    width = int(place.value.element[1:])
    if not 0 < bits < width:
        return
    there = _has_word(forms, lanes, value, mask, place.store.mask, axis)
    if there is None or not (mask is None or _confined(lanes, value, mask)):
        return
    holds = Claim(Polynomial.integer(1 << bits), below)
    room = Claim(Polynomial.integer(width), lane.extent * Polynomial.integer(bits))
    claims = open_claims([holds, room, *there])
    facts = None if claims is None else tuple(claim.text() for claim in claims)
    if facts is not None and (not facts or calls.show(facts)):
        yield Field(value, place, axis, by, bits, facts)


def _chosen(packed: Value) -> tuple[Value, Value | None]:
    """A number, and where it is that and not zero."""
    op = packed.producer
    if op is not None and op.code is Code.SELECT and constant(unspread(op.operands[2])) == 0:
        return op.operands[1], op.operands[0]
    return packed, None


def _below(forms: Forms, value: Value) -> Polynomial | None:
    """What a number that is not negative is less than; None where that is not known."""
    op = value.producer
    if op is None or op.code not in (Code.ARG_MAX, Code.ARG_MIN):
        return None
    size = op.operands[0].shape[op.attributes["axis"]]
    symbol = forms.kernel.extents.get(size)
    return parsed(symbol, size, forms.positive, forms.kernel.constants) if symbol else Polynomial.integer(size)


def _confined(lanes: Lanes, value: Value, mask: Value, axis: int | None = None) -> bool:
    """Whether a number may be anything where a mask does not hold. `axis`: that the mask does not have."""
    return lanes.confined(value, mask, axis) and lanes.spared(value, mask, axis)


def _has_word(
    forms: Forms, lanes: Lanes, value: Value, mask: Value | None, stored: Value | None, axis: int
) -> Claims | None:
    """What has to hold for a word to be stored wherever a number matters; None where that is not known. `mask`: outside
    of which it does not."""
    if stored is None or _confined(lanes, value, stored, axis):
        return ()
    claims: list[Claim] = []
    known = [form for form in ([] if mask is None else mask_forms(forms, mask)) if form is not None]
    for part in mask_forms(forms, stored):
        seen = None if part is None else part.moved(lambda old: old + (old >= axis))
        left = [] if seen is None else [base for form in known if (base := _follows_if(seen, form)) is not None]
        if not left:
            return None
        claims.append(Claim(left[0], ZERO).reduced)
    return tuple(claims)


def _follows_if(negative: Form, other: Form) -> Polynomial | None:
    """What must not be less than 0 for a form to be less than 0 wherever another one is; None where that is not it."""
    coefficients = other.coefficients
    for atom, number in negative.terms:
        factor = coefficients[atom].quotient(number) if atom in coefficients else None
        if factor is not None and factor.surely(1):
            apart = other - negative.times(factor)
            return apart.base if apart.rises else None
    return None


class _Unpacked(Copier):
    """Reads numbers from words."""

    def __init__(self, source: Kernel, found: dict[Value, Field]) -> None:
        super().__init__(source)
        self.found = found

    def op(self, op: Op) -> None:
        super().op(op)
        one = self.found.get(op.results[0]) if op.results else None
        if one is None:
            return
        b = self.b
        word = b.expand(load_back(self, one.place), one.axis)
        field = b.elementwise(Code.SHR, (word, self[one.shift]))
        mask = b.const((1 << one.bits) - 1, field.element)
        number = b.cast(b.elementwise(Code.AND, (field, mask)), one.value.element)
        self[one.value] = b.known(self[one.value], number)
