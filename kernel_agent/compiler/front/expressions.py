"""Which expression over constexprs gives a number at every one of several sizes of the tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType

from kernel_agent.compiler.ssa.special import Number

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453


def explain(names: Sequence[str], witnesses: Sequence[Mapping[str, Number]], numbers: Sequence[Number]) -> str | None:
    """The simplest expression that is `numbers[k]` at the constexprs `witnesses[k]`; None where there is none.

    `names`: the constexprs that the number changes with. What is no name is in parentheses, since passes go on to
    write products and differences of it.
    """
    for text in _candidates(names, witnesses[0], numbers[0]):
        code = compile(text, "<expression>", "eval")
        if all(_equal(code, values, number) for values, number in zip(witnesses, numbers, strict=True)):
            return text if text.isidentifier() else f"({text})"
    return None


def value_of(text: str, values: Mapping[str, Number]) -> Number:
    """The number that an expression is at some values."""
    found: Number = eval(text, {"__builtins__": {}}, dict(values))
    return found


def same(found: Number, number: Number) -> bool:
    """Whether a number of a module is the one that was found."""
    if isinstance(number, float):
        return abs(float(found) - number) <= 1e-7 * abs(number)  # constants are printed in 32 bits
    return bool(found == number)


def _equal(code: CodeType, values: Mapping[str, Number], number: Number) -> bool:
    try:
        return same(eval(code, {"__builtins__": {}}, dict(values)), number)
    except (ArithmeticError, TypeError):  # a shift of a float
        return False


def _candidates(names: Sequence[str], values: Mapping[str, Number], number: Number) -> Iterator[str]:
    """Expressions, the likelier ones first."""
    if len(names) == 1 and isinstance(values[names[0]], float):
        (a,) = names
        yield from (a, f"-{a}", f"1.0 - {a}", f"1.0 / {a}", f"1.0 / (1.0 - {a})", f"{a} * {a}", f"1.0 + {a}")
        yield from (f"{a} * {factor}" for factor in (2.0, 0.5, _LOG2_E, _LN_2))
        yield from (f"{a} ** 0.5", f"{a} ** -0.5", f"{a} - 1.0")
    elif len(names) == 1:
        (a,) = names
        yield from (a, f"{a} - 1", f"{a} + 1", f"-{a}", f"{a} // 2", f"2 * {a}", f"{a} // 4", f"4 * {a}")
        if isinstance(number, int):
            yield f"{a} {'-' if number < values[a] else '+'} {abs(number - values[a])}"
            yield from _scaled(a, values[a], number)
            yield from (f"{a} // {2**power}" for power in range(3, 9))
            yield from (f"{a} * {a}", f"{a}.bit_length() - 1", f"({a} + 1) // 2")
        else:
            yield from (f"1.0 / {a}", f"{a} ** -0.5", f"{a} ** 0.5")
        return
    if len(names) == 2:
        for a, b in (names, names[::-1]):
            yield from (f"{a} * {b}", f"{a} // {b}", f"{a} - {b}", f"{a} + {b}", f"({a} + {b} - 1) // {b}")
            yield from (f"{a} * {b} - 1", f"{a} + {b} - 1", f"{a} // {b} - 1", f"1.0 / ({a} * {b})")
            yield from (f"({a} + 1) * {b}", f"({a} - 1) * {b}")
            if isinstance(number, int):
                yield from _scaled(f"{a} * {b}", values[a] * values[b], number)
        return
    yield " * ".join(names)
    yield " + ".join(names)
    if len(names) == 3:
        for a, b, c in itertools.permutations(names):
            yield from (f"({a} + {b}) * {c}", f"({a} + 2 * {b}) * {c}", f"({a} + 1) * {b} * {c}")


def _scaled(text: str, value: Number, number: int) -> Iterator[str]:
    if value and number % value == 0:
        yield f"{number // value} * {text}"
    if number and value % number == 0:
        yield f"{text} // {value // number}"
