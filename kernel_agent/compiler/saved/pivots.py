"""`use_pivots`: moments about some number of a row, differentiated as the sums about the mean that they are.

Kernels take s = sum(x - p) / n and v = sum((x - p)**2) / n - s**2 about a number p that lies near the row, its first
element or the mean of its first tile, so that little cancels (the shifted data of Chan, Golub and LeVeque, "Algorithms
for computing the sample variance", 1983). p + s is the mean and v the variance whatever p is: its derivative is zero,
and computed as written it is a difference of sums, added to elements that have a gradient already. Where the number of
what is added up is n, the mean becomes KNOWN to be sum(x) / n here, and the variance sum((x - mean)**2) / n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.saved.lanes import conditions, through
from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import repeated_conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import depends
from kernel_agent.compiler.ssa.value import (
    VEILS,
    Block,
    Kernel,
    Op,
    Value,
    bare,
    beneath,
    constant,
    is_constant,
    unspread,
)

_SPREADS = (Code.EXPAND, Code.BROADCAST, Code.FULL)


@dataclass(frozen=True)
class _Term:
    """where(mask, x - pivot, 0), or the square of that."""

    mask: Value
    x: Value
    pivot: Value
    squared: bool


@dataclass(frozen=True)
class _Sum:
    """What a loop adds up: where(mask, x - pivot, 0), or the squares of that."""

    loop: Op
    mask: Value
    x: Value
    pivot: Value
    """As it is taken off in a trip."""
    head: tuple[Value, Value] | None
    """Mask and x of what the sum starts with, the loop's trip at 0; None where it starts with nothing."""
    squares: bool


@dataclass(frozen=True)
class _Pivoted:
    """Moments about a pivot."""

    mean: Op
    """pivot + shift."""
    variance: Op | None
    """The difference, if it is asked for."""
    clamped: Op | None
    """The larger of that and zero."""
    shift: Value
    total: Op
    """SUM of what the loop adds up."""
    count: Value
    terms: _Sum


def use_pivots(kernel: Kernel) -> Saved:
    """A kernel whose moments about pivots have the derivatives of those about the mean; the same where it has none."""
    found = list(_pivoted(kernel.body))
    if not found:
        return Saved(kernel, frozenset())
    names = [one.mean.result.name or "a mean" for one in found]
    remarks = tuple(f"`{name}` has the derivative of a mean: what it is computed about has none" for name in names)
    try:
        return Saved(_AboutMean(kernel, found).copy(), frozenset(), remarks)
    except CannotDerive as reason:
        return Saved(kernel, frozenset(), (f"moments keep what they are computed about: {reason.message}",))


def _pivoted(block: Block) -> Iterator[_Pivoted]:
    """Those of a block, and of blocks in it."""
    for op in block.ops:
        for inner in op.blocks:
            yield from _pivoted(inner)
    ops = [op for op in block.ops if op.results and op.results[0].is_float]
    for op in ops:
        for pivot, shift in (op.operands, op.operands[::-1]) if op.code is Code.ADD else ():
            quotient = bare(shift).producer
            total = unspread(quotient.operands[0]).producer if quotient and quotient.code is Code.DIV else None
            if quotient is None or total is None or total.code is not Code.SUM:
                continue
            terms = _terms(total.operands[0])
            if terms is None or terms.squares or bare(terms.pivot) is not bare(pivot):
                continue
            count = quotient.operands[1]
            if not _counts(terms, total, count):
                continue
            variance = next((one for one in ops if _is_variance(one, quotient.result, terms, total)), None)
            clamped = next((one for one in ops if variance is not None and _is_clamped(one, variance)), None)
            yield _Pivoted(op, variance, clamped, shift, total, count, terms)
            break


def _is_variance(op: Op, shift: Value, first: _Sum, total: Op) -> bool:
    """Whether an operation is second / n - shift**2."""
    if op.code is not Code.SUB:
        return False
    quotient, square = (value.producer for value in op.operands)
    if quotient is None or square is None or quotient.code is not Code.DIV or square.code is not Code.MUL:
        return False
    maker = shift.producer
    assert maker is not None
    added = unspread(quotient.operands[0]).producer
    if square.operands != (shift, shift) or bare(quotient.operands[1]) is not bare(maker.operands[1]):
        return False
    if added is None or added.code is not Code.SUM or added.attributes != total.attributes:
        return False
    second = _terms(added.operands[0])
    return second is not None and second == _Sum(first.loop, first.mask, first.x, first.pivot, first.head, squares=True)


def _is_clamped(op: Op, variance: Op) -> bool:
    """Whether an operation is the larger of the variance, which is not negative but for rounding, and zero."""
    if op.code is not Code.MAX or variance.result not in op.operands:
        return False
    return any(is_constant(bare(value), 0) for value in op.operands)


def _terms(value: Value) -> _Sum | None:
    """What a result of a loop is the sum of; None where it is something else."""
    value = unspread(value)
    loop = value.producer
    if loop is None or loop.code is not Code.FOR:
        return None
    place = loop.results.index(value)
    (block,) = loop.blocks
    carry, added = block.arguments[1 + place], unspread(block.yields[place]).producer
    if added is None or added.code is not Code.ADD:
        return None
    others = [part for part in map(unspread, added.operands) if part is not carry]
    found = _term(others[0]) if len(others) == 1 else None
    if found is None:
        return None
    if any(depends(part, set(block.arguments[1:])) for part in (found.mask, found.x, found.pivot)):
        return None
    start = loop.operands[3 + place]
    if is_constant(bare(start), 0):
        return _Sum(loop, found.mask, found.x, found.pivot, None, found.squared)
    head = _term(unspread(start))
    if head is None or bare(head.pivot) is not bare(found.pivot) or head.squared != found.squared:
        return None
    return _Sum(loop, found.mask, found.x, found.pivot, (head.mask, head.x), found.squared)


def _term(value: Value) -> _Term | None:
    """What is added up, as a term of a sum about a pivot; None where it is none."""
    op = value.producer
    if op is None:
        return None
    if op.code is Code.MUL and op.operands[0] is op.operands[1]:
        inner = _term(unspread(op.operands[0]))
        return None if inner is None or inner.squared else replace(inner, squared=True)
    if op.code is not Code.SELECT or not is_constant(bare(op.operands[2]), 0):
        return None
    gap = unspread(op.operands[1]).producer
    if gap is None or gap.code is not Code.SUB:
        return None
    return _Term(op.operands[0], gap.operands[0], gap.operands[1], squared=False)


def _counts(terms: _Sum, total: Op, count: Value) -> bool:
    """Whether so many lanes of all trips take part in every row whose sum anybody asks for: the loop steps through 0
    to n by tiles, and only lanes before n are added. A row may be left out as a whole if its pivot is not loaded,
    since nothing of it has a derivative then."""
    (block,) = terms.loop.blocks
    index, number = block.arguments[0], bare(count)
    start, stop, step = terms.loop.operands[:3]
    axis, rank = total.attributes["axis"], len(total.operands[0].shape)
    first = constant(start)
    if number.is_float or number.shape or bare(stop) is not number or constant(number) is not None:
        return False
    if first != (constant(step) if terms.head else 0) or terms.loop.attributes.get("reverse"):
        return False
    labels = tuple(range(rank))
    rest: set[object] = set()
    inside = False
    for mask in repeated_conjuncts(terms.mask):
        if _is_below(mask, index, step, number, axis, rank):
            inside = True
        elif depends(mask, {index}) or (mask.shape and mask.shape[axis] != 1):
            return False
        else:
            rest |= conditions(mask, labels if mask.shape else ())
    return inside and rest <= _loaded_where(terms.pivot, labels)


def _is_below(mask: Value, index: Value, step: Value, number: Value, axis: int, rank: int) -> bool:
    """Whether a mask says that index + lane < number, for the lanes of an axis that are as many as a step."""
    labels: tuple[object, ...] = tuple(range(rank))
    value = mask
    while value.producer is not None and value.producer.code in _SPREADS:
        ((value, labels),) = through(value.producer, labels) or ((value, labels),)
    op = value.producer
    if op is None or op.code is not Code.CMP or op.attributes["predicate"] != "lt" or op.attributes.get("unsigned"):
        return False
    if bare(op.operands[1]) is not number:
        return False
    value = op.operands[0]
    while value.producer is not None and value.producer.code in VEILS:
        ((value, labels),) = through(value.producer, labels) or ((value, labels),)
    added = value.producer
    if added is None or added.code is not Code.ADD:
        return False
    parts = [beneath(part, VEILS) for part in added.operands]
    lanes = [part.producer for part in parts if part is not index]
    if len(lanes) != 1 or lanes[0] is None or lanes[0].code is not Code.ARANGE or labels != (axis,):
        return False
    size = lanes[0].attributes
    width = step.producer.attributes if step.producer is not None and constant(step) is not None else {}
    return (size["start"], size["end"], size.get("symbol")) == (0, width.get("value"), width.get("symbol"))


def _loaded_where(pivot: Value, labels: tuple[object, ...]) -> frozenset[object]:
    """Conditions under which alone a pivot is loaded; nothing where it is not."""
    value = pivot
    while value.producer is not None and value.producer.code in VEILS:
        ((value, labels),) = through(value.producer, labels) or ((value, labels),)
    op = value.producer
    if op is None or op.code is not Code.LOAD or op.mask is None:
        return frozenset()
    return frozenset(conditions(op.mask, labels if op.mask.shape else ()))


class _AboutMean(Copier):
    """Gives moments about pivots the derivatives of those about the mean."""

    def __init__(self, source: Kernel, found: Sequence[_Pivoted]) -> None:
        super().__init__(source)
        self.means = {one.mean: one for one in found}
        self.variances = {one.variance: one for one in found}
        self.clamped = {one.clamped: one for one in found}
        self.squares: dict[_Pivoted, Value] = {}

    def op(self, op: Op) -> None:
        if op in self.means:
            if op.result not in self:
                self._mean(self.means[op])
            return
        super().op(op)
        one = self.variances.get(op) or self.clamped.get(op)
        if one is not None:
            if one not in self.squares:
                self.squares[one] = self._squares(one)
            self[op.result] = self.b.known(self.squares[one], self[op.result])

    def _mean(self, one: _Pivoted) -> None:
        super().op(one.mean)
        shift = self._quotient(one, None)
        self[one.mean.result] = self.b.known(self._spread(shift, one.shift, bare(one.shift)), self[one.mean.result])

    def _squares(self, one: _Pivoted) -> Value:
        """The variance as the mean of squares about the mean, which has no derivative there."""
        mean = self[one.mean.result]
        return self._quotient(one, self.b.known(self.b.zero(mean), mean))

    def _quotient(self, one: _Pivoted, middle: Value | None) -> Value:
        """The sum of x, or of its squares about the middle, over n."""
        found = self._looped(one, middle)
        return self.b.div(self.b.sum(found, one.total.attributes["axis"]), self[one.count])

    def _looped(self, one: _Pivoted, middle: Value | None) -> Value:
        b, terms = self.b, one.terms
        (block,) = terms.loop.blocks
        index, *_ = block.arguments
        start, stop, step = self.all(terms.loop.operands[:3])
        if terms.head is not None:
            start = b.const(0, index.element)
            first = self.aside()
            first[index] = start
            if first.all((terms.mask, terms.x)) != self.all(terms.head):
                raise CannotDerive("what a sum starts with is not the first trip of its loop")
        shape = one.total.operands[0].shape
        zero = b.const(0.0, one.total.result.element)

        def body(counted: Value, sums: list[Value]) -> Sequence[Value]:
            self[index] = counted
            term = self[terms.x]
            if middle is not None:
                away = b.sub(term, self._spread(middle, terms.pivot, self._like(terms.pivot, middle)))
                term = b.mul(away, away)
            return [b.whole(b.add(sums[0], b.select(self[terms.mask], term, zero)), shape)]

        (found,) = b.loop(
            (start, stop, step), [b.whole(zero, shape)], body, index_name=index.name, **terms.loop.attributes
        )
        return found

    def _like(self, pivot: Value, mean: Value) -> Value:
        """What of the ways that a pivot is spread has the shape of the mean."""
        while pivot.shape != mean.shape:
            op = pivot.producer
            if op is None or op.code not in VEILS:
                raise CannotDerive("a mean has another shape than what it is computed about")
            (pivot,) = op.operands
        return pivot

    def _spread(self, value: Value, like: Value, inner: Value) -> Value:
        """A value spread as `like` spreads `inner`."""
        if like is inner:
            return value
        op = like.producer
        assert op is not None, like
        found = self.b.again(op, (self._spread(value, op.operands[0], inner),))
        assert isinstance(found, Value)
        return found
