"""`Picks`: additions to tiles that the trips of a loop pick, as only memory says: the blocks of keys of a sparse row.

How many trips there are memory says as well. That the number of the tile is all that such an address depends on,
beside programs and lanes, shows here; who picks which tile a launch of the backward has to find (see `picklist`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.polynomial import ZERO, Polynomial, ceiling
from kernel_agent.compiler.schedule.sites import Site, negatives, sites
from kernel_agent.compiler.schedule.spans import Span, span
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import computed_of
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXES = 3
"""Of a grid."""


@dataclass(frozen=True)
class Picks:
    """What one loop of a kernel adds to, tile by tile."""

    forms: Forms
    added: tuple[Site, ...]
    """All in the loop's own straight code."""
    loop: Op
    number: Value
    """Of the tile that a trip picks."""
    count: Polynomial
    """Tiles: of a number that is no less nothing is added to."""
    signed: bool
    """Whether something may be added to one of a number below 0, which is no tile; then the backward has to ask."""
    span: Span | None
    """None: a trip adds to all rows of the tile that it picks. Else the number is that of its first row, and tiles have
    as many rows as a trip."""
    kept: tuple[int, ...]
    """Axes of the grid that addresses depend on."""
    summed: tuple[int, ...]
    """The others."""
    rows: Polynomial = ZERO
    """Of the gradients, where a trip has a span of these."""
    facts: tuple[str, ...] = ()
    """By which that is so."""

    @property
    def known(self) -> Value:
        """What owners know of a trip: the number of the tile, or the rows."""
        return self.number if self.span is None else self.span.indices

    @property
    def met(self) -> int:
        """Tiles that a trip may meet."""
        return 1 if self.span is None else 2

    @property
    def conditions(self) -> tuple[tuple[Value, bool], ...]:
        """Under which the loop runs."""
        return self.added[0].conditions


def picks(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> Picks:
    """The additions of a kernel, all of which must be to such tiles of the `gradients`. Raises DoesNotApply where no
    trips pick tiles, CannotDerive where it is not known which."""
    added = sites(kernel.body, WRITES)
    first = added[0]
    if any(site.op.code is not Code.ATOMIC_ADD for site in added) or any(
        site.block is not first.block for site in added
    ):
        raise DoesNotApply("what is added to is not all added to in one loop")
    if len(first.loops) != 1 or first.block not in first.loops[0].blocks or first.loops[0].code is not Code.FOR:
        raise DoesNotApply("what is added to is not added to in every trip of one loop")
    forms = Forms(kernel, launch)
    (loop,) = first.loops
    extent = forms.trip(loop).extent
    if extent is not None and extent.printable:
        raise DoesNotApply("its trips are counted before the launch")
    try:
        found = _tiles(forms, added, loop)
    except CannotDerive as reason:
        try:
            found = _spans(forms, added, loop, list(gradients))
        except CannotDerive:
            raise reason from None
    if launch.calls.refute(found.facts):
        raise CannotDerive("its rows do not lie one behind the other, as those of `.contiguous()` do")
    if found.signed and not launch.calls.typical:
        raise CannotDerive(
            f"a later call may pick what is no tile: no mask asks for `{_named(found.number)} >= 0` where it is loaded"
        )
    if len(found.kept) >= AXES:
        raise CannotDerive("it would need a grid of more than three axes")
    return found


def _tiles(forms: Forms, added: Sequence[Site], loop: Op) -> Picks:
    """Trips that add to a tile of some number each."""
    numbers = {_number(forms, site, loop) for site in added}
    counts = {_count(forms, site, numbers) for site in added}
    if len(numbers) != 1 or len(counts) != 1:
        raise CannotDerive("a trip picks several tiles: it would have to load the number of one alone")
    (number,), (count,) = numbers, counts
    signed = not all(_not_negative(forms, site, number) for site in added)
    return Picks(forms, tuple(added), loop, number, count, signed, None, *_axes(forms, added, number))


def _spans(forms: Forms, added: Sequence[Site], loop: Op, tensors: Sequence[str]) -> Picks:
    """Trips that add to rows from some one on."""
    found = span(forms, added, loop)
    width, first = found.width.text(), tensors[0]
    rows = Polynomial.symbol(f"({first}.numel() // ({width}))")
    facts = [f"{tensor}.is_contiguous()" for tensor in tensors]
    facts += [f"{first}.numel() % ({width}) == 0", *(f"{one}.numel() == {first}.numel()" for one in tensors[1:])]
    facts += found.facts
    count, axes = ceiling(rows, found.size), _axes(forms, added, found.indices)
    return Picks(forms, tuple(added), loop, found.start, count, True, found, *axes, rows, tuple(facts))


def _axes(forms: Forms, added: Sequence[Site], known: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of the grid that addresses depend on, beside what owners know, and the others."""
    sliced = [part.producer for site in added for part in beside(known, site.op.offset)]
    read = {op.attributes["axis"] for op in sliced if op is not None and op.code is Code.PROGRAM_ID}
    axes = range(len(forms.launch.grid))
    return tuple(axis for axis in axes if axis in read), tuple(axis for axis in axes if axis not in read)


def beside(known: Value, value: Value) -> Iterator[Value]:
    """All that a value is computed of beside what is known."""
    parts = computed_of(value, down_to=lambda part: part is known)
    return (part for part in parts if part is not known)


def _number(forms: Forms, site: Site, loop: Op) -> Value:
    """The number that a trip picks a tile by: all of an address that is neither program nor lane."""
    address = forms.of(site.op.offset)
    others = [atom for atom, _ in address.terms if atom.kind not in (Kind.PROGRAM, Kind.LANE)]
    if len(others) != 1 or others[0].kind is not Kind.OPAQUE:
        raise DoesNotApply("its addresses do not depend on one number that memory has")
    found = next((value for value in _results(loop) if value.id == others[0].number), None)
    if found is None or found.shape or found.element not in ("i32", "i64"):
        raise DoesNotApply("the number that its addresses depend on is not that of a tile")
    return found


def _results(loop: Op) -> Iterator[Value]:
    """Of the loop's own straight code."""
    for op in loop.blocks[0].ops:
        yield from op.results


def _count(forms: Forms, site: Site, numbers: set[Value]) -> Polynomial:
    """How many tiles there are, as the mask says: where `number * size + lane < limit`, it is less than `limit / size`,
    rounded up."""
    ids = {value.id for value in numbers}
    for negative in negatives(forms, site):
        for atom, size in negative.terms:
            rest = Form(tuple(term for term in negative.terms if term[0] is not atom))
            if atom.kind is Kind.OPAQUE and atom.number in ids and size.surely(1) and rest.rises:
                count = ceiling(-negative.base, size)
                if count.printable:
                    return count
    one = _named(next(iter(numbers)))
    raise CannotDerive(
        "no mask of what is loaded says how many tiles there are: "
        f"ask for `{one} < tiles`, or `{one} * size + lane < rows`"
    )


def _named(number: Value) -> str:
    """The number of a tile, as the forward calls it."""
    return number.name or "tile"


def _not_negative(forms: Forms, site: Site, number: Value) -> bool:
    """Whether the mask says that the number of a tile is at least 0."""
    for negative in negatives(forms, site):
        if len(negative.terms) == 1:
            ((atom, factor),) = negative.terms
            mine = atom.kind is Kind.OPAQUE and atom.number == number.id
            if mine and (-factor).surely(1) and (negative.base - factor).surely(0):
                return True
    return False
