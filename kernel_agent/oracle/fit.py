"""Makes a SWEEP entry small enough for a CPU: written for a GPU, it may ask for gigabytes.

Deterministic in the entry alone, never in the speed of the machine, so that a verdict means the same everywhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field
from torch import Tensor

from kernel_agent.pairs.arguments import Arguments
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.record import Record

LONG = 128
"""Dims beyond this are halved first: what is left of them still spans several tiles."""
COUNT = 32
"""Dims up to this are taken for counts (batch, heads, experts) and halved before the widths between COUNT and LONG."""


class Fit(Record):
    """What became of one entry."""

    asked: ShapeEntry
    entry: ShapeEntry = Field(description="the entry that is run; equal to `asked` when it fits")
    elements: int = Field(description="elements of the tensor arguments; 0 when make_args refuses every size")
    refusal: str = Field(default="", description="what make_args said to the smallest entry tried")

    @property
    def shrunk(self) -> bool:
        """Whether a smaller entry stands in for the one asked for."""
        return self.entry.dims != self.asked.dims


def volume(entry: ShapeEntry) -> int:
    """Product of all whole-number dims: an upper bound of the work of most kernels (M*N*K of a matmul)."""
    return math.prod(max(value, 1) for value in _whole(entry).values())


Build = Callable[[ShapeEntry], Arguments]


def fit_entry(
    entry: ShapeEntry, build: Build, *, max_elements: int, max_volume: int, outline: Build | None = None
) -> Fit:
    """Halve dims until the arguments fit; `build` is make_args and may raise for sizes it refuses.

    `outline` builds arguments of the same sizes without numbers, and raises where it cannot: `build` is asked then.
    """
    current = entry
    while volume(current) > max_volume:
        smaller = next(halvings(current), None)
        if smaller is None:
            break
        current = smaller
    elements, refusal = _count(current, build, outline)
    if refusal and current is not entry:
        for other in halvings(current):
            elements, refusal = _count(other, build, outline)
            if not refusal:
                current = other
                break
    while elements > max_elements:
        accepted = next(
            (
                (smaller, count)
                for smaller in halvings(current)
                for count, refused in [_count(smaller, build, outline)]
                if not refused and count < elements
            ),
            None,
        )
        if accepted is None:
            break
        current, elements = accepted
    return Fit(asked=entry, entry=current, elements=elements, refusal=refusal)


def halvings(entry: ShapeEntry) -> Iterator[ShapeEntry]:
    """The entry with one dim halved: long dims first, then even counts, then widths, then whatever is above 1."""
    for name, value in sorted(_whole(entry).items(), key=lambda item: _turn(item[1])):
        if value > 1:
            yield entry.model_copy(update={"dims": {**entry.dims, name: value // 2}})


def _turn(value: int) -> tuple[int, int]:
    if value > LONG:
        return 0, -value
    if value <= COUNT:
        return (1, value) if value >= 4 and value % 2 == 0 else (3, -value)
    return 2, -value


def _whole(entry: ShapeEntry) -> dict[str, int]:
    return {name: value for name, value in entry.dims.items() if type(value) is int}


def _count(entry: ShapeEntry, build: Build, outline: Build | None) -> tuple[int, str]:
    if outline is not None:
        with contextlib.suppress(Exception):  # the user's code may ask for numbers: `build` has these
            return _total(outline(entry)), ""
    try:
        built = build(entry)
    except Exception as error:  # make_args is the user's code: a refused size is an answer
        return 0, f"{type(error).__name__}: {error}"
    return _total(built), ""


def _total(built: Arguments) -> int:
    return sum(_elements(v) for v in (*built.args, *built.kwargs.values()))


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return int(value.numel())
    return sum(_elements(v) for v in value) if isinstance(value, (list, tuple)) else 0
