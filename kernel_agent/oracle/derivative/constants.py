"""Constants of a derivative as expressions of dims, kept only where they hold at two calls of other sizes.

A reference computes `1 / (C // groups * H * W)` in Python, and a trace of it holds a number. At one call many products
of dims may give that number (1/105 is 1/(B*H*W), too, where C is three times the groups and B is 3); at a second one
with every dim changed, the right one alone does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_FACTORS = 4
"""Dims in one expression."""

_COEFFICIENTS = (1.0, 2.0, 0.5)
_POWERS = (1.0, -1.0, 0.5, -0.5)
_MARK = re.compile("\x02([0-9]+)\x03")


@dataclass(frozen=True)
class Derivation:
    """A derivative as traced at one call."""

    lines: tuple[str, ...]
    """With marks in place of the constants."""
    constants: tuple[float, ...]
    """By the number in the mark; none is negative."""
    symbols: Mapping[str, float]
    """Values of dims and of number arguments at this call."""


class Constants:
    """Gives marks to numbers, one to each value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def mark(self, value: float) -> str:
        """What stands in a text for a number until it is known what it is made of."""
        size = abs(float(value))
        if size not in self.values:
            self.values.append(size)
        return f"{'-' if value < 0 else ''}\x02{self.values.index(size)}\x03"


def resolved(first: Derivation, second: Derivation | None) -> tuple[str, ...]:
    """The lines of the first call, each constant as the expression that holds at the second as well, or as a number."""
    found = {number: f"{value:g}" for number, value in enumerate(first.constants)}
    if second is not None and len(second.constants) == len(first.constants):
        for number, values in enumerate(zip(first.constants, second.constants, strict=True)):
            found[number] = _expression(values, first.symbols, second.symbols) or found[number]
    return tuple(_MARK.sub(lambda mark: found[int(mark[1])], line) for line in first.lines)


def _expression(values: tuple[float, float], here: Mapping[str, float], there: Mapping[str, float]) -> str:
    """The shortest product of powers that gives both values; empty where there is none."""
    if values[0] == values[1]:  # no dim that changed is in it
        return ""
    names = [name for name, value in here.items() if name in there and value > 1 and there[name] > 1]
    for chosen, powers in _products(names):
        parts = [
            math.prod(symbols[name] ** power for name, power in zip(chosen, powers, strict=True))
            for symbols in (here, there)
        ]
        for coefficient in _COEFFICIENTS:
            pairs = zip(parts, values, strict=True)
            if all(math.isclose(coefficient * part, value, rel_tol=1e-9) for part, value in pairs):
                return _text(coefficient, dict(zip(chosen, powers, strict=True)))
    return ""


def _products(names: list[str]) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Names with their powers, the fewest first, whole powers before roots."""
    for count in range(1, min(MOST_FACTORS, len(names)) + 1):
        ordered = sorted(itertools.product(_POWERS, repeat=count), key=lambda powers: sum(p % 1 != 0 for p in powers))
        for powers in ordered:
            for chosen in itertools.combinations(names, count):
                yield chosen, powers


def _text(coefficient: float, powers: Mapping[str, float]) -> str:
    """`(groups/(C*H*W))`, `(1/(cap*sqrt(D)))`."""

    def side(sign: int) -> list[str]:
        return [name if abs(p) == 1 else f"sqrt({name})" for name, p in powers.items() if p * sign > 0]

    above = [*(["2"] if coefficient == 2 else []), *side(1)]
    below = [*(["2"] if coefficient == 0.5 else []), *side(-1)]
    over = "*".join(above) or "1"
    if not below:
        return f"({over})" if len(above) > 1 else over
    return f"({over}/{below[0] if len(below) == 1 else '(' + '*'.join(below) + ')'})"
