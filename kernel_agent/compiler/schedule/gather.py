"""`gathered`: an addition to one element of a row that the program adds to as a whole, as a part of that.

The loss of a row reads the logit of its label once more: the gradient has one element with two additions, and no store
could be right for the row. Here the lane whose element it is adds both. That asks for an element of the row: if it
lies outside, which the kernel alone can see, the row's gradients become NaN rather than wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.claims import Claims, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, unspread

WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC))


@dataclass(frozen=True)
class Gathered:
    """A kernel that adds to rows as wholes."""

    kernel: Kernel
    claims: Claims = ()
    """Under which each row is reached by one lane for every element."""


@dataclass(frozen=True)
class Pair:
    """An addition to one element, and one to all of a row."""

    single: Site
    row: Site
    place: tuple[Value, ...]
    """What the element's place in the row is the sum of."""
    lanes: tuple[Value, ...]
    """What the lanes' places in the row are the sum of."""
    length: Value
    """Of the row."""
    claims: Claims


def gathered(kernel: Kernel, launch: Launch) -> Gathered:
    """The kernel with as many additions to single elements as possible made part of those to rows."""
    claims: list[Claims] = []
    refused: set[str] = set()
    while True:
        pair = next(_pairs(kernel, launch, refused), None)
        if pair is None:
            return Gathered(kernel, tuple(claim for some in claims for claim in some))
        try:
            kernel = prune(_Gatherer(kernel, pair).copy())
        except CannotDerive:
            refused.add(pair.row.op.base.name)
        else:
            claims.append(pair.claims)


def _pairs(kernel: Kernel, launch: Launch, refused: set[str]) -> Iterator[Pair]:
    """What can be made one, of buffers that have one addition to a row."""
    forms = Forms(kernel, launch)
    written: dict[Value, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base, []).append(site)
    for base, found in written.items():
        rows = [site for site in found if site.op.offset.shape]
        singles = [site for site in found if not site.op.offset.shape]
        if base.name in refused or len(rows) != 1 or any(site.op.code is not Code.ATOMIC_ADD for site in found):
            continue
        for single in singles:
            pair = _pair(forms, single, rows[0])
            if pair is not None:
                yield pair


def _pair(forms: Forms, single: Site, row: Site) -> Pair | None:
    if row.branches or single.branches > 1 or single.loops:
        return None
    mine, theirs = _parts(single.op.offset), _parts(row.op.offset)
    for part in list(mine):
        if part in theirs:
            mine.remove(part)
            theirs.remove(part)
    counter = Counter(forms)
    limits = counter.limits(row, [] if row.op.mask is None else [row.op.mask])
    if not mine or not theirs or limits is None or len(limits) != 1:
        return None
    (bound,) = limits
    place = Form()
    for part in theirs:
        place = place + forms.of(part)
    moving = {atom: None for atom in domain(forms, row) if atom.kind is not Kind.PROGRAM}
    extents = {atom: counter.extent(row, atom) for atom in moving}
    whole = place == bound.form and set(moving) == set(bound.form.coefficients)
    if not whole or not counter.dense(row, bound, extents):
        return None
    length = _limit(forms, row.op.mask, bound.form)
    claims = open_claims(counter.claims)
    if length is None or claims is None or forms.launch.calls.refute(claim.text() for claim in claims):
        return None
    return Pair(single, row, tuple(mine), tuple(theirs), length, claims)


def _parts(value: Value) -> list[Value]:
    """What an integer is the sum of."""
    op = value.producer
    if op is not None and op.code is Code.ADD:
        return [part for operand in op.operands for part in _parts(operand)]
    if op is not None and op.code in (Code.CAST, Code.FULL, Code.BROADCAST) and not op.attributes.get("unsigned"):
        inner = op.operands[0]
        if inner.element in ("i32", "i64") and not (inner.element == "i64" and value.element == "i32"):
            return _parts(inner)
    return [value]


def _limit(forms: Forms, mask: Value | None, form: Form) -> Value | None:
    """The scalar that a mask says a form to be less than."""
    op = None if mask is None else mask.producer
    if op is None:
        return None
    if op.code is Code.CMP and op.attributes["predicate"] == "lt":
        left, right = op.operands
        known, limit = forms.of(left), right
        less = _difference(limit)
        while less is not None:  # lane < N - start
            limit, start = less.operands
            known = known + forms.of(start)
            less = _difference(limit)
        return limit if not limit.shape and known == form else None
    if op.code in (Code.AND, Code.FULL, Code.BROADCAST, Code.EXPAND):
        return next(filter(None, (_limit(forms, operand, form) for operand in op.operands)), None)
    return None


def _difference(value: Value) -> Op | None:
    """The subtraction of scalars that a limit comes from."""
    op = unspread(value).producer
    return op if op is not None and op.code is Code.SUB and not op.result.shape else None


class _Gatherer(Copier):
    """Makes one pair one addition."""

    def __init__(self, source: Kernel, pair: Pair) -> None:
        super().__init__(source)
        self.pair = pair
        around = {result for op in pair.single.block.ops for result in op.results} if pair.single.branches else set()
        self.inner = not around.isdisjoint(pair.place)
        """Whether the place is known in a branch only."""
        self.found: list[Value] = []
        """What the element gets, zero or NaN for the others, and where in the row it is, once that is known."""

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or op not in (self.pair.single.op, self.pair.row.op):
            super().effect(op)
        elif op is self.pair.single.op:
            if not self.found:
                self.found = self.single()
        else:
            b, pair = self.b, self.pair
            value, others, *inner = self.found
            place = inner[0] if inner else self.place(pair.place)
            hit = b.compare("eq", *_alike(self, [self.place(pair.lanes), place]))
            own = b.select(hit, value, others)
            mask = None if op.mask is None else self[op.mask]
            self.b.store(self[op.base], self.whole(op.offset), b.add(self[op.stored], own), mask, op.code)

    def single(self) -> list[Value]:
        """What `found` holds, where the single addition is made."""
        b, pair = self.b, self.pair
        place = self.place(pair.place)
        zero = b.zero(place)
        at, length = _alike(self, [place, self[pair.length]])
        inside = b.logical_and(b.compare("ge", place, zero), b.compare("lt", at, length))
        value = self[pair.single.op.stored]
        if pair.single.op.mask is not None:
            made = self[pair.single.op.mask]
            value = b.select(made, value, b.zero(value))
            inside = b.elementwise(Code.OR, (inside, b.elementwise(Code.XOR, (made, b.const(True, "i1")))))
        others = b.select(inside, b.zero(value), b.const(math.nan, value.element))
        return [value, others, *([place] if self.inner else [])]

    def place(self, parts: Sequence[Value]) -> Value:
        """The sum of parts."""
        total = self[parts[0]]
        for part in parts[1:]:
            one, other = _alike(self, [total, self[part]])
            total = self.b.add(one, other)
        return total

    def loop(self, op: Op) -> None:
        """The row may be added to before its element is."""
        if not self.slicing and self.pair.row.loops[:1] == (op,) and not self.found:
            self.found = self.early()
        super().loop(op)

    def op(self, op: Op) -> None:
        """Outside of loops, too."""
        if not self.slicing and op is self.pair.row.op and not self.found:
            self.found = self.early()
        super().op(op)

    def early(self) -> list[Value]:
        """The single addition's, computed before its time."""
        if self.pair.single.branches:
            raise CannotDerive("what a branch adds to one element of a row is not known when the row is added to")
        return self.single()

    def branch(self, op: Op) -> None:
        """An IF around the single addition gives what that adds; nothing where it is not made."""
        holds = [self.pair.single.block is block for block in op.blocks]
        if self.slicing or not any(holds):
            super().branch(op)
            return
        b, pair = self.b, self.pair
        nothing = [b.zero(pair.single.op.stored), b.zero(pair.single.op.stored)]
        if self.inner:
            nothing.append(b.const(0, "i64" if any(part.element == "i64" for part in pair.place) else "i32"))

        def side(place: int) -> list[Value]:
            kept = self.block(op.blocks[place])
            return [*kept, *(self.found if holds[place] else nothing)]

        found = list(b.branch(self[op.operands[0]], lambda: side(0), lambda: side(1)))
        self.results(op, found[: len(op.results)])
        self.found = found[len(op.results) :]


def _alike(copier: Copier, values: Sequence[Value]) -> list[Value]:
    """Integers in the wider element of them."""
    wide = any(value.element == "i64" for value in values)
    return [copier.b.cast(value, "i64") if wide else value for value in values]
