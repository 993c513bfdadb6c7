"""`Named`: rows of a gradient that a kernel adds to, as only memory names them, and what tells which row that is.

That places within a row do not meet is proved here. Which rows there are a launch of the backward has to find, by the
operations of the kernel itself: `census` and `listing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.claims import conjunction, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, domain
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import Site, bounds
from kernel_agent.compiler.schedule.starts import Starts
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Op, Value


@dataclass(frozen=True)
class Named:
    """Additions at one place of a kernel, as rows and places within."""

    site: Site
    starts: Starts
    told: frozenset[Atom]
    """Programs, trips and lanes that a row depends on."""
    facts: tuple[str, ...]
    """By which the place within a row tells all others."""
    asked: tuple[Value, ...]
    """Parts of the mask that say whether a row takes part."""
    whole: str
    """When all of a row is stored to, an expression; empty where that is not known."""

    @property
    def programs(self) -> set[int]:
        """Axes of the grid that a row depends on."""
        return {atom.number for atom in self.told if atom.kind is Kind.PROGRAM}


def named(forms: Forms, site: Site, starts: Starts) -> Named | None:
    """Additions at one place as rows of a width; None where what is left is not proved."""
    address = forms.of(site.op.offset)
    inner = {atom: number for atom, number in address.terms if not starts.has(number)}
    told = frozenset(source for atom, _ in address.terms if atom not in inner for source in atom.sources)
    if any(atom.kind is Kind.OPAQUE for atom in (*inner, *told)):
        return None
    if any(loop.code is not Code.FOR for loop in site.loops) or any((-number).surely(1) for number in inner.values()):
        return None
    opened = [value for loop in site.loops if forms.trip(loop) in told for value in loop.operands[:3]]
    around = [condition for condition, _ in site.conditions]
    if any(not forms.reads(value) <= told for value in (*opened, *around)):
        return None
    # The row is one index more, of which only that it is the outermost is known.
    row = Atom(Kind.COPY, 1 + max((atom.number for atom in inner if atom.kind is Kind.COPY), default=0))
    form = Form.of({**inner, row: starts.width})
    kept = [bound for bound in bounds(forms, site) if all(atom in inner for atom, _ in bound.form.terms)]
    proof = injective(form, kept, domain(forms, site) | {row}, forms.launch.calls, beside=told)
    if proof is None:
        return None
    masks = [] if site.op.mask is None else conjuncts(site.op.mask)
    asked = tuple(value for value in masks if forms.reads(value) <= told)
    rest = [value for value in masks if value not in asked]
    whole = ""
    if not starts.within and all(forms.reads(value).isdisjoint(told) for value in rest):
        loops = tuple(loop for loop in site.loops if forms.trip(loop) not in told)
        whole = _whole(forms, Site(site.op, site.block, loops), rest, told, starts.width)
    return Named(site, starts, told, tuple(proof.facts()), asked, whole)


def _whole(forms: Forms, inside: Site, masks: Sequence[Value], told: frozenset[Atom], width: Polynomial) -> str:
    """When the places within a row are as many as it has elements; empty where that is not known."""
    counter = Counter(forms, apart=told)
    count = counter.count_where(inside, masks)
    claims = open_claims(counter.claims)
    if count is None or claims is None or not count.printable:
        return ""
    same = "" if count == width else f"{width.text()} == {count.text()}"
    return " and ".join(filter(None, (same, conjunction(claims)))) or "True"


def around(copier: Copier, forms: Forms, rows: Named, count: Callable[[], None]) -> None:
    """Count where the addition would be done: in the loops that rows depend on, under the conditions around."""
    b = copier.b
    loops = [loop for loop in rows.site.loops if forms.trip(loop) in rows.told]
    trips = {forms.trip(loop) for loop in loops}
    first = [one for one in rows.site.conditions if forms.reads(one[0]).isdisjoint(trips)]
    last = [one for one in rows.site.conditions if one not in first]

    def within(around: Sequence[Op | tuple[Value, bool]]) -> list[Value]:
        if not around:
            count()
            return []
        head, *rest = around
        if isinstance(head, Op):
            index = head.blocks[0].arguments[0]

            def body(counted: Value, _: list[Value]) -> list[Value]:
                copier[index] = counted
                return within(rest)

            start, stop, step = copier.all(head.operands[:3])
            b.loop((start, stop, step), [], body, index_name=index.name)
            return []
        condition, holds = head
        sides = (lambda: within(rest), list) if holds else (list, lambda: within(rest))
        b.branch(copier[condition], *sides)
        return []

    within([*first, *loops, *last])
