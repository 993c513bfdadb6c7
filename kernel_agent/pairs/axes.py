"""Shapes in the names of dims: `(B*H, T, 64)` instead of numbers, told from how sizes change from entry to entry.

A name is given only where one simple expression explains every observation: what is not told is a question mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

UNKNOWN = "?"
"""Stands for a size that no simple expression of the dims explains."""

_FACTORS = (2, 3, 4)
_BLOCKS = (2, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Seen:
    """The dims of one entry and a shape that goes with them."""

    dims: Mapping[str, int]
    shape: tuple[int, ...]


def axis_names(seen: Sequence[Seen]) -> tuple[str, ...]:
    """One name per axis of a tensor that was seen at several entries; `?` per axis that cannot be named.

    With one entry alone, a size is named only when exactly one dim has it. Shapes of different rank give `?`s for the
    first one's axes.
    """
    first = seen[0].shape
    if any(len(look.shape) != len(first) for look in seen):
        return (UNKNOWN,) * len(first)
    return tuple(_name([(look.dims, look.shape[axis]) for look in seen]) for axis in range(len(first)))


def _name(points: list[tuple[Mapping[str, int], int]]) -> str:
    names = [name for name in points[0][0] if all(name in dims for dims, _ in points)]
    alike = [name for name in names if all(dims[name] == size for dims, size in points)]
    if alike:
        return alike[0] if len(alike) == 1 or len(points) > 1 else UNKNOWN
    sizes = {size for _, size in points}
    varied = len(points) > 1 and all(len({dims[name] for dims, _ in points}) > 1 for name in names)
    if len(sizes) == 1 and (varied or not names):
        return str(sizes.pop())
    if len(points) == 1:
        return UNKNOWN
    for text, values in _expressions([dims for dims, _ in points], names):
        if values == [size for _, size in points]:
            return text
    return UNKNOWN


def _expressions(points: list[Mapping[str, int]], names: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Candidate expressions with their values at every point, simplest first."""
    for name in names:
        for factor in _FACTORS:
            yield f"{factor}*{name}", [factor * dims[name] for dims in points]
        yield f"{name}//2", [dims[name] // 2 for dims in points]
        yield f"{name}+1", [dims[name] + 1 for dims in points]
        yield f"{name}-1", [dims[name] - 1 for dims in points]
    for pair in combinations_with_replacement(names, 2):
        product = [math.prod(dims[name] for name in pair) for dims in points]
        yield "*".join(pair), product
        for factor in _FACTORS:
            yield f"{factor}*{'*'.join(pair)}", [factor * value for value in product]
    for pair in combinations(names, 2):
        yield "+".join(pair), [sum(dims[name] for name in pair) for dims in points]
    for triple in combinations_with_replacement(names, 3):
        yield "*".join(triple), [math.prod(dims[name] for name in triple) for dims in points]
    for name in names:
        for block in _BLOCKS:
            yield f"cdiv({name}, {block})", [-(-dims[name] // block) for dims in points]
