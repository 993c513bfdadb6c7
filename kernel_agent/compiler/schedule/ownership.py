"""`owned`: gradients that each program adds atomically, stored instead where no element is added to twice.

A store needs no zeros before it, can have the narrow element of the input, and gives the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kernel_agent.compiler.plan import Axis, Census, Fact
from kernel_agent.compiler.schedule.alone import programs_apart
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.census import census_of
from kernel_agent.compiler.schedule.coverage import Coverage, coverage, domain, stored_axes
from kernel_agent.compiler.schedule.floors import Floors, begun
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import Injectivity, injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.ranges import Write, in_ranges
from kernel_agent.compiler.schedule.segments import Segment, segments
from kernel_agent.compiler.schedule.sheared import shear_of
from kernel_agent.compiler.schedule.sites import Bound, Site, bounds, sites
from kernel_agent.compiler.schedule.widen import widened
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.later import Later

WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC))


@dataclass(frozen=True)
class Ownership:
    """A kernel whose atomic additions have become stores where that is right."""

    kernel: Kernel
    empty_if: dict[str, str] = field(default_factory=dict)
    """Gradient arguments that are stored to, once for every element that gets a gradient; they have the input's
    element. With each the expression under which that is every element there is; empty: not known."""
    facts: tuple[Fact, ...] = ()
    """What must hold for that."""
    remarks: tuple[str, ...] = ()
    """Why others are left atomic."""
    alone: frozenset[str] = frozenset()
    """Gradient arguments that are left atomic, though each element is added to by one program: see `alone`."""
    axes: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    """What of each gradient is stored to where `empty_if` holds; empty: not known."""
    censuses: tuple[Census, ...] = ()
    """Launches that have to find some of that right."""
    counts: dict[str, Coverage] = field(default_factory=dict)
    """Of gradients that are stored to, what stores reach; those of which that is not known are not there."""
    later: tuple[Later, ...] = ()
    """Launches behind that add to what is stored."""


def owned(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> Ownership:
    """Stores for atomic additions.

    `gradients`: by name of the input's argument the name of its gradient's. An axis of the grid that the kernel does
    not read must have one program.
    """
    wide = widened(kernel, gradients, launch, lambda forms, added: not isinstance(proof(forms, added), str))
    kernel, forms = wide.kernel, Forms(wide.kernel, launch)
    written: dict[str, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base.name, []).append(site)
    stored: dict[str, str] = {}
    empty_if: dict[str, str] = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    facts: dict[Fact, None] = dict.fromkeys(wide.facts)
    remarks: list[str] = []
    alone: set[str] = set()
    censuses: list[Census] = []
    counts: dict[str, Coverage] = {}
    unread = unread_axes(kernel, launch)
    if launch.calls.refute(fact.expression for fact in unread):
        return Ownership(kernel, remarks=("programs along an axis that the kernel does not read do the same work",))
    for tensor, name in gradients.items():
        source = kernel.argument(tensor)
        if not source.is_pointer:
            continue  # of a scalar, which all programs add to
        where = forms
        found = proof(forms, written.get(name, []))
        later = begun(forms, written.get(name, [])) if isinstance(found, str) else None
        if later is not None and not isinstance(above := proof(later, written[name]), str):
            found, where = above, later
        apart = programs_apart(forms, written.get(name, [])) if isinstance(found, str) else None
        if apart is not None:
            alone.add(name)
            reason = f"each element of {name} has one program"
            facts.update(dict.fromkeys(Fact(text, reason, tensor) for text in apart.facts()))
            facts.update(dict.fromkeys(unread))
            continue
        census = census_of(forms, written.get(name, []), tensor, name) if isinstance(found, str) else None
        if census is not None:
            stored[name], empty_if[name], axes[name] = source.pointee, census.whole, ()
            censuses.append(census)
            remarks.append(
                f"no two programs are taken to share a row of {name}, as in the calls of SWEEP: "
                "the backward counts them, and raises where they do"
            )
            facts.update(dict.fromkeys((*census.facts, *unread)))
            continue
        if isinstance(found, str):
            remarks.append(f"{name} stays atomic: {found}")
            continue
        stored[name] = source.pointee
        reason = once_stored(name)
        facts.update(dict.fromkeys(Fact(text, reason, tensor) for text in found.facts()))
        facts.update(dict.fromkeys(unread))
        reached = coverage(where, written[name])
        empty_if[name] = "" if reached is None else reached.condition(tensor)
        if reached is not None:
            counts[name] = reached
        axes[name] = stored_axes(where, written[name]) if empty_if[name] else ()
    return Ownership(
        _stores(kernel, stored), empty_if, tuple(facts), tuple(remarks), frozenset(alone), axes, tuple(censuses), counts
    )


def once_stored(name: str) -> str:
    """Why a gradient's store asks for what `proof` leaves to check."""
    return f"each element of {name} is stored once"


def proof(forms: Forms, written: Sequence[Site]) -> Injectivity | str:
    """That no element is written twice by all writes to one buffer together, or why that is not known."""
    if not written:
        return "nothing is added to it"
    if any(site.op.code is not Code.ATOMIC_ADD for site in written):
        return "it is not only added to"
    if any(loop.code is Code.WHILE for site in written for loop in site.loops):
        return "it is added to in a while loop"
    common = Common.of(forms, written)
    if common is None:
        ranges = in_ranges([write_of(forms, site) for site in written], forms.launch.calls)
        return ranges or "it is added to in several places whose elements may be the same"
    needed = domain(forms, written[0])
    missing = [atom for atom in needed if atom not in common.form.sources]
    if missing:
        return f"{_words(missing)} add to the same elements"
    ways = dict.fromkeys((common, common.above(Floors.of(forms, written))), needed)
    shear = shear_of(forms, written[0]) if len(written) == 1 else None
    if shear is not None:
        ways[replace(common, form=shear.form(common.form), bounds=shear.bounds)] = shear.told(needed)
    proofs = [one for way, told in ways.items() if (one := way.proof(told, forms.launch.calls)) is not None]
    found = min(proofs, key=lambda one: len(one.facts()), default=None)
    if found is None:
        return "its addresses may overlap, or are read from memory"
    return found


def unread_axes(kernel: Kernel, launch: Launch) -> list[Fact]:
    """Programs along an axis that nothing depends on would all do the same work again."""
    read = {op.attributes["axis"] for op in kernel.ops if op.code is Code.PROGRAM_ID}
    reason = "programs along an axis that the kernel does not read all write the same"
    unread = [extent for axis, extent in enumerate(launch.grid) if axis not in read and extent != ONE]
    return [Fact(f"{extent.text()} == 1", reason) for extent in unread]


def write_of(forms: Forms, site: Site) -> Write:
    """One of several writes, for `in_ranges`."""
    return Write(forms.of(site.op.offset), tuple(bounds(forms, site, likely=True)), domain(forms, site))


@dataclass(frozen=True)
class Common:
    """Several writes as one with more indices, as if loops had been unrolled."""

    form: Form
    bounds: tuple[Bound, ...]
    """What holds at all of them."""
    copies: frozenset[Atom]
    """These indices, if there are several writes."""
    within: tuple[Segment, ...]
    """Segments that all of them are in."""

    @classmethod
    def alone(cls, forms: Forms, site: Site) -> Common:
        """Of one write."""
        bounded = tuple(bounds(forms, site, likely=True))
        return cls(forms.of(site.op.offset), bounded, frozenset(), segments(forms, site))

    def proof(self, needed: frozenset[Atom], calls: Calls) -> Injectivity | None:
        """That no element is written twice."""
        return injective(self.form, self.bounds, needed | self.copies, calls, within=self.within)

    def above(self, floors: Floors) -> Common:
        """The same of indices that are counted from where they begin."""
        if (
            not (floors.least or floors.sums)
            or self.within
            or not floors.suit((self.form, *(bound.form for bound in self.bounds)))
        ):
            return self
        return replace(
            self, form=floors.form(self.form), bounds=tuple(floors.bound(floors.width(bound)) for bound in self.bounds)
        )

    @classmethod
    def of(cls, forms: Forms, written: Sequence[Site]) -> Common | None:
        """None where the addresses differ by more than sums of a few distances."""
        first = written[0]
        if len(written) == 1:
            return cls.alone(forms, first)
        places = [forms.of(site.op.offset) for site in written]
        shared = [bounds(forms, site, likely=True) for site in written]
        kept = tuple(bound for bound in shared[0] if all(bound in others for others in shared))
        inside = [segments(forms, site) for site in written]
        within = tuple(one for one in inside[0] if all(one in others for others in inside))
        if any(site.loops != first.loops or site.op.offset.shape != first.op.offset.shape for site in written):
            return None
        found = None
        for lowest in places:
            distances = [place - lowest for place in places]
            if any(distance.terms for distance in distances):
                return None
            for copies in _grids([distance.base for distance in distances]):
                found = cls(lowest + Form.of(copies), kept, frozenset(copies), within)
                if all(count > 0 for step in copies.values() for _, count in step.terms):
                    return found  # sizes are not negative: these count up
        return found


def _grids(distances: Sequence[Polynomial]) -> Iterator[dict[Atom, Polynomial]]:
    """Steps of which each distance is another sum, none taken a negative number of times: one step, or one for every
    product of symbols, as of the rows and columns of a window."""
    for step in dict.fromkeys(distance for distance in distances if distance.terms):
        steps = [_count(distance, step) for distance in distances]
        whole = {number for number in steps if number is not None and number >= 0}
        if len(whole) == len(distances):
            yield {Atom(Kind.COPY, 0, extent=Polynomial.integer(max(whole) + 1)): step}
    monomials = sorted({monomial for distance in distances for monomial, _ in distance.terms})
    counts = [[dict(distance.terms).get(monomial, 0) for distance in distances] for monomial in monomials]
    places = set(zip(*counts, strict=True))
    if len(monomials) > 1 and len(places) == len(distances) and all(min(some) >= 0 for some in counts):
        found = {}
        for number, (monomial, some) in enumerate(zip(monomials, counts, strict=True)):
            unit = math.gcd(*some)
            extent = Polynomial.integer(max(some) // unit + 1)
            found[Atom(Kind.COPY, number, extent=extent)] = Polynomial.of({monomial: unit})
        yield found


def _count(distance: Polynomial, step: Polynomial) -> int | None:
    """How many steps a distance is."""
    found = distance.quotient(step)
    return None if found is None else found.number


def _words(missing: Sequence[Atom]) -> str:
    """What adds to the same elements."""
    kinds = {atom.kind for atom in missing}
    if Kind.PROGRAM in kinds:
        axes = " and ".join(str(atom.number) for atom in sorted(missing, key=lambda a: a.key) if not atom.kind)
        return f"all programs along axis {axes}"
    return "all trips of a loop" if Kind.TRIP in kinds else "all lanes of a tile"


def _stores(kernel: Kernel, stored: Mapping[str, str]) -> Kernel:
    """The kernel with stores to the named arguments, in their new elements."""
    if not stored:
        return kernel
    changed = {v: Value(f"*{stored[v.name]}", (), v.name) for v in kernel.arguments if v.name in stored}
    return _Storer(kernel, changed).copy()


class _Storer(Copier):
    """Stores for additions to some arguments."""

    def __init__(self, source: Kernel, changed: Mapping[Value, Value]) -> None:
        empty = emptied(source, arguments=[changed.get(value, value) for value in source.arguments])
        super().__init__(source, Builder(empty))
        self.b.written = frozenset(changed.get(value, value) for value in self.written)
        self.changed = changed
        for old, new in changed.items():
            self[old] = new

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or "base" not in op.attributes or op.base not in self.changed:
            super().effect(op)
            return
        base = self.changed[op.base]
        mask = None if op.mask is None else self[op.mask]
        self.b.store(base, self.whole(op.offset), self.b.cast(self[op.stored], base.pointee), mask)
