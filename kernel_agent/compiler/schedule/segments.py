"""`Segment`: a range of elements that begins and ends where memory says, as the rows of one sequence of a packed batch.

Between bounds that never fall, a place belongs to one segment: it tells which one, and how far from its begin it is.
That the bounds never fall is a fact, which the backward asks of their tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.schedule.claims import Rising
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.sites import Site, negatives
from kernel_agent.compiler.ssa.value import Op

_NEXT = Form(base=ONE)


@dataclass(frozen=True)
class Segment:
    """bounds[number] <= place < bounds[number + 1], wherever an operation takes part."""

    bounds: str
    """Tensor argument."""
    number: Form
    """Where its begin lies in that."""
    begin: Atom
    """What is loaded there, opaque."""
    end: Atom
    """What is loaded behind that."""
    rest: Form
    """From the begin to the place; not negative."""

    @property
    def place(self) -> Form:
        """begin + rest."""
        return Form.of({self.begin: ONE}) + self.rest

    @property
    def negative(self) -> Form:
        """Less than 0 at every place in the segment."""
        return self.place - Form.of({self.end: ONE})

    @property
    def atom(self) -> Atom:
        """The place as one index."""
        return Atom(Kind.PLACE, self.begin.number, self.place)


def segments(forms: Forms, site: Site) -> tuple[Segment, ...]:
    """The segments that an operation stays within, by its mask, loops and conditions."""
    found: dict[Segment, None] = {}
    known = negatives(forms, site)
    for negative in known:
        loads = [(atom, number, op) for atom, number in negative.terms if (op := forms.load(atom)) is not None]
        for begin, one, first in loads:
            for end, other, last in loads:
                if one != ONE or other != -ONE or not _follows(forms, first, last):
                    continue
                rest = negative - Form.of({begin: ONE, end: -ONE})
                if rest.not_negative or rest.times(-ONE) - _NEXT in known:
                    found[Segment(first.base.name, forms.of(first.offset), begin, end, rest)] = None
    return tuple(found)


def without_lengths(forms: Forms, form: Form) -> tuple[Form, list[Rising]]:
    """A form less the lengths of segments that it adds, and what has to rise for these not to be negative."""
    loads = [(atom, number, op) for atom, number in form.terms if (op := forms.load(atom)) is not None]
    rising = []
    for begin, less, first in loads:
        for end, more, last in loads:
            if less == -ONE and more == ONE and _follows(forms, first, last):
                form = form - Form.of({end: ONE, begin: -ONE})
                rising.append(Rising(first.base.name))
    return form, rising


def _follows(forms: Forms, first: Op, last: Op) -> bool:
    """Whether one load is of the element behind that of another."""
    return first.base is last.base and forms.of(last.offset) - forms.of(first.offset) == _NEXT
