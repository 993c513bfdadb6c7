"""`Site`: where in a kernel an operation stands: the loops and branches around it, and what bounds indices there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.forms import Forms, relabelled, sides
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, quotient_of
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


@dataclass(frozen=True)
class Bound:
    """0 <= form < below wherever an operation takes part."""

    form: Form
    """Without a base, none of its atoms opaque, all coefficients at least 0."""
    below: Polynomial
    steps: tuple[Polynomial, ...] = ()
    """What must be no less than 0 for that, though it is not known: the rows of a program, as a constexpr."""

    @property
    def size(self) -> int:
        """Atoms that it bounds together."""
        return len(self.form.terms)


@dataclass(frozen=True, eq=False)
class Site:
    """An operation and what is around it."""

    op: Op
    block: Block
    """That it stands in."""
    loops: tuple[Op, ...] = ()
    """FORs and WHILEs, the outermost first."""
    conditions: tuple[tuple[Value, bool], ...] = ()
    """What is known to hold, or with False not to hold: of branches around, and of programs that have not ended."""
    sides: tuple[Block, ...] = ()
    """Of IFs around it, the outermost first."""

    @property
    def branches(self) -> int:
        """IFs around it."""
        return len(self.sides)


@dataclass(frozen=True, eq=False)
class OwnRows(Site):
    """An addition that the owner of a trip's rows does as the program whose number is that of the trip."""

    axis: int = 0
    """Of the program."""
    fact: str = ""
    """Python: there is an owner for every program, and may be more. Empty: there are as many."""


def sites(block: Block, codes: frozenset[Code]) -> list[Site]:
    """All operations of some kinds, in order."""
    return list(_sites(block, codes, Site(Op(Code.BARRIER, (), ()), block)))


def _sites(block: Block, codes: frozenset[Code], around: Site) -> Iterator[Site]:
    conditions = around.conditions
    for op in block.ops:
        here = Site(op, block, around.loops, conditions, around.sides)
        if op.code in codes:
            yield here
        if op.code is Code.LEAVE_IF:
            conditions = (*conditions, (op.operands[0], False))
        elif op.code is Code.IF:
            for side, inner in zip((True, False), op.blocks, strict=True):
                known = (*conditions, (op.operands[0], side))
                yield from _sites(inner, codes, Site(op, inner, around.loops, known, (*around.sides, inner)))
        elif op.code in (Code.FOR, Code.WHILE):
            for inner in op.blocks:
                yield from _sites(inner, codes, Site(op, inner, (*around.loops, op), conditions, around.sides))


def bounds(forms: Forms, site: Site, *, likely: bool = False) -> list[Bound]:
    """What holds of indices where the operation takes part: by its mask, loops and conditions. `likely`: and what holds
    if its `steps` do."""
    kept: dict[Form, Bound] = {}
    for negative in negatives(forms, site):
        steps: list[Polynomial] = []
        for bound in below(negative) or (_below_if(negative, steps) if likely else []):
            kept.setdefault(bound.form, replace(bound, steps=tuple(steps)))
    return sorted(kept.values(), key=lambda bound: -bound.size)


def negatives(forms: Forms, site: Site) -> list[Form]:
    """Forms that are less than 0 where the operation takes part: by its mask, loops and conditions."""
    found: list[Form] = []
    if site.op.attributes.get("masked") and site.op.mask is not None:
        found += _negatives(forms, site.op.mask)
    for loop in site.loops:
        found += [*loop_forms(forms, loop), *_turns(forms, loop)] if loop.code is Code.FOR else []
    for condition, holds in site.conditions:
        found += _negatives(forms, condition, holds=holds)
    return found


def loop_bound(forms: Forms, loop: Op) -> Bound | None:
    """That a loop's index is less than its end; None where that says nothing."""
    found = loop_bounds(forms, loop)
    return found[0] if found else None


def loop_bounds(forms: Forms, loop: Op) -> list[Bound]:
    """All that a loop's end says of its index."""
    if loop.code is not Code.FOR:
        return []
    return [bound for negative in loop_forms(forms, loop) for bound in below(negative)]


def loop_forms(forms: Forms, loop: Op) -> list[Form]:
    """Forms of which all are less than 0 in every trip of a loop, and in no trip behind the last."""
    index = forms.of(loop.blocks[0].arguments[0])
    return [_before(forms, index, end) for end in sides(forms, loop.operands[1], Code.MIN)]


def _turns(forms: Forms, loop: Op) -> list[Form]:
    """The same of a loop of `min(a, b) * size` trips, whose index is read as a quotient by that size: the turns that
    `index // size` counts are fewer than a, and fewer than b. None where nothing is the smallest of several."""
    index, product = forms.of(loop.blocks[0].arguments[0]), loop.operands[1].producer
    if product is None or product.code is not Code.MUL or not index.not_negative:
        return []
    for turns, size in (product.operands, product.operands[::-1]):
        by, ends = forms.of(size).invariant, sides(forms, turns, Code.MIN)
        if by is not None and len(ends) > 1:
            turn = Form.of({quotient_of(index, by): ONE})
            return [turn - forms.of(end) for end in ends]
    return []


def _before(forms: Forms, index: Form, end: Value) -> Form:
    """A form that is less than 0 where an index is less than an end. Of steps of a size that go up to a length that
    only memory has: `index < cdiv(length, size)` where index * size < length. Both hold of no index that is not
    negative where the length is, however the quotient is rounded then."""
    op = end.producer
    plain = index - forms.of(end)
    if op is None or op.code is not Code.FLOORDIV or op.attributes.get("unsigned") or not index.not_negative:
        return plain
    size = forms.of(op.operands[1]).invariant
    if size is None or not size.surely(1) or all(atom.kind is not Kind.OPAQUE for atom, _ in plain.terms):
        return plain
    length = forms.of(op.operands[0]) - Form(base=size - ONE)
    return index.times(size) - length


def mask_bounds(forms: Forms, mask: Value, *, holds: bool = True) -> list[Bound]:
    """What a condition says of indices, as seen from the axes of the mask."""
    return [bound for negative in _negatives(forms, mask, holds=holds) for bound in below(negative)]


def mask_forms(forms: Forms, mask: Value) -> list[Form | None]:
    """Forms that are less than 0 where a mask holds; None among them for what says something else."""
    return _parts(forms, mask, holds=True)


def whole_bounds(
    forms: Forms,
    mask: Value,
    *,
    holds: bool = True,
    steps: list[Polynomial] | None = None,
    where: Form | None = None,
    trips: Mapping[Atom, Polynomial] | None = None,
    lows: dict[Form, Polynomial] | None = None,
) -> list[Bound] | None:
    """The same, where that is all that the condition says; None where it says more. What holds always is left out, and
    so is what holds wherever the form `where` is less than 0.

    `steps` gets what is taken to be no less than 0, though that is not known: the rows of a program, as an argument.
    `trips`: of loops, in which this is asked. `lows` gets what indices are said to be no less than, where that may be
    said; nothing else is said of them then.
    """
    parts = [
        part
        for part in (_in_trips(one, trips or {}) for one in _parts(forms, mask, holds=holds))
        if part is None or not (_always_negative(part) or (where is not None and follows(part, where)))
    ]
    found = []
    for part in parts:
        low = None if part is None or lows is None else risen(part)
        if lows is not None and low is not None and low[0] not in lows:
            lows[low[0]] = low[1]
        else:
            found.append([] if part is None else below(part) or _below_if(part, steps))
    return [bound for one in found for bound in one] if all(found) else None


def risen(negative: Form) -> tuple[Form, Polynomial] | None:
    """The sum of indices that is no less than a number where a form is less than 0, and that; None where the form says
    anything else."""
    rising = Form(negative.times(Polynomial.integer(-1)).terms)
    return (rising, negative.base + ONE) if rising.terms and rising.rises else None


def _in_trips(part: Form | None, trips: Mapping[Atom, Polynomial]) -> Form | None:
    """What a part says in some trips of loops; None where the form does not show it."""
    if part is None or not trips:
        return part
    found = part.at(trips)
    return None if found.sources & set(trips) else found


def follows(negative: Form, other: Form) -> bool:
    """Whether a form is proved to be less than 0 wherever another one is."""
    return (other - negative).not_negative


def _always_negative(form: Form) -> bool:
    """Proved, as of -1 - i for an index i."""
    return (form.times(Polynomial.integer(-1)) - Form(base=ONE)).not_negative


def _negatives(forms: Forms, mask: Value, *, holds: bool = True) -> list[Form]:
    """Forms that are less than 0 where a condition holds, as seen from the axes of the mask."""
    return [part for part in _parts(forms, mask, holds=holds) if part is not None]


def _parts(forms: Forms, mask: Value, *, holds: bool) -> list[Form | None]:
    """A form that is less than 0 for everything that a condition says; None for what says something else."""
    op = mask.producer
    if op is None:
        return [None]
    if op.code is (Code.AND if holds else Code.OR):
        return [part for operand in op.operands for part in _parts(forms, operand, holds=holds)]
    if op.code is (Code.OR if holds else Code.AND):  # what holds on either side, and more
        one, other = (_parts(forms, operand, holds=holds) for operand in op.operands)
        return [*(part for part in one if part is not None and part in other), None]
    if op.code in (Code.FULL, Code.BROADCAST):
        return _parts(forms, op.operands[0], holds=holds)
    if op.code in (Code.EXPAND, Code.TRANS):
        inner = _parts(forms, op.operands[0], holds=holds)
        return [None if part is None else relabelled(op, part) for part in inner]
    if op.code is not Code.CMP or op.attributes.get("unsigned") or op.operands[0].is_float:
        return [None]
    predicate = op.attributes["predicate"]
    if not holds:
        predicate = _NEGATED.get(predicate, "")
    if predicate not in _NEGATED:
        return [None]
    left, right = op.operands if predicate in ("lt", "le") else op.operands[::-1]
    equal = Form(base=ONE if predicate in ("le", "ge") else ZERO)
    lower, upper = sides(forms, left, Code.MAX), sides(forms, right, Code.MIN)
    return [forms.of(one) - forms.of(other) - equal for one in lower for other in upper]


def _below_if(difference: Form, steps: list[Polynomial] | None) -> list[Bound]:
    """The same, if coefficients whose sign is not known are no less than 0."""
    upward = all(count > 0 for _, number in difference.terms for _, count in number.terms)
    if steps is None or not upward or any(atom.kind is Kind.OPAQUE for atom, _ in difference.terms):
        return []
    steps += [number for _, number in difference.terms if not number.surely(0)]
    return [Bound(Form(difference.terms), -difference.base)] if difference.terms else []


def below(difference: Form) -> list[Bound]:
    """Of difference < 0."""
    if difference.terms and difference.rises:
        return [Bound(Form(difference.terms), -difference.base)]
    return []
