"""Gradients that each program adds to at its own elements, but more than once: sums in memory instead of atomics.

A row that several loops add to, or every trip of one, meets no other program. What is there is loaded, added to and
stored again; a barrier behind that keeps the threads of the program together.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.injective import Injectivity, injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, lanes
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.segments import segments
from kernel_agent.compiler.schedule.sites import Bound, Site, bounds
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op


def programs_apart(forms: Forms, written: Sequence[Site]) -> Injectivity | None:
    """That no two programs add to one element, and no two lanes in one addition; None where that is not known.

    Addresses of all places are seen as one form: indices of loops and lanes with the same coefficient are one index,
    and where a place does not have it, it is 0 there. What holds of all places tells the programs apart.
    """
    if not written or any(site.op.code is not Code.ATOMIC_ADD for site in written):
        return None
    numbers: dict[tuple[Polynomial, int], int] = {}
    places = [_Place(forms, site, numbers) for site in written]
    first = places[0]
    if any(place.fixed != first.fixed or not place.tells_lanes for place in places):
        return None
    extents: dict[Atom, Polynomial | None] = {}
    for place in places:
        for atom, _ in place.moving.terms:
            extents[atom] = atom.extent if extents.setdefault(atom, atom.extent) == atom.extent else None
    terms = first.fixed.coefficients
    for place in places:
        for atom, number in place.moving.terms:
            terms[Atom(atom.kind, atom.number, extent=extents[atom])] = number
    every = dict.fromkeys(bound for place in places for bound in place.bounds)
    kept = sorted((b for b in every if all(place.holds(b) for place in places)), key=lambda bound: -bound.size)
    common = [one for one in first.within if all(one in place.within for place in places)]
    read = {op.attributes["axis"] for op in forms.kernel.ops if op.code is Code.PROGRAM_ID}
    needed = frozenset(forms.program(axis) for axis in range(len(forms.launch.grid)) if axis in read)
    return injective(Form.of(terms, first.fixed.base), kept, needed, forms.launch.calls, within=common)


class _Place:
    """One addition, its own indices called by their coefficients."""

    def __init__(self, forms: Forms, site: Site, numbers: dict[tuple[Polynomial, int], int]) -> None:
        """`numbers`: of coefficients, by how many indices of a place had them before; grows."""
        address = forms.of(site.op.offset)
        own = [(atom, number) for atom, number in address.terms if atom.kind in (Kind.TRIP, Kind.LANE)]
        self.names: dict[Atom, Atom] = {}
        self.fixed = Form(tuple(term for term in address.terms if term not in own), address.base)
        """Programs and what is computed of them, and what is loaded."""
        taken: dict[Polynomial, int] = {}
        for atom, number in sorted(own, key=lambda term: term[0].key):
            taken[number] = taken.get(number, 0) + 1
            name = numbers.setdefault((number, taken[number]), 1 + len(numbers))
            self.names[atom] = Atom(Kind.COPY, name, extent=atom.extent)
        self.moving = Form.of({self.names[atom]: number for atom, number in own})
        self.tells_lanes = _tells_lanes(forms, site, address, {atom for atom, _ in own})
        self.bounds = [
            Bound(named, bound.below) for bound in bounds(forms, site) if (named := self._named(bound.form)) is not None
        ]
        self.within = [
            replace(segment, rest=named)
            for segment in segments(forms, site)
            if (named := self._named(segment.rest)) is not None
        ]

    def _named(self, form: Form) -> Form | None:
        """A form of indices of the address by their names; None where there are others."""
        terms = {}
        for atom, number in form.terms:
            if atom.kind in (Kind.TRIP, Kind.LANE) and atom not in self.names:
                return None
            terms[self.names.get(atom, atom)] = number
        return Form.of(terms, form.base)

    def holds(self, bound: Bound) -> bool:
        """Whether a bound holds here, where indices that the place does not have are 0."""
        has = set(self.names.values())
        terms = {atom: number for atom, number in bound.form.terms if atom.kind is not Kind.COPY or atom in has}
        return not terms or Bound(Form.of(terms), bound.below) in self.bounds


def _tells_lanes(forms: Forms, site: Site, address: Form, own: Set[Atom]) -> bool:
    """Whether no two lanes have one address: each is an index of it, or it is proved of what the address has of them.
    A remainder alone, as `lane % 3`, is the same for many."""
    needed = frozenset(lanes(site.op.offset.shape))
    if needed <= own:
        return True
    found = injective(address, bounds(forms, site), needed)
    return found is not None and not found.facts()


def summed_in_memory(kernel: Kernel, names: Set[str]) -> Kernel:
    """The kernel with loads and stores for atomic additions to some arguments."""
    return _Summer(kernel, names).copy() if names else kernel


class _Summer(Copier):
    """Loads, adds and stores."""

    def __init__(self, source: Kernel, names: Set[str]) -> None:
        super().__init__(source)
        self.names = names

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or op.code is not Code.ATOMIC_ADD or op.base.name not in self.names:
            super().effect(op)
            return
        b = self.b
        base, offset = self[op.base], self.whole(op.offset)
        mask = None if op.mask is None else self[op.mask]
        zero = None if mask is None else b.const(0.0, base.pointee)
        sum_so_far = b.load(base, offset, mask, zero)
        b.store(base, offset, b.add(sum_so_far, self[op.stored]), mask)
        b.add_op(Op(Code.BARRIER, (), ()))
