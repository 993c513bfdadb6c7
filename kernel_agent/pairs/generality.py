"""How arguments and outputs look beside the entry that is observed: which sizes follow which dims, which dtypes occur.

The stub is run again at small entries of sizes that all differ. Runs the user's code: child only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernel_agent.pairs.axes import Seen, axis_names
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, ShapeEntry

LARGEST = 1 << 20
"""Elements of the arguments and outputs at the observed entry beyond which the stub is not run again."""
MOST = 1 << 22
"""Elements of the arguments at another entry beyond which the stub is not run there."""


@dataclass(frozen=True)
class Look:
    """What one run shows."""

    entry: ShapeEntry
    inputs: tuple[ArgumentFacts, ...]
    outputs: tuple[ArgumentFacts, ...]


def general(first: Look, sweep: tuple[ShapeEntry, ...], look: Callable[[ShapeEntry], Look]) -> Look:
    """`first` with `axes` and `dtypes` of every tensor filled in, from further looks at small entries.

    `look` runs the stub and may raise anything for an entry that the user's code does not take: that entry then tells
    nothing.
    """
    looks = [first]
    if sum(_elements(facts) for facts in (*first.inputs, *first.outputs)) <= LARGEST:
        looks += _sizes_changed(first.entry, look)
        looks += [found for entry in _other_dtypes(first.entry, sweep) for found in _try(entry, look)]
    return Look(
        first.entry,
        tuple(_named(facts, [other.inputs for other in looks], looks) for facts in first.inputs),
        tuple(_named(facts, [other.outputs for other in looks], looks) for facts in first.outputs),
    )


def _sizes_changed(entry: ShapeEntry, look: Callable[[ShapeEntry], Look]) -> list[Look]:
    """All sizes changed at once; where the forward does not take that, one after the other."""
    sizes = {name: value for name, value in entry.dims.items() if type(value) is int and value > 0}
    fresh = _distinct_primes(sizes)
    if found := _try(_changed(entry, fresh), look):
        return found
    one_by_one: list[Look] = []
    for name, value in sizes.items():
        one_by_one += _try(_changed(entry, {name: fresh[name]}), look) or _try(_changed(entry, {name: 2 * value}), look)
    return one_by_one


def _other_dtypes(entry: ShapeEntry, sweep: tuple[ShapeEntry, ...]) -> Iterator[ShapeEntry]:
    """The entry with the other dtypes that SWEEP names in its place."""
    seen = {repr(_dtype_dims(entry))}
    for other in sweep:
        named = _dtype_dims(other)
        if repr(named) not in seen:
            seen.add(repr(named))
            kept = {name: value for name, value in entry.dims.items() if name not in _dtype_dims(entry)}
            yield ShapeEntry(dims={**kept, **named}, required=False)


def _dtype_dims(entry: ShapeEntry) -> dict[str, str]:
    """The dims of an entry that name a dtype."""
    return {
        name: value
        for name, value in entry.dims.items()
        if isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
    }


def _try(entry: ShapeEntry, look: Callable[[ShapeEntry], Look]) -> list[Look]:
    try:
        return [look(entry)]
    except Exception:  # the user's code does not take this entry, which is no fault: it is none of SWEEP
        return []


def _changed(entry: ShapeEntry, sizes: dict[str, int]) -> ShapeEntry:
    return ShapeEntry(dims={**entry.dims, **sizes}, required=False)


def _distinct_primes(sizes: dict[str, int]) -> dict[str, int]:
    """A prime above each size, no two alike and none of them one of the sizes.

    The smallest sizes get the smallest primes: what is small may be an exponent, such as a number of levels.
    """
    taken = set(sizes.values())
    fresh: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        number = max(3, size + 1)
        while number in taken or any(number % d == 0 for d in range(2, int(number**0.5) + 1)):
            number += 1
        taken.add(number)
        fresh[name] = number
    return fresh


def _named(facts: ArgumentFacts, sides: list[tuple[ArgumentFacts, ...]], looks: list[Look]) -> ArgumentFacts:
    if facts.kind is not ArgumentKind.TENSOR:
        return facts
    seen, dtypes = [], []
    for side, look in zip(sides, looks, strict=True):
        for other in side:
            if other.name == facts.name and other.kind is ArgumentKind.TENSOR:
                dims = {name: value for name, value in look.entry.dims.items() if type(value) is int}
                seen.append(Seen(dims, other.shape))
                dtypes.append(other.dtype)
    return facts.model_copy(update={"axes": axis_names(seen), "dtypes": tuple(dict.fromkeys(dtypes))})


def too_many(inputs: tuple[ArgumentFacts, ...]) -> bool:
    """Whether a stub would take long with such arguments: sizes that all differ multiply, and some are squared."""
    return sum(_elements(facts) for facts in inputs) > MOST


def _elements(facts: ArgumentFacts) -> int:
    count = 1
    for size in facts.shape:
        count *= size
    return count if facts.kind is ArgumentKind.TENSOR else 0
