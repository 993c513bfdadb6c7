"""`gathered`: an addition to one element of a row that the program adds to as a whole, as a part of that.

The loss of a row reads the logit of its label once more: the gradient has one element with two additions, and no store
could be right for the row. Here the lane whose element it is adds both. That asks for an element of the row: if it
lies outside, which the kernel alone can see, the row's gradients become NaN rather than wrong. A few elements, which
a tile of labels names, are added likewise, those that are named twice twice.

A row may be the part of a longer one that a program goes through. A label that lies in another part is another
program's, so that here a condition has to say that it lies in this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.claims import Claims, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, domain
from kernel_agent.compiler.schedule.forms import Forms, Launch, sides
from kernel_agent.compiler.schedule.limits import Limits
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.sites import Site, negatives, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, unspread

WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC))
MOST = 16
"""Elements of one tile that all lanes of a row compare their places with."""


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
    """What the element's place in the row is the sum of; empty: it is the first."""
    lanes: tuple[Value, ...]
    """What the lanes' places in the row are the sum of."""
    length: Value
    """Of the row."""
    claims: Claims
    first: Value | None = None
    """What the row's places begin with, where the element is known to lie among them; None: 0."""

    @property
    def is_branched(self) -> bool:
        """Whether a condition decides on the single addition that the row's does not depend on."""
        return self.single.branches > self.row.branches


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
    for singles, row in few_and_rows(forms, kernel):
        for single in singles if row.op.base.name not in refused else ():
            pair = _pair(forms, single, row)
            if pair is not None:
                yield pair


def few_and_rows(forms: Forms, kernel: Kernel) -> Iterator[tuple[list[Site], Site]]:
    """Additions to single elements of buffers that have one addition to a row, with that."""
    written: dict[Value, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base, []).append(site)
    for found in written.values():
        singles = [site for site in found if _is_few(forms, site)]
        rows = [site for site in found if site not in singles]
        if len(rows) == 1 and all(site.op.code is Code.ATOMIC_ADD for site in found):
            yield singles, rows[0]


def _is_few(forms: Forms, site: Site) -> bool:
    """Whether an addition is to one element, or to a few that memory names."""
    shape = site.op.offset.shape
    if len(shape) != 1:
        return not shape
    makers = [part.producer for part in parts_of(site.op.offset) if part.shape]
    symbol = forms.kernel.extents.get(shape[0], "")
    named = any(maker is not None and maker.code is Code.LOAD for maker in makers)
    return named and max(shape[0], forms.launch.calls.most(symbol) or 0 if symbol else 0) <= MOST


def _pair(forms: Forms, single: Site, row: Site) -> Pair | None:
    inner = single.branches - row.branches
    both = len(single.loops)
    if single.sides[: row.branches] != row.sides or inner > 1 or single.loops != row.loops[:both]:
        return None
    row = replace(row, loops=row.loops[both:])  # each trip of those around both has a row of its own
    if single.op.offset.shape and (inner or len(row.op.offset.shape) != 1):
        return None
    around = single.conditions[: len(single.conditions) - inner]
    if around != row.conditions:
        return None  # a program may end between the two
    mine, theirs = own_parts(single, row)
    if not theirs:
        return None
    place = sum_of(forms, theirs)
    length = limit_of(forms, row.op.mask, place)
    if length is None:
        return None
    counter = Counter(forms)
    if is_whole(counter, replace(row, conditions=()), place):  # they hold for both, and know no index of the row
        claims = open_claims(counter.claims)
        if claims is None or forms.launch.calls.refute(claim.text() for claim in claims):
            return None
        return Pair(single, row, tuple(mine), tuple(theirs), length, claims)
    if _is_run_through(forms, row, place, length):
        first = row.loops[0].operands[0]
        if _lies_in(forms, single, sum_of(forms, mine), first, length):
            return Pair(single, row, tuple(mine), tuple(theirs), length, (), first)
    return None


def own_parts(one: Site, other: Site) -> tuple[list[Value], list[Value]]:
    """Summands of both addresses, without those that they have in common."""
    mine, theirs = parts_of(one.op.offset), parts_of(other.op.offset)
    for part in list(mine):
        if part in theirs:
            mine.remove(part)
            theirs.remove(part)
    return mine, theirs


def sum_of(forms: Forms, parts: Sequence[Value]) -> Form:
    """The form of a sum."""
    found = Form()
    for part in parts:
        found = found + forms.of(part)
    return found


def is_whole(counter: Counter, row: Site, place: Form) -> bool:
    """Whether lanes, in the trips of loops, have every place of a row from 0 up to what a mask says."""
    limits = Limits.of(counter.forms, row, [] if row.op.mask is None else [row.op.mask])
    if limits is None or len(limits.bounds) != 1:
        return False
    counter.claims += limits.claims
    (bound,) = limits.bounds
    moving = {atom: None for atom in domain(counter.forms, row) if atom.kind is not Kind.PROGRAM}
    extents = {atom: counter.extent(row, atom) for atom in moving}
    whole = place == bound.form and set(moving) == set(bound.form.coefficients)
    return whole and counter.dense(row, bound, extents)


def _is_run_through(forms: Forms, row: Site, place: Form, end: Value) -> bool:
    """Whether a loop's trips, and the lanes in each, have every place from where the loop starts to where it ends."""
    mask = None if row.op.mask is None else unspread(row.op.mask).producer
    if len(row.loops) != 1 or row.loops[0].code is not Code.FOR or mask is None or mask.code is not Code.CMP:
        return False
    (loop,) = row.loops
    _, stop, step = loop.operands[:3]
    lanes = place - forms.of(loop.blocks[0].arguments[0])
    tile = [atom for atom, number in lanes.terms if atom.kind is Kind.LANE and number == ONE]
    one = len(lanes.terms) == len(tile) == len(row.op.offset.shape) == 1 and not lanes.base.terms
    extent = tile[0].extent if one else None
    return extent is not None and forms.of(step) == Form(base=extent) and forms.of(stop) == forms.of(end)


def _lies_in(forms: Forms, single: Site, place: Form, first: Value, end: Value) -> bool:
    """Whether what is around an addition says that its place is not before `first`, and is before `end`."""
    known = negatives(forms, single)

    def is_known(bound: Value, code: Code, less: Callable[[Value], Form]) -> bool:
        return less(bound) in known or all(less(side) in known for side in sides(forms, bound, code))

    before_end = is_known(end, Code.MIN, lambda side: place - forms.of(side))
    return before_end and is_known(first, Code.MAX, lambda side: forms.of(side) - place - Form(base=ONE))


def parts_of(value: Value) -> list[Value]:
    """What an integer is the sum of."""
    op = value.producer
    if op is not None and op.code is Code.ADD:
        return [part for operand in op.operands for part in parts_of(operand)]
    if op is not None and op.code in (Code.CAST, Code.FULL, Code.BROADCAST) and not op.attributes.get("unsigned"):
        inner = op.operands[0]
        if inner.element in ("i32", "i64") and not (inner.element == "i64" and value.element == "i32"):
            return parts_of(inner)
    return [value]


def limit_of(forms: Forms, mask: Value | None, form: Form) -> Value | None:
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
        return next(filter(None, (limit_of(forms, operand, form) for operand in op.operands)), None)
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
        around = {result for op in pair.single.block.ops for result in op.results} if pair.is_branched else set()
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
            lanes, place = alike(self, [self.place(pair.lanes), place])
            if value.shape or place.shape:
                hit = b.compare("eq", b.expand(lanes, 1), b.expand(place, 0))
                chosen = b.select(hit, b.expand(value, 0), b.zero(value))
                own = b.add(b.sum(chosen, 1), others)
            else:
                own = b.select(b.compare("eq", lanes, place), value, others)
            mask = None if op.mask is None else self[op.mask]
            self.b.store(self[op.base], self.whole(op.offset), b.add(self[op.stored], own), mask, op.code)

    def single(self) -> list[Value]:
        """What `found` holds, where the single addition is made."""
        b, pair = self.b, self.pair
        place = self.place(pair.place)
        value = self[pair.single.op.stored]
        others = b.zero(value)
        made = None if pair.single.op.mask is None else self[pair.single.op.mask]
        if made is not None:
            value = b.select(made, value, others)
        if pair.place and pair.first is None:
            at, length = alike(self, [place, self[pair.length]])
            inside = b.logical_and(b.compare("ge", place, b.zero(place)), b.compare("lt", at, length))
            if made is not None:
                inside = b.elementwise(Code.OR, (inside, b.elementwise(Code.XOR, (made, b.const(True, "i1")))))
            others = b.select(inside, others, b.const(math.nan, value.element))
        if pair.single.op.offset.shape:
            shape = pair.single.op.offset.shape
            return [b.whole(value, shape), b.sum(others, 0) if others.shape else others]
        return [value, others, *([place] if self.inner else [])]

    def place(self, parts: Sequence[Value]) -> Value:
        """The sum of parts."""
        if not parts:
            return self.b.const(0)
        total = self[parts[0]]
        for part in parts[1:]:
            one, other = alike(self, [total, self[part]])
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
        if self.pair.is_branched:
            raise CannotDerive("what a branch adds to one element of a row is not known when the row is added to")
        return self.single()

    def branch(self, op: Op) -> None:
        """An IF around the single addition gives what that adds; nothing where it is not made."""
        holds = [self.pair.is_branched and self.pair.single.block is block for block in op.blocks]
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


def alike(copier: Copier, values: Sequence[Value]) -> list[Value]:
    """Integers in the wider element of them."""
    wide = any(value.element == "i64" for value in values)
    return [copier.b.cast(value, "i64") if wide else value for value in values]
