"""`Apart`: proofs that two stores of a program cannot meet, by the linear forms of their offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kernel_agent.compiler.reverse.behind import behind
from kernel_agent.compiler.reverse.columns import Offsets, columns_apart
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim, Rising
from kernel_agent.compiler.schedule.coverage import domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import Injectivity, injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.mirror import mirrored, reversed_axes
from kernel_agent.compiler.schedule.ownership import Common, write_of
from kernel_agent.compiler.schedule.polynomial import Monomial, Polynomial
from kernel_agent.compiler.schedule.ranges import Write, in_ranges
from kernel_agent.compiler.schedule.regions import apart
from kernel_agent.compiler.schedule.sites import Bound, Site, below, negatives, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import made_in
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


class Apart:
    """Of the stores of one kernel; whatever its constexprs are."""

    def __init__(self, kernel: Kernel, calls: Calls | None = None) -> None:
        """`calls`: launches that were seen. What holds in all of them is relied on, and noted in `facts`."""
        self.calls = calls or Calls()
        self.facts: dict[str, None] = {}
        # Numbers that fall with the programs say nothing of how far apart lanes are; counted from the end they rise.
        rising = mirrored(kernel, reversed_axes(kernel))
        self.forms = Forms(rising, Launch.like_forward(3, self.calls))
        stores = [op for op in kernel.ops if op.code is Code.STORE]
        found = {site.op: site for site in sites(rising.body, frozenset((Code.STORE,)))}
        again = [op for op in rising.ops if op.code is Code.STORE]
        self.sites = {op: found[copy] for op, copy in zip(stores, again, strict=True)}

    def proved(self, one: Op, other: Op) -> bool:
        """Whether nothing in a program makes up for the distance between the offsets of two stores."""
        both = [self.sites[one], self.sites[other]]
        if self._out_of_step(both) or self._digits_of_one_number(both) or self._columns_apart(both):
            return True
        return self._one_behind_the_other(*both) or self._ranges_of_rows(both) or self._in_regions(*both)

    def tells_trips(self, store: Op, *, strided: bool = False) -> bool:
        """Whether a program stores to no element twice at one place, whatever trip and lane it is of.

        `strided`: sizes and strides are taken to be at least 1, with others the forward itself would lose what it
        stores.
        """
        return self._digits_of_one_number([self.sites[store]], strided=strided)

    def _out_of_step(self, both: list[Site]) -> bool:
        """Whether the distance is no multiple of what all strides are multiples of: of 2 i and 2 j + 1."""
        if not self._alike_for_the_program(both):
            return False
        first, second = (self._in_program(self.forms.of(site.op.offset)) for site in both)
        strides = [count for form in (first, second) for _, factor in form.terms for _, count in factor.terms]
        distance = (second - first).base
        strides += [count for symbols, count in distance.terms if symbols]
        fixed = sum(count for symbols, count in distance.terms if not symbols)
        return bool(strides) and fixed % math.gcd(*strides) != 0

    def _columns_apart(self, both: list[Site]) -> bool:
        """Whether the stores have columns of their own in rows of one stride."""
        if not self._alike_for_the_program(both):
            return False
        found = []
        for site in both:
            known = tuple(bound for part in negatives(self.forms, site) for bound in below(part))
            found.append(Offsets(self._in_program(self.forms.of(site.op.offset)), known))
        return columns_apart(*found)

    def _one_behind_the_other(self, one: Site, other: Site) -> bool:
        """Whether a store begins where the loop of the other has ended."""
        atoms = [atom for site in (one, other) for atom, _ in self.forms.of(site.op.offset).terms]
        changing = frozenset(atom for atom in atoms if not _is_fixed(atom))
        return behind(self.forms, other, one, changing) or behind(self.forms, one, other, changing)

    def _digits_of_one_number(self, both: list[Site], *, strided: bool = False) -> bool:
        """Whether an offset tells which of the stores it is of, the lane and the trip, as a number tells its digits."""
        common = Common.of(self.forms, both)
        if common is None or any(loop.code is Code.WHILE for site in both for loop in site.loops):
            return False
        needed = frozenset(atom for atom in domain(self.forms, both[0]) if not _is_fixed(atom))
        # Indices of the program are as good as numbers, unless a mask bounds them together with others.
        told = {
            atom
            for bound in common.bounds
            for atom in bound.form.coefficients
            if not needed.isdisjoint(bound.form.coefficients)
        }
        for kept in (frozenset(told), frozenset[Atom]()):
            bounds = [
                b for b in common.bounds if all(atom in kept or not _is_fixed(atom) for atom in b.form.coefficients)
            ]
            found = injective(self._in_program(common.form, kept), bounds, needed | common.copies, self.calls)
            facts = [] if found is None or _holds_where_stored(found, bounds, strided=strided) else found.facts()
            if found is not None and (not facts or self.calls.show(facts)):
                self.facts |= dict.fromkeys(facts)
                return True
        return False

    def _ranges_of_rows(self, both: list[Site]) -> bool:
        """Whether each store has columns of its own."""
        if any(loop.code is Code.WHILE for site in both for loop in site.loops) or not self._alike_for_the_program(
            both
        ):
            return False
        writes = [write_of(self.forms, site) for site in both]
        changing = {atom for write in writes for atom in write.needed if not _is_fixed(atom)}
        told = {a for w in writes for b in w.bounds for a in b.form.coefficients if changing & set(b.form.coefficients)}
        for kept in (frozenset(told), frozenset[Atom]()):
            inside = [
                Write(
                    self._in_program(write.form, kept),
                    tuple(b for b in write.bounds if all(a in kept or not _is_fixed(a) for a in b.form.coefficients)),
                    frozenset(atom for atom in write.needed if not _is_fixed(atom)),
                )
                for write in writes
            ]
            found = in_ranges(inside, self.calls)
            facts = found.facts() if found is not None else []
            if found is not None and (not facts or self.calls.show(facts)):
                self.facts |= dict.fromkeys(facts)
                return True
        return False

    def _in_regions(self, one: Site, other: Site) -> bool:
        """Whether no program stores at one place where any does at the other, as to planes in orders of their own."""
        found = apart(self.forms, one, other)
        facts = [] if found is None else found.facts()
        if found is None or (facts and not self.calls.show(facts)):
            return False
        self.facts |= dict.fromkeys(facts)
        return True

    def _alike_for_the_program(self, both: list[Site]) -> bool:
        """Whether indices that a program does not change are in both offsets alike, so that the distance has none."""
        first, second = (self.forms.of(site.op.offset) for site in both)
        return not any(_is_fixed(atom) for atom, _ in (second - first).terms)

    def _in_program(self, form: Form, kept: frozenset[Atom] = frozenset()) -> Form:
        """What of a form changes within a program, and indices that are kept."""
        return Form.of({atom: factor for atom, factor in form.terms if atom in kept or not _is_fixed(atom)}, form.base)


def _holds_where_stored(found: Injectivity, bounds: Sequence[Bound], *, strided: bool) -> bool:
    """Whether a proof leaves nothing open once what indices are below is at least 1: else nothing is stored.
    `strided`: once all numbers are."""
    ends = {bound.below for bound in bounds}

    def proved(claim: Claim | Rising) -> bool:
        if isinstance(claim, Rising):
            return False
        terms: dict[Monomial, int] = {}
        for monomial, number in (claim.left - claim.right).terms:
            told = tuple(
                replace(one, positive=strided or one.positive or Polynomial.symbol(one.text) in ends)
                for one in monomial
            )
            terms[told] = number
        return Polynomial.of(terms).surely(0)

    return all(map(proved, found.claims)) and any(all(map(proved, order)) for order in found.orders)


def _is_fixed(atom: Atom) -> bool:
    """Whether an index is the same for all that a program does."""
    if atom.kind is Kind.OPAQUE and not atom.reads:
        return True
    return all(source.kind is Kind.PROGRAM for source in atom.sources)


def depends_on(value: Value, block: Block) -> bool:
    """Whether a value is made from something that a block defines."""
    return value in made_in(block)
