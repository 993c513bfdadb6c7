"""`census_of`: a launch that counts how often rows of a gradient would be stored to, where only memory can tell.

Rows that an index names, that a bisection finds or that wrap around an edge are often others for every program, but
nothing in the kernel says so. Their addresses are row * width + place. That the place tells what is stored within a row
is proved; which row each program, trip and lane has is counted before anything is stored, by the operations of the
kernel itself, one number for a row. Where a row is counted twice the backward raises.

Rows that turn out to have one element each say nothing: where a place in a matrix is all that memory tells, as the
label of a row, elements are counted by the longer rows that they lie in. Where no two lie in one, all are apart.

Whether that is of use depends on the rows: it is had only where none was counted twice in calls that were seen, and
where rows drawn at random would have been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive, OutOfBounds
from kernel_agent.compiler.plan import Buffer, Census, Fact, Fill, Step
from kernel_agent.compiler.schedule.claims import conjunction, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, domain
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.resized import resized
from kernel_agent.compiler.schedule.sites import Site, bounds
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import Uses, captured
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

LEAST = 16
"""Elements of a row, where their number is known: counts of shorter ones are as large as what they spare."""
MOST_PROGRAMS, MOST_ROWS = 2048, 1 << 20
"""Of a call whose rows are counted here."""
STRIDES = 2
"""Of an address that may have to be multiples of the width."""
CHANCE = 4.0
"""Pairs of equal rows that calls would be expected to have, were rows drawn at random."""


@dataclass(frozen=True)
class _Rows:
    """Additions at one place of a kernel, as rows and places within."""

    site: Site
    starts: _Starts
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


def census_of(forms: Forms, written: Sequence[Site], tensor: str, name: str) -> Census | None:
    """The launch for all additions to the gradient `name` of `tensor`; None where there is none, or would not help."""
    calls = forms.launch.calls
    if not calls.typical or not written or any(site.op.code is not Code.ATOMIC_ADD for site in written):
        return None
    for starts in _ways(forms, written[0]):
        found = [_rows(forms, site, starts) for site in written]
        rows = [one for one in found if one is not None]
        axes = {atom.number for one in rows for atom in one.told if atom.kind is Kind.PROGRAM}
        if len(rows) < len(found) or any(one.programs != axes for one in rows):
            continue
        try:
            made = _counting(forms, rows, name)
        except CannotDerive:
            continue
        if not _tells_programs(made.kernel, axes):
            continue
        width = starts.width.text()
        grid = tuple(extent.text() if axis in axes else "1" for axis, extent in enumerate(forms.launch.grid))
        number = f"triton.cdiv({tensor}.numel(), {width})"
        step = Step(made.kernel, grid, {made.width: width, made.number: number})
        counts = Buffer(made.counts, "i32", Fill.ZEROS, shape=(number,))
        texts = dict.fromkeys(
            [f"{tensor}.is_contiguous()", *starts.facts, *(text for one in rows for text in one.facts)]
        )
        reason = f"rows of {name} lie one behind the other"
        facts = tuple(Fact(text, reason, tensor) for text in texts)
        whole = rows[0].whole if len(rows) == 1 else ""
        census = Census(name, counts, step, width, whole, facts)
        if not calls.refute(texts) and _is_meant(census, calls.names):
            return census
    return None


@dataclass(frozen=True)
class _Starts:
    """What of an address says where its row starts: what is multiplied with a multiple of the width."""

    width: Polynomial
    """Elements from one row to the next."""
    multiples: frozenset[Polynomial] = frozenset()
    """Numbers that are taken for multiples."""
    within: bool = False
    """Rows are told by the elements in them: no two additions may have elements of one."""

    @property
    def facts(self) -> list[str]:
        """By which they are."""
        return sorted(f"{one.text()} % {self.width.text()} == 0" for one in self.multiples)

    def has(self, number: Polynomial) -> bool:
        """Whether it says which row an address lies in: a multiple of the width does."""
        return self.within or number in self.multiples or number.quotient(self.width) is not None


def _ways(forms: Forms, site: Site) -> Iterator[_Starts]:
    """By what all that memory says is a multiple of, the longest first; then with strides that must be multiples. Rows
    that no call had longer than a few elements come last, behind longer ones that have one element stored each."""
    terms = forms.of(site.op.offset).terms
    told = [number for atom, number in terms if atom.kind is Kind.OPAQUE]
    found = {-number if all(count < 0 for _, count in number.terms) else number for _, number in terms}
    known = [one for one in found if one.printable and (one.number is None or one.number >= LEAST)]
    whole = [one for one in known if told and all(number.quotient(one) is not None for number in told)]
    widths = sorted(whole, key=_longest)
    short = [one for one in widths if _is_short(forms, one)]
    yield from _strided(terms, [one for one in widths if one not in short])
    for width in sorted(known, key=_longest) if told else ():
        if width not in whole and not _is_short(forms, width):
            yield _Starts(width, within=True)
    yield from _strided(terms, short)


def _longest(width: Polynomial) -> tuple[int, str]:
    """Orders widths, the longest first."""
    return -len(width.symbols), width.text()


def _is_short(forms: Forms, width: Polynomial) -> bool:
    """Whether rows of a width had a few elements at most in all calls that were seen."""
    most = forms.launch.calls.most(width.text())
    return most is not None and most < LEAST


def _strided(terms: Sequence[tuple[Atom, Polynomial]], widths: Sequence[Polynomial]) -> Iterator[_Starts]:
    """By widths, with as many strides as there may be that must be multiples."""
    for most in range(STRIDES + 1):
        for width in widths:
            others = {number for _, number in terms if number.quotient(width) is None and number.printable}
            strides = sorted((one for one in others if one.number is None), key=Polynomial.text)
            for chosen in combinations(strides, most):
                yield _Starts(width, frozenset(chosen))


def _rows(forms: Forms, site: Site, starts: _Starts) -> _Rows | None:
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
    masks = _conjuncts(site.op.mask)
    asked = tuple(value for value in masks if forms.reads(value) <= told)
    rest = [value for value in masks if value not in asked]
    whole = ""
    if not starts.within and all(forms.reads(value).isdisjoint(told) for value in rest):
        loops = tuple(loop for loop in site.loops if forms.trip(loop) not in told)
        whole = _whole(forms, Site(site.op, site.block, loops), rest, told, starts.width)
    return _Rows(site, starts, told, tuple(proof.facts()), asked, whole)


def _whole(forms: Forms, inside: Site, masks: Sequence[Value], told: frozenset[Atom], width: Polynomial) -> str:
    """When the places within a row are as many as it has elements; empty where that is not known."""
    counter = Counter(forms, apart=told)
    count = counter.count_where(inside, masks)
    claims = open_claims(counter.claims)
    if count is None or claims is None or not count.printable:
        return ""
    same = "" if count == width else f"{width.text()} == {count.text()}"
    return " and ".join(filter(None, (same, conjunction(claims)))) or "True"


def _conjuncts(mask: Value | None) -> list[Value]:
    """Conditions that all hold where a mask does."""
    if mask is None:
        return []
    op = mask.producer
    if op is not None and op.code is Code.AND:
        return [part for operand in op.operands for part in _conjuncts(operand)]
    return [mask]


# --- the kernel


@dataclass(frozen=True)
class _Made:
    """A kernel that counts, and the names of what it is given beside what the other has."""

    kernel: Kernel
    counts: str
    width: str
    number: str


def _counting(forms: Forms, rows: Sequence[_Rows], name: str) -> _Made:
    """Counts rows. Raises CannotDerive where one comes from a loop's carries, or from memory that is written to."""
    source = forms.kernel
    counts = Value("*i32", (), source.free_name(f"{name}_stores"))
    width, number = (Value("i64", (), source.free_name(text)) for text in ("row_size", "num_rows"))
    made = emptied(source, name=f"{source.name}_{counts.name}", arguments=[*source.arguments, counts, width, number])
    copier = Copier(source, Builder(made, frozenset((counts,))))
    for one in rows:
        _around(copier, forms, one, partial(_count, copier, forms, one, (counts, width, number)))
    kernel = prune(made)
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    kernel = Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))
    return _Made(kernel, counts.name, width.name, number.name)


def _around(copier: Copier, forms: Forms, rows: _Rows, count: Callable[[], None]) -> None:
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


def _count(copier: Copier, forms: Forms, rows: _Rows, given: tuple[Value, Value, Value]) -> None:
    """One more for each row that an addition has. A row that is none has no elements: nothing is added to it."""
    b = copier.b
    counts, width, number = given
    start = _Start(copier, forms, rows.starts)
    offset = start.of(rows.site.op.offset, ONE)
    if offset is None or start.beside.terms:
        raise CannotDerive("places within a row do not start with its first element")
    row = b.elementwise(Code.FLOORDIV, (b.cast(offset, "i64"), width))
    spread = {axis for axis, extent in enumerate(row.shape) if extent != 1}
    if not spread <= {atom.number for atom in rows.told if atom.kind is Kind.LANE}:
        raise CannotDerive("all lanes of a row would be counted")
    mask = b.logical_and(b.compare("ge", row, b.const(0, "i64")), b.compare("lt", row, number))
    for value in rows.asked:
        mask = b.logical_and(mask, copier[value])
    b.store(counts, row, b.const(1, "i32"), mask, Code.ATOMIC_ADD)


class _Start:
    """Of an address the part that says where its row starts."""

    def __init__(self, copier: Copier, forms: Forms, starts: _Starts) -> None:
        self.copier = copier
        self.forms = forms
        self.starts = starts
        self.beside = Polynomial()
        """What is always added to that."""

    def of(self, value: Value, factor: Polynomial) -> Value | None:
        """The part of a value that the address has `factor` times; None where it has none. Raises CannotDerive where it
        cannot be taken apart."""
        form = self.forms.of(value).times(factor)
        starts = [self.starts.has(number) for _, number in form.terms]
        if all(starts) and (self.starts.within or form.base.quotient(self.starts.width) is not None):
            return self.copier[value] if form.terms or form.base.terms else None
        if not any(starts):
            self.beside = self.beside + form.base
            return None
        return self._inside(value, factor)

    def _inside(self, value: Value, factor: Polynomial) -> Value | None:
        """Of a value that has both parts."""
        b, op = self.copier.b, value.producer
        if op is not None and op.code in (Code.ADD, Code.SUB):
            left, right = (self.of(operand, factor) for operand in op.operands)
            if left is None or right is None:
                return left if right is None else right if op.code is Code.ADD else b.neg(right)
            return b.add(left, right) if op.code is Code.ADD else b.sub(left, right)
        if op is not None and op.code is Code.MUL:
            for one, other in (op.operands, op.operands[::-1]):
                times = self.forms.of(other).invariant
                if times is not None:
                    inner = self.of(one, factor * times)
                    return None if inner is None else b.mul(inner, self.copier[other])
        if op is not None and op.code in (Code.CAST, Code.EXPAND):
            inner = self.of(op.operands[0], factor)
            if inner is None:
                return None
            return b.cast(inner, value.element) if op.code is Code.CAST else b.expand(inner, op.attributes["axis"])
        raise CannotDerive("an address is no sum of where its row starts and of a place within")


def _tells_programs(kernel: Kernel, axes: set[int]) -> bool:
    """Whether rows may depend on all of a program's number, and on no number of programs that is not counted. Programs
    of which only a quotient or only a remainder is asked have the same row where another launch has more of them."""
    uses = Uses.of(kernel)
    for op in kernel.ops:
        if op.code is Code.NUM_PROGRAMS and op.attributes["axis"] not in axes:
            return False
        if op.code is Code.PROGRAM_ID:
            parts: list[Op] = []
            pending = [op.result]
            while pending:
                for use in uses[pending.pop()]:
                    if use.code is Code.CAST:
                        pending.append(use.result)
                    else:
                        parts.append(use)
            if len({part.code for part in parts}) == 1 and parts[0].code in (Code.FLOORDIV, Code.REM):
                return False
    return True


# --- calls that were seen


def _is_meant(census: Census, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no row is counted twice in calls that were seen, where rows drawn at random would be."""
    expected = 0.0
    for names in calls:
        try:
            counts = _counted(census, names)
        except (NameError, TypeError, AttributeError, ZeroDivisionError, KeyError, OutOfBounds, CannotDerive):
            return False
        if counts is None or not counts.numel():
            continue
        if int(counts.max()) > 1:
            return False
        stored = int(counts.sum())
        expected += stored * (stored - 1) / 2 / counts.numel()
    return expected >= CHANCE


def _counted(census: Census, names: Mapping[str, Any]) -> Tensor | None:
    """The counts of a call; None of one that is too large."""
    step = census.step
    grid = [int(eval(text, dict(names))) for text in step.grid]
    scalars = {name: int(eval(text, dict(names))) for name, text in step.scalars.items()}
    (number,) = (int(eval(text, dict(names))) for text in census.counts.shape)
    if math.prod(grid) > MOST_PROGRAMS or number > MOST_ROWS:
        return None
    counts = torch.zeros(number, dtype=torch.int32)
    given = {**names, **scalars, census.counts.name: counts}
    kernel = resized(step.kernel, names)
    evaluate(kernel, grid, {value.name: given[value.name] for value in kernel.arguments})
    return counts
