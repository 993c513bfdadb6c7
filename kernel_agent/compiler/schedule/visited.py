"""`visited`: which programs take part, solved from conditions that are linear in the number of the program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernel_agent.compiler.schedule.forms import Forms, sides
from kernel_agent.compiler.schedule.linear import Atom, Form
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.phases import Turned

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


@dataclass(frozen=True)
class Range:
    """Programs from `low` on and before `high`; None where that is no limit."""

    low: Value | None
    high: Value | None


@dataclass(frozen=True)
class Less:
    """One number is less than another, or `equal` to it."""

    one: Value
    other: Value
    equal: bool

    def parts(self, forms: Forms, one: Code, other: Code) -> list[Less]:
        """The same of what the first number is made of by one operation, or else the second by another."""
        firsts = sides(forms, self.one, one)
        if len(firsts) > 1:
            return [replace(self, one=first) for first in firsts]
        return [replace(self, other=second) for second in sides(forms, self.other, other)]

    def value(self, copier: Turned) -> Value:
        """Whether that holds, where it is the same for all programs."""
        return copier.b.compare("le" if self.equal else "lt", copier[self.one], copier[self.other])


def split_conditions(conditions: Sequence[tuple[Value, bool]]) -> tuple[tuple[Value, bool], ...]:
    """Conditions that together say the same, none of which is a conjunction."""
    found: list[tuple[Value, bool]] = []
    for condition, holds in conditions:
        op = condition.producer
        if op is not None and op.code is (Code.AND if holds else Code.OR):
            found += split_conditions([(operand, holds) for operand in op.operands])
        else:
            found.append((condition, holds))
    return tuple(found)


def visited(
    forms: Forms, copier: Turned, axis: int, conditions: Sequence[tuple[Value, bool]]
) -> tuple[Range | None, tuple[tuple[Value, bool], ...]]:
    """The programs along an axis for which conditions hold, and the conditions that are not told by that.

    c * program + rest < 0 is solved for the program, by the floor of a quotient. Where what is divided may be negative,
    the quotient is cut to a negative number or zero: the first program then, and a range without programs.
    """
    b = copier.b
    known: Range | None = None
    left: list[tuple[Value, bool]] = []
    for condition, holds in conditions:
        less = _less(condition, holds)
        found = None if less is None else _solved(forms, copier, axis, less)
        if found is None:
            left.append((condition, holds))
        else:
            known = found if known is None else _both(b, known, found)
    if known is not None and known.high is not None:
        known = Range(known.low, b.elementwise(Code.MIN, (known.high, copier.counts[axis])))
    return known, tuple(left)


def _solved(forms: Forms, copier: Turned, axis: int, less: Less) -> Range | None:
    """The programs for which one number is less than another: than the least of several where it is than each, than the
    largest where it is than one of them. None where that cannot be told."""
    if forms.program(axis) not in forms.of(less.one).sources | forms.of(less.other).sources:
        return None
    every = less.parts(forms, Code.MAX, Code.MIN)
    if len(every) > 1:
        found = [_part(forms, copier, axis, part) for part in every]
        known = [part for part in found if part is not None]
        return functools.reduce(functools.partial(_both, copier.b), known) if len(known) == len(found) else None
    some = less.parts(forms, Code.MIN, Code.MAX)
    return _either(forms, copier, axis, some) if len(some) > 1 else _linear(forms, copier, axis, less)


def _part(forms: Forms, copier: Turned, axis: int, less: Less) -> Range | None:
    """The same; all programs or none where it is the same for all."""
    if _moves(forms, axis, less):
        return _solved(forms, copier, axis, less)
    b = copier.b
    return Range(None, b.select(less.value(copier), copier.counts[axis], b.const(0)))


def _either(forms: Forms, copier: Turned, axis: int, parts: Sequence[Less]) -> Range | None:
    """The programs for which one of several holds, of which one alone tells programs apart: all where another does."""
    b = copier.b
    moving = [part for part in parts if _moves(forms, axis, part)]
    found = _solved(forms, copier, axis, moving[0]) if len(moving) == 1 else None
    if found is None:
        return None
    always = [part.value(copier) for part in parts if part not in moving]
    if not always:
        return found
    all_do = functools.reduce(lambda one, other: b.elementwise(Code.OR, (one, other)), always)
    low = None if found.low is None else b.select(all_do, b.const(0, found.low.element), found.low)
    high = None if found.high is None else b.select(all_do, copier.counts[axis], found.high)
    return Range(low, high)


def _moves(forms: Forms, axis: int, less: Less) -> bool:
    """Whether it may hold for some programs and not for others."""
    return forms.program(axis) in forms.reads(less.one) | forms.reads(less.other)


def _both(b: Builder, one: Range, other: Range) -> Range:
    """The programs of both."""
    lows = [low for low in (one.low, other.low) if low is not None]
    highs = [high for high in (one.high, other.high) if high is not None]
    return Range(
        functools.reduce(lambda x, y: b.elementwise(Code.MAX, (y, x)), lows) if lows else None,
        functools.reduce(lambda x, y: b.elementwise(Code.MIN, (y, x)), highs) if highs else None,
    )


def _linear(forms: Forms, copier: Turned, axis: int, less: Less) -> Range | None:
    """The programs for which one sum of products is less than another."""
    b, program = copier.b, forms.program(axis)
    difference = forms.of(less.one) - forms.of(less.other)
    factor = difference.coefficients.get(program)
    rest = Form.of({a: c for a, c in difference.terms if a != program}, difference.base)
    if less.equal:
        rest = rest - Form(base=ONE)
    step = None if factor is None else _divisor(b, factor)
    if factor is None or step is None or _reads(rest, program):
        return None
    above, whole = factor.surely(1), Form(base=factor)
    numerator = rest.times(Polynomial.integer(-1)) + whole - Form(base=ONE) if above else rest - whole
    value = _value_of(forms, copier, numerator, (less.one, less.other))
    if value is None:
        value = _without(copier, axis, less, above=above, step=step)
    limit = b.elementwise(Code.FLOORDIV, (value, step))
    if not above and not numerator.not_negative:
        limit = b.elementwise(Code.MAX, (limit, b.zero(limit)))
    return Range(None, limit) if above else Range(limit, None)


def _without(copier: Turned, axis: int, less: Less, *, above: bool, step: Value) -> Value:
    """What is divided by the step, made of both sides as the first program has them."""
    b = copier.b
    first = copier.at(axis, b.const(0))
    one, other = first[less.one], first[less.other]
    rest = b.sub(other, one) if above else b.sub(one, other)
    less_one = b.const(1, step.element)
    if less.equal:
        rest = b.add(rest, less_one) if above else b.sub(rest, less_one)
    return b.add(rest, b.sub(step, less_one) if above else step)


def _less(condition: Value, holds: bool) -> Less | None:
    """What a comparison of integers says."""
    op = condition.producer
    if op is None or op.code is not Code.CMP or condition.shape or op.attributes.get("unsigned"):
        return None
    one, other = op.operands
    predicate = op.attributes["predicate"] if holds else _NEGATED.get(op.attributes["predicate"], "")
    if one.is_float or predicate not in _NEGATED:
        return None
    if predicate in ("gt", "ge"):
        one, other = other, one
    return Less(one, other, predicate in ("le", "ge"))


def _divisor(b: Builder, factor: Polynomial) -> Value | None:
    """The size of a coefficient as a constant."""
    size = factor if factor.surely(1) else -factor
    return constant_of(b, size) if size.surely(1) else None


def constant_of(b: Builder, number: Polynomial) -> Value | None:
    """A number of constexprs as a constant that is called by their names; None where it is of other symbols."""
    found = 0
    for monomial, factor in number.terms:
        for symbol in monomial:
            if symbol.present is None:
                return None
            factor *= symbol.present
        found += factor
    return b.const(found, "i32", number.text() if number.symbols else None)


def _reads(form: Form, program: Atom) -> bool:
    """Whether the rest still depends on the program."""
    return program in form.sources or any(atom.reads for atom, _ in form.terms)


def _value_of(forms: Forms, copier: Turned, form: Form, sides: Sequence[Value]) -> Value | None:
    """A form as a value, where it is one side of the comparison and a number of the launch, of either sign."""
    b = copier.b
    for side in sides:
        for sign in (1, -1):
            apart = (form - forms.of(side).times(Polynomial.integer(sign))).invariant
            number = None if apart is None else _number_of(copier, apart)
            if number is not None:
                return b.add(copier[side], number) if sign == 1 else b.sub(number, copier[side])
    return None


def _number_of(copier: Turned, number: Polynomial) -> Value | None:
    """A number of constexprs and scalar arguments as a value; None where it is of other symbols."""
    known = constant_of(copier.b, number)
    if known is not None:
        return known
    b = copier.b
    arguments = {value.name: value for value in copier.source.arguments if value.element == "i32"}
    fixed = Polynomial.of({m: factor for m, factor in number.terms if all(s.present is not None for s in m)})
    found = constant_of(b, fixed)
    assert found is not None
    for monomial, factor in sorted(number.terms, key=lambda term: -term[1]):
        if len(monomial) == 1 and monomial[0].text in arguments and abs(factor) == 1:
            argument = arguments[monomial[0].text]
            found = b.add(found, argument) if factor == 1 else b.sub(found, argument)
        elif (monomial, factor) not in fixed.terms:
            return None
    return found
