"""`relaid`: a loop over elements as one long row, in the rows and columns of another loop over the same elements.

A norm takes the statistics of a group as if its channels were one row, and scales channel by channel. Both read each
element, so the gradient has two additions, in two orders: neither can wait for the other in registers, and one of them
would take a buffer of its own. What the long row's loop adds depends on nothing but the element it lies at. So it may
go through rows and columns, too: then both are one (see `merged`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kernel_agent.compiler.schedule.claims import Claims, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, domain
from kernel_agent.compiler.schedule.forms import UNKNOWN, Forms, Launch
from kernel_agent.compiler.schedule.injective import scale
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import EFFECTS, ELEMENTWISE, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk

_LANEWISE = ELEMENTWISE | {Code.FULL, Code.BROADCAST}


@dataclass(frozen=True)
class Relaid:
    """A kernel whose loops go through the same elements in one order."""

    kernel: Kernel
    claims: Claims
    """For that."""


@dataclass(frozen=True)
class _Run:
    """Elements without gaps that an addition reaches, each once in every program that takes part."""

    start: Form
    length: Polynomial
    claims: Claims


def relaid(kernel: Kernel, launch: Launch) -> Relaid | None:
    """None where no loop is another's row."""
    given = kernel
    claims: Claims = ()
    while (found := _one_relaid(kernel, launch)) is not None:
        kernel, claims = found.kernel, (*claims, *found.claims)
    return Relaid(kernel, tuple(dict.fromkeys(claims))) if kernel is not given else None


def _one_relaid(kernel: Kernel, launch: Launch) -> Relaid | None:
    """The same of one loop."""
    forms = Forms(kernel, launch)
    added = [site for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,))) if _is_alone(site)]
    runs = {site: run for site in added if (run := _run(forms, site)) is not None}
    for flat, like in product(runs, runs):
        one, other = runs[flat], runs[like]
        ranks = len(flat.op.offset.shape), len(like.op.offset.shape)
        if flat.op.base is not like.op.base or ranks != (1, 2):
            continue
        if (one.start, one.length) != (other.start, other.length) or not _only_adds(flat) or not _lanewise(forms, flat):
            continue
        claims = (*one.claims, *other.claims)
        if not launch.calls.refute(claim.text() for claim in claims):
            return Relaid(prune(_Layer(kernel, flat, like).copy()), claims)
    return None


def _is_alone(site: Site) -> bool:
    """Whether an addition stands in one loop, and under no condition but its mask."""
    return len(site.loops) == 1 and site.loops[0].code is Code.FOR and not site.conditions and not site.branches


def _run(forms: Forms, site: Site) -> _Run | None:
    """The elements of an addition, if they lie side by side; None where that is not known."""
    programs = frozenset(atom for atom in domain(forms, site) if atom.kind is Kind.PROGRAM)
    counter = Counter(forms, apart=programs)
    if counter.count_where(site, [] if site.op.mask is None else [site.op.mask]) is None:
        return None
    claims = open_claims(counter.claims)
    rest, width, axes = forms.of(site.op.offset), ONE, list(counter.axes)
    while axes:
        inner = next((axis for axis in axes if scale(rest.coefficients, axis[0]) == width), None)
        if inner is None:
            return None
        axes.remove(inner)
        rest, width = rest - inner[0].times(width), width * inner[1]
    return None if claims is None or rest.sources - programs else _Run(rest, width, claims)


def _only_adds(site: Site) -> bool:
    """Whether a loop does nothing but an addition."""
    (loop,) = site.loops
    return not loop.results and [op for op in walk(loop.blocks[0]) if op.code in EFFECTS] == [site.op]


def _lanewise(forms: Forms, site: Site) -> bool:
    """Whether what is added at an element depends on what lies there and on the mask alone, or is the same for all."""
    shape, offset, mask = site.op.offset.shape, site.op.offset, site.op.mask
    changing = {forms.trip(site.loops[0]), UNKNOWN}
    seen: set[Value] = set()
    left = [site.op.stored]
    while left:
        value = left.pop()
        if value in seen or value is mask:
            continue
        seen.add(value)
        op = value.producer
        if not value.shape:
            if forms.reads(value) & changing:
                return False
        elif op is None or value.shape != shape:
            return False
        elif op.code is Code.LOAD:
            if op.offset is not offset or op.mask is not mask or op.base in forms.written:
                return False
            left += [] if op.other is None else [op.other]
        elif op.code in _LANEWISE:
            left += op.operands
        else:
            return False
    return True


class _Layer(Copier):
    """Writes one loop in the order of another."""

    def __init__(self, source: Kernel, flat: Site, like: Site) -> None:
        super().__init__(source)
        self.flat = flat
        self.like = like

    def loop(self, op: Op) -> None:
        """A FOR."""
        if op is not self.flat.loops[0] or self.slicing:
            super().loop(op)
            return
        flat, like, (pattern,) = self.flat.op, self.like.op, self.like.loops
        index = pattern.blocks[0].arguments[0]

        def body(trip: Value, _: Sequence[Value]) -> Sequence[Value]:
            self[index] = trip
            offset = self.whole(like.offset)
            mask = None if like.mask is None else self[like.mask]
            known = {flat.offset: offset}
            if flat.mask is not None:
                known[flat.mask] = self.b.const(True, "i1") if mask is None else mask
            value = self.moved(flat.stored, known)
            self.b.store(self[flat.base], offset, value, mask, Code.ATOMIC_ADD)
            return []

        start, stop, step = self.bounds(pattern)
        self.b.loop((start, stop, step), [], body, index_name=index.name)

    def moved(self, value: Value, known: dict[Value, Value]) -> Value:
        """What a lane of each element computes, by the lane that has it now."""
        if value not in known:
            op = value.producer
            if not value.shape or op is None:
                known[value] = self[value]
            elif op.code in (Code.FULL, Code.BROADCAST):
                known[value] = self.moved(op.operands[0], known)
            elif op.code is Code.SELECT and op.operands[0] is self.flat.op.mask:
                known[value] = self.moved(op.operands[1], known)  # of other lanes nothing is added
            else:
                made = self.b.again(op, [self.moved(operand, known) for operand in op.operands])
                assert isinstance(made, Value)
                known[value] = made
        return known[value]
