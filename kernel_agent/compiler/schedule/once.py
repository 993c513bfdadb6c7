"""`Once`: masks that hold where a condition held in any trip of a loop, and trips in which it can be counted.

A loop over the taps of a window adds to an element in the trips whose outputs there are, and notes that it did. One tap
has an output for every element, the last of a causal window, the one in the middle of a padded one: what its condition
says bounds what is stored to, whatever the others add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kernel_agent.compiler.schedule.claims import Claim
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, unspread

MOST_TRIPS = 4
"""Of each loop, that are tried."""


@dataclass(frozen=True, eq=False)
class Once:
    """A mask that holds wherever another one did in any trip."""

    mask: Value
    loops: tuple[Op, ...]
    """Whose trips; the outermost first."""

    def trips(self, forms: Forms) -> Iterator[tuple[dict[Atom, Polynomial], list[Claim]]]:
        """Trips that may show bounds that others do not, and what says that there are such trips."""
        atoms = [forms.trip(loop) for loop in self.loops]
        tried = [list(self._of_loop(forms, atom))[:MOST_TRIPS] for atom in atoms]
        for chosen in product(*tried):
            claims: list[Claim] = []
            for atom, trip in zip(atoms, chosen, strict=True):
                assert atom.extent is not None
                claims += [Claim(trip, ZERO), Claim(atom.extent, trip + ONE)]
            yield dict(zip(atoms, chosen, strict=True)), claims

    def _of_loop(self, forms: Forms, atom: Atom) -> Iterator[Polynomial]:
        """Trips in which a lower limit of other indices is 0."""
        if atom.extent is None:
            return
        found: dict[Polynomial, None] = {}
        for part in mask_forms(forms, self.mask):
            step = None if part is None else part.coefficients.get(atom)
            if part is None or step is None or step.number not in (1, -1):
                continue
            others = [-number for other, number in part.terms if other != atom]
            if others and all(number.surely(0) for number in others):
                found[(part.base + ONE) * -step] = None
        yield from found


def once(mask: Value) -> Iterator[Once]:
    """Conditions of which one trip is enough for a mask."""
    loops: list[Op] = []
    value, carry = unspread(mask), None
    while value.producer is not None and value.producer.code is Code.FOR:
        loop = value.producer
        place = loop.results.index(value)
        if carry is not None and unspread(loop.operands[3 + place]) is not carry:
            return
        loops.append(loop)
        value, carry = loop.blocks[0].yields[place], loop.blocks[0].arguments[1 + place]
    if carry is not None:
        parts = list(_any_of(value))
        if carry in parts:
            yield from (Once(part, tuple(loops)) for part in parts if part is not carry)


def _any_of(value: Value) -> Iterator[Value]:
    """Conditions of which each is enough."""
    op = value.producer
    if op is not None and op.code is Code.OR:
        for operand in op.operands:
            yield from _any_of(operand)
    else:
        yield value
