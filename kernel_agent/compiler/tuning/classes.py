"""Shape classes: by which whole number of a call, if any, it is worth to choose, and the choice for each class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.tuning.search import Part

WORTH = 0.005
"""Relative time that a further class must save in the geometric mean: each is a branch that somebody has to read."""
MOST = 4
"""Classes."""


@dataclass(frozen=True)
class Class:
    """Calls with one choice."""

    conditions: tuple[str, ...]
    """`N <= 4096`, `not causal`; all must hold. Empty: whatever no other class takes."""
    values: Mapping[int, int]
    labels: tuple[str, ...]
    """Entries it was chosen at."""


def classes(part: Part, sizes: Mapping[str, Mapping[str, int]], names: Sequence[str]) -> tuple[Class, ...]:
    """The classes of one part, those with conditions first.

    `names`: expressions that may be asked; of splits that save as much, that by the first is taken.
    """
    return tuple(_split(part, part.labels, sizes, names, MOST))


def _split(
    part: Part, labels: Sequence[str], sizes: Mapping[str, Mapping[str, int]], names: Sequence[str], most: int
) -> Iterator[Class]:
    whole = part.mean(part.best(labels), labels)
    chosen: tuple[float, str, list[str], list[str]] | None = None
    for name in names if most > 1 else ():
        numbers = {label: sizes.get(label, {}).get(name) for label in labels}
        if None in numbers.values():
            continue
        for least in sorted({number for number in numbers.values() if number is not None})[:-1]:
            low = [label for label in labels if (numbers[label] or 0) <= least]
            high = [label for label in labels if label not in low]
            logs = sum(len(some) * math.log(part.mean(part.best(some), some)) for some in (low, high))
            time = math.exp(logs / len(labels))
            if time < (1 - WORTH) * whole and (chosen is None or time < 0.999 * chosen[0]):
                chosen = time, f"not {name}" if least is False else f"{name} <= {least}", low, high
    if chosen is None:
        yield Class((), dict(part.best(labels)), tuple(labels))
        return
    _, condition, low, high = chosen
    for one in _split(part, low, sizes, names, most - 1):
        yield Class((condition, *one.conditions), one.values, one.labels)
    yield from _split(part, high, sizes, names, most - 1)
