"""`visited`: which programs take part, solved from conditions that are linear in the number of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_agent.compiler.schedule.forms import Forms
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
    low: Value | None = None
    high: Value | None = None
    left: list[tuple[Value, bool]] = []
    program = forms.program(axis)
    for condition, holds in conditions:
        sides = _less(condition, holds)
        if sides is None:
            left.append((condition, holds))
            continue
        one, other, equal = sides
        difference = forms.of(one) - forms.of(other)
        factor = difference.coefficients.get(program)
        rest = Form.of({a: c for a, c in difference.terms if a != program}, difference.base)
        if equal:
            rest = rest - Form(base=ONE)
        step = None if factor is None else _divisor(b, factor)
        above = factor is not None and factor.surely(1)
        whole = Form(base=factor) if factor is not None else Form()
        numerator = rest.times(Polynomial.integer(-1)) + whole - Form(base=ONE) if above else rest - whole
        if step is None or _reads(rest, program):
            left.append((condition, holds))
            continue
        value = _value_of(forms, copier, numerator, (one, other))
        if value is None:
            left.append((condition, holds))
            continue
        limit = b.elementwise(Code.FLOORDIV, (value, step))
        if not above and not numerator.not_negative:
            limit = b.elementwise(Code.MAX, (limit, b.zero(limit)))
        if above:
            high = limit if high is None else b.elementwise(Code.MIN, (high, limit))
        else:
            low = limit if low is None else b.elementwise(Code.MAX, (low, limit))
    if high is not None:
        high = b.elementwise(Code.MIN, (high, copier.counts[axis]))
    return (Range(low, high) if low is not None or high is not None else None), tuple(left)


def _less(condition: Value, holds: bool) -> tuple[Value, Value, bool] | None:
    """A comparison of integers as one < other, or with True as one <= other."""
    op = condition.producer
    if op is None or op.code is not Code.CMP or condition.shape or op.attributes.get("unsigned"):
        return None
    one, other = op.operands
    predicate = op.attributes["predicate"] if holds else _NEGATED.get(op.attributes["predicate"], "")
    if one.is_float or predicate not in _NEGATED:
        return None
    if predicate in ("gt", "ge"):
        one, other = other, one
    return one, other, predicate in ("le", "ge")


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
