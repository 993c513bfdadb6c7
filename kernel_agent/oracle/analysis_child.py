"""Truth-child half of `analyse`: runs the forward once at a small entry and tells what it did, as text alone.

Whatever cannot be told becomes a note. The parent imports this module for nothing but its entry's name.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_agent.ir import standin
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.oracle.child import Stub, answered, arguments_at, load
from kernel_agent.oracle.cost_child import shapes_of
from kernel_agent.oracle.derivative.constants import Derivation, resolved
from kernel_agent.oracle.derivative.derive import derive
from kernel_agent.oracle.facts.dims import dims_of
from kernel_agent.oracle.facts.forward import Told, tell
from kernel_agent.oracle.facts.watch import Given, Watched, shapes_only, watch
from kernel_agent.oracle.fit import COUNT, fit_entry, volume
from kernel_agent.oracle.leaves import leaf_call
from kernel_agent.oracle.records import Point
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.forward_facts import Derivative, DerivativeSource, ForwardFacts
from kernel_agent.pairs.spec import Dim, KernelSpec, ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


@dataclass(frozen=True)
class Limit:
    """How large an entry may be."""

    elements: int
    """Of all tensor arguments."""
    volume: int
    """See `fit.volume`."""


SMALL, LARGE = Limit(1 << 16, 1 << 18), Limit(1 << 19, 1 << 27)
"""Of the first entry that is tried, and of those tried where it shows little."""
UNSEEN = 1 << 22
"""Volume up to which arguments that cannot be made without contents are made with them, to learn their sizes."""
TRIES = 3
"""Entries that are run at most."""


def analysed(call: Call) -> None:
    """Payload: `spec`. Sends the launches as a `ForwardFacts`, then another one with the derivative added."""
    with answered(call):
        start = time.perf_counter()
        stub = load(call)
        facts, entry = _forward_facts(stub)
        call.send({"facts": facts.model_copy(update={"seconds": time.perf_counter() - start}).model_dump(mode="json")})
        derivative, notes = _derivative(stub, entry)
        call.send(
            {
                "facts": facts.model_copy(
                    update={
                        "derivative": derivative,
                        "notes": (*facts.notes, *notes),
                        "seconds": time.perf_counter() - start,
                    }
                ).model_dump(mode="json")
            }
        )


def _forward_facts(stub: Stub) -> tuple[ForwardFacts, ShapeEntry | None]:
    """Facts without the derivative, and the entry they were seen at."""
    seen: dict[str, Look] = {}
    said = ""
    for entry in itertools.islice(_entries(stub), TRIES):
        try:
            look = Look(entry, _watched(stub, entry))
        except Exception as error:  # the user's code, or a kernel that cannot be executed: nothing can be told of it
            said = said or first_line(error)
            continue
        seen[entry.label] = look
        if look.shows_all:
            break
    if not seen:
        return ForwardFacts(launches=(), notes=(f"the forward could not be followed: {said or 'no entry'}",)), None
    look = _spread(stub, max(seen.values(), key=lambda one: one.score))
    told = _told(stub, look)
    others = {label: _told(stub, other) for label, other in seen.items() if label != look.entry.label}
    facts = ForwardFacts(
        entry=look.entry.label, launches=told.launches, crossing=told.sentences(others), notes=told.notes
    )
    return facts, look.entry


@dataclass(frozen=True)
class Look:
    """One entry, and what was seen there."""

    entry: ShapeEntry
    watched: Watched

    @property
    def shows(self) -> list[bool]:
        """Axes of grids with several programs, loops with several trips, dims of several: else little shows."""
        axes = [size > 1 for seen in self.watched.launches for size in seen.given.grid]
        trips = [bool((counts > 1).any()) for seen in self.watched.launches for counts in seen.trips.values()]
        return axes + trips + [value > 1 for value in self.entry.dims.values() if type(value) is int]

    @property
    def score(self) -> int:
        """How much shows."""
        return sum(self.shows)

    @property
    def shows_all(self) -> bool:
        """Whether another entry could not show more."""
        return all(self.shows)


def _told(stub: Stub, look: Look) -> Told:
    return tell(
        look.watched,
        dims_of(look.entry, lambda other: _given(stub, other)),
        stub.spec.grads,
        [fact.name for fact in stub.spec.outputs],
    )


def _watched(stub: Stub, entry: ShapeEntry) -> Watched:
    with standin():
        args, kwargs = arguments_at(stub, Point(entry=entry))
        return watch(stub.function, args, kwargs)


def _given(stub: Stub, entry: ShapeEntry) -> tuple[Given, ...]:
    with standin():
        args, kwargs = arguments_at(stub, Point(entry=entry))
        return shapes_only(stub.function, args, kwargs)


def _spread(stub: Stub, look: Look) -> Look:
    """The entry with dims multiplied until axes of grids that had one program have several, where that can be had."""
    entry = larger = look.entry
    before = [seen.given.grid for seen in look.watched.launches]
    for name, value in entry.dims.items():
        if type(value) is not int or value < 2:
            continue
        for factor in (2, 4, 8, 16):
            other = larger.model_copy(update={"dims": {**larger.dims, name: factor * value}})
            if volume(other) > LARGE.volume:
                break
            try:
                grids = [given.grid for given in _given(stub, other)]
            except Exception:  # a size that the stub refuses
                continue
            if len(grids) == len(before) and any(
                now > 1 and then == 1
                for new, old in zip(grids, before, strict=True)
                for now, then in zip(new, old, strict=False)
            ):
                larger = other
                break
    if larger is entry:
        return look
    try:
        found = Look(larger, _watched(stub, larger))
    except Exception:  # larger than the stub or the executor takes: the smaller entry tells less, and is right
        return look
    return max(look, found, key=lambda one: one.score)


def _entries(stub: Stub) -> Iterator[ShapeEntry]:
    """The smallest entry, then larger ones from the largest down, all made small enough; each once."""

    def fitted(limit: Limit) -> list[ShapeEntry]:
        fits = [
            fit_entry(
                _with_few(asked),
                lambda entry: _sizes(stub, entry),
                max_elements=limit.elements,
                max_volume=limit.volume,
            )
            for asked in stub.spec.sweep
        ]
        return sorted((fit.entry for fit in fits if not fit.refusal), key=volume)

    told: set[str] = set()
    for limit in (SMALL, LARGE):
        found = fitted(limit)
        for entry in found[:1] if limit is SMALL else reversed(found):
            if entry.label not in told:
                told.add(entry.label)
                yield entry


def _sizes(stub: Stub, entry: ShapeEntry) -> Arguments:
    """Arguments of the right sizes, without contents where make_args can do without."""
    try:
        return shapes_of(stub.module, entry)
    except NeedsValues:
        if volume(entry) > UNSEEN:
            raise
    with standin():
        return build_arguments(stub.module, entry, device="cpu", seed=0)


def _with_few(entry: ShapeEntry) -> ShapeEntry:
    """The entry with its counts (batch, heads) divided by what leaves two of the fewest: lengths shall stay long."""
    counts = {name: value for name, value in entry.dims.items() if type(value) is int and 2 <= value <= COUNT}
    factor = min(counts.values(), default=2) // 2
    if factor < 2 or any(value % factor for value in counts.values()):
        return entry
    return entry.model_copy(update={"dims": {**entry.dims, **{name: n // factor for name, n in counts.items()}}})


def _derivative(stub: Stub, seen: ShapeEntry | None) -> tuple[Derivative | None, tuple[str, ...]]:
    """The derivative of the reference, or of what stands for the intended gradient; else why there is none."""
    spec = stub.spec
    name = "surrogate" if spec.custom_gradient else "reference"
    function = getattr(stub.module, name, None)
    if function is None:
        return None, ("no derivative is shown: the file has no `reference` in PyTorch",)
    if not spec.grads:
        return None, ()
    source = DerivativeSource.SURROGATE if spec.custom_gradient else DerivativeSource.REFERENCE
    said = ""
    for entry in _small_entries(spec, seen):
        try:
            found = _derived(stub, function, entry)
        except Exception as error:  # the user's code, at sizes of our choice
            said = said or first_line(error)
            continue
        return Derivative(source=source, lines=resolved(found, _again(stub, function, entry, found))), ()
    return None, (f"no derivative is shown: `{name}` cannot be followed: {said}",)


def _again(stub: Stub, function: Callable[..., Any], entry: ShapeEntry, found: Derivation) -> Derivation | None:
    """The derivative at a call with every dim changed, where constants are left to be told apart."""
    if not found.constants:
        return None
    divided = _divided(stub.spec)
    for first, second in ((2, 3), (3, 2), (2, 2)):
        factors = dict(zip(entry.dims, itertools.cycle((first, second)), strict=False))
        for name, divisor in divided:
            factors[name] = math.lcm(factors[name], factors[divisor])
        dims = {name: value * factors[name] if type(value) is int else value for name, value in entry.dims.items()}
        other = entry.model_copy(update={"dims": dims})
        try:
            if volume(other) <= LARGE.volume:
                return _derived(stub, function, other)
        except Exception:  # sizes that the function refuses
            continue
    return None


def _divided(spec: KernelSpec) -> tuple[tuple[str, str], ...]:
    """Pairs of dims of which the first is a multiple of the second at every entry, such as heads of groups."""
    whole = [name for name, value in spec.sweep[0].dims.items() if type(value) is int]
    entries = [entry.dims for entry in spec.sweep]

    def divides(name: str, divisor: str) -> bool:
        pairs = [(dims.get(name), dims.get(divisor)) for dims in entries]
        known = [(a, b) for a, b in pairs if type(a) is int and type(b) is int and b > 0]
        return len(known) == len(pairs) and all(a % b == 0 for a, b in known) and any(1 < b < a for a, b in known)

    return tuple((a, b) for a in whole for b in whole if a != b and divides(a, b))


def _derived(stub: Stub, function: Callable[..., Any], entry: ShapeEntry) -> Derivation:
    """Lines at one entry, in float64 or, where the function does not take that, in the dtypes of the arguments."""
    args, kwargs = arguments_at(stub, Point(entry=entry))
    names = [fact.name for fact in stub.spec.inputs][: len(args)]
    places = stub.leaves(args, kwargs)
    sizes = {name: value for name, value in entry.dims.items() if type(value) is int}
    wanted = {place: fact.name for place, fact in enumerate(stub.spec.outputs) if fact.needs_grad}
    try:
        return derive(function, leaf_call(args, kwargs, places), names, sizes, wanted)
    except Exception:  # what it raises with arguments of their own dtypes is the better reason
        return derive(function, leaf_call(args, kwargs, places, None), names, sizes, wanted)


_DISTINCT = (6, 22, 26, 34, 38, 58, 62, 82)
"""Even sizes, no products of each other, next to no half of another, whose inverses nobody writes: a number says which
dim it is."""


def _small_entries(spec: KernelSpec, seen: ShapeEntry | None) -> Iterator[ShapeEntry]:
    """Entries to trace at: dims all different and small, then the same from other entries, then what was seen."""
    listed = [*([seen] if seen else []), *sorted(spec.sweep, key=volume)]
    divided = _divided(spec)
    for entry in listed[:3]:
        yield from (entry.model_copy(update={"dims": _distinct(entry, counts=counts)}) for counts in (True, False))
        if divided:
            yield entry.model_copy(update={"dims": _multiples(_distinct(entry, counts=True), divided)})
    yield from (entry for entry in listed[:2] if volume(entry) <= SMALL.volume)


def _multiples(dims: dict[str, Dim], divided: tuple[tuple[str, str], ...]) -> dict[str, Dim]:
    """Dims with those that have to be multiples of others made so, still all different."""
    for name, divisor in divided:
        value, by = dims[name], dims[divisor]
        if type(value) is int and type(by) is int and (by > 1 and (value % by or value == by)):
            others = {other for key, other in dims.items() if key != name}  # nor is the quotient to be taken for one
            dims[name] = next(by * f for f in itertools.count(3) if f not in others and by * f not in others)
    return dims


def _distinct(entry: ShapeEntry, *, counts: bool) -> dict[str, Dim]:
    """Dims with small sizes of their own, with `counts` also those that are counts; factors that no number equals."""
    small = {name: value for name, value in entry.dims.items() if type(value) is int and value <= COUNT // 2}
    taken: set[int] = set()
    for name, value in small.items():
        while counts and value > 1 and value in taken:
            value += 1
        taken.add(value)
        small[name] = value
    lengths = {name: value for name, value in entry.dims.items() if type(value) is int and name not in small}
    pool = (size for size in _DISTINCT if size not in taken)
    # the longest is often a loop of the reference: it gets the smallest size
    sizes = {name: next(pool, value) for name, value in sorted(lengths.items(), key=lambda item: -item[1])}
    factors = {name: value * 1.0137 for name, value in entry.dims.items() if isinstance(value, float)}
    return {**entry.dims, **small, **sizes, **factors}
