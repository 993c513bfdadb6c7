"""`use_moments`: Welford's running means and squares, differentiated as the sums that they end in.

A trip takes n' = n + 1, m' = m + (x - m) / n' and s' = s + (x - m) (x - m') where a mask holds. That ends in the mean
m = sum(x) / n and in s = sum((x - m)**2) (Welford, "Note on a method for calculating corrected sums of squares and
products", 1962). The derivative of s by m is sum(2 (m - x)), zero at the mean: written with the final mean, trips are
independent and nothing of earlier ones is kept. The loop that found the numbers stays. Lanes that have moments of
their own, which a reduction merges in the end, have those of all numbers, about one mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.merged import Merged, merged
from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import depends
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, is_constant, unspread


@dataclass(frozen=True)
class Moments:
    """What a loop finds of some numbers, by places among its carries."""

    x: Value
    mask: Value | None
    """Where x is one of the numbers; None for everywhere."""
    count: int
    mean: int
    squares: int | None
    """Around the mean, if they are asked for."""


def use_moments(kernel: Kernel) -> Saved:
    """A kernel whose running moments have the derivatives of sums; the same where there are none."""
    found = {op: moments for op in kernel.ops if op.code is Code.FOR and (moments := list(_moments(op)))}
    if not found:
        return Saved(kernel, frozenset())
    joined = {op: one for op in kernel.ops if op.code is Code.REDUCE and (one := _joined(op, found)) is not None}
    names = [op.results[one.mean].name or "a mean" for op, several in found.items() for one in several]
    remarks = tuple(f"`{name}` has the derivative of a sum: no tape" for name in names)
    try:
        return Saved(_Summed(kernel, found, joined).copy(), frozenset(), remarks)
    except CannotDerive as reason:
        return Saved(kernel, frozenset(), (f"a running mean keeps its place in the derivative: {reason.message}",))


@dataclass(frozen=True)
class Joined:
    """Moments of lanes that a REDUCE makes one of."""

    loop: Op
    """That found them."""
    moments: Moments
    form: Merged
    """Places among the operands of the REDUCE."""


def _joined(op: Op, found: Mapping[Op, Sequence[Moments]]) -> Joined | None:
    """Of which moments a REDUCE makes one; None for any other."""
    form = merged(op.blocks[0])
    if form is None or form.squares is None or len(op.operands) != 3:
        return None
    count, mean, squares = (op.operands[place] for place in (form.count, form.mean, form.squares))
    for loop, several in found.items():
        for one in several:
            if one.squares is None:
                continue
            wanted = [loop.results[place] for place in (one.count, one.mean, one.squares)]
            if all(map(operator.is_, (count, mean, squares), wanted)):
                return Joined(loop, one, form)
    return None


def _moments(loop: Op) -> Iterator[Moments]:
    """Those of a loop."""
    for mean in range(len(loop.results)):
        one = _mean(loop, mean)
        if one is not None:
            yield one


def _mean(loop: Op, mean: int) -> Moments | None:
    """The moments whose running mean a carry is; None where it is none."""
    (block,) = loop.blocks
    carries, yields = block.arguments[1:], block.yields
    carry = carries[mean]
    for part in _added(loop, mean):
        share = part.producer
        if share is None or share.code is not Code.DIV:
            continue
        divisor = unspread(share.operands[1])
        lowest = divisor.producer
        if lowest is not None and lowest.code is Code.MAX:
            divisor = next((unspread(one) for one in lowest.operands if not is_constant(bare(one), 1)), divisor)
        for count in range(len(carries)):
            mask = _counted(loop, count) if unspread(yields[count]) is divisor else None
            if mask is None:
                continue
            gap, under = _chosen(share.operands[0])
            x = _less(gap, carry)
            if x is None or under is not mask.condition:
                continue
            squares = _squares(loop, mean, x, mask.condition)
            needed = [x, *([] if mask.condition is None else [mask.condition])]
            if not any(depends(value, set(carries)) for value in needed):
                return Moments(x, mask.condition, count, mean, squares)
    return None


@dataclass(frozen=True)
class _Mask:
    """What trips count."""

    condition: Value | None


def _counted(loop: Op, place: int) -> _Mask | None:
    """Where a carry counts by one; None where it does not."""
    for part in _added(loop, place):
        if is_constant(bare(part), 1):
            return _Mask(None)
        op = part.producer
        if op is not None and op.code is Code.CAST and op.operands[0].element == "i1":
            return _Mask(unspread(op.operands[0]))
        if op is not None and op.code is Code.SELECT and is_constant(bare(op.operands[1]), 1):
            return _Mask(unspread(op.operands[0])) if is_constant(bare(op.operands[2]), 0) else None
    return None


def _squares(loop: Op, mean: int, x: Value, mask: Value | None) -> int | None:
    """The carry that adds up (x - m) (x - m') where a mask holds."""
    (block,) = loop.blocks
    means = (block.arguments[1 + mean], unspread(block.yields[mean]))
    for place in range(len(loop.results)):
        for part in _added(loop, place):
            product, under = _chosen(part)
            op = product.producer
            if op is None or op.code is not Code.MUL:
                continue
            (one, inner), (other, own) = map(_chosen, op.operands)
            wheres = [where for where in (under, inner, own) if where is not None]
            fits = all(where is mask for where in wheres) and (bool(wheres) or mask is None)
            if fits and any(
                _less(a, means[0]) is x and _less(b, means[1]) is x for a, b in ((one, other), (other, one))
            ):
                return place
    return None


def _added(loop: Op, place: int) -> list[Value]:
    """What a carry that starts at zero becomes the sum of itself with."""
    (block,) = loop.blocks
    carry, op = block.arguments[1 + place], unspread(block.yields[place]).producer
    if op is None or op.code is not Code.ADD or not carry.is_float:
        return []
    if not is_constant(bare(loop.operands[3 + place]), 0):
        return []
    one, other = map(unspread, op.operands)
    return [other] if one is carry else [one] if other is carry else []


def _chosen(value: Value) -> tuple[Value, Value | None]:
    """x and the condition of where(condition, x, 0); another value, and None."""
    value = unspread(value)
    op = value.producer
    if op is not None and op.code is Code.SELECT and is_constant(bare(op.operands[2]), 0):
        return unspread(op.operands[1]), unspread(op.operands[0])
    return value, None


def _less(value: Value, mean: Value) -> Value | None:
    """The x of x - mean."""
    op = value.producer
    if op is None or op.code is not Code.SUB or unspread(op.operands[1]) is not mean:
        return None
    return unspread(op.operands[0])


class _Summed(Copier):
    """Gives running moments the derivatives of sums."""

    def __init__(self, source: Kernel, found: Mapping[Op, Sequence[Moments]], joined: Mapping[Op, Joined]) -> None:
        super().__init__(source)
        self.found = found
        self.joined = joined

    def loop(self, op: Op) -> None:
        """A FOR."""
        super().loop(op)
        for one in self.found.get(op, ()):
            squares = None if one.squares is None else op.results[one.squares]
            self._sum(_Whole(op, one, op.results[one.count], op.results[one.mean], squares))

    def pure(self, op: Op) -> None:
        """Any other one; a REDUCE too."""
        super().pure(op)
        one = self.joined.get(op)
        if one is not None and not self.slicing:
            form = one.form
            self[op.results[form.count]] = self.b.sum(self[op.operands[form.count]], op.attributes["axis"])
            squares = None if form.squares is None else op.results[form.squares]
            count, mean = op.results[form.count], op.results[form.mean]
            self._sum(_Whole(one.loop, one.moments, count, mean, squares, op.attributes["axis"]))

    def _sum(self, whole: _Whole) -> None:
        """Give a mean and squares their derivatives; those about the mean have it as it is known by then."""
        b, mean, count = self.b, whole.mean, self[whole.count]
        total = self._over_trips(whole, lambda x: x)
        lanes = b.elementwise(Code.MAX, (count, b.const(1.0, count.element)))
        self[mean] = b.known(b.div(total, lanes), self[mean])
        if whole.squares is not None:
            middle = self[mean] if whole.axis is None else b.expand(self[mean], whole.axis)
            middle = b.known(b.zero(middle), middle)

            def square(x: Value) -> Value:
                away = b.sub(x, middle)
                return b.mul(away, away)

            self[whole.squares] = b.known(self._over_trips(whole, square), self[whole.squares])

    def _over_trips(self, whole: _Whole, term: Callable[[Value], Value]) -> Value:
        """A sum over all numbers."""
        b, one = self.b, whole.moments
        (block,) = whole.loop.blocks
        shape = whole.loop.results[one.mean].shape

        def body(index: Value, sums: list[Value]) -> Sequence[Value]:
            self[block.arguments[0]] = index
            part = term(self[one.x])
            if one.mask is not None:
                part = b.select(self[one.mask], part, b.zero(part))
            return [b.whole(b.add(sums[0], part), shape)]

        bounds = self.all(whole.loop.operands[:3])
        (total,) = b.loop(
            (bounds[0], bounds[1], bounds[2]),
            [b.whole(b.const(0.0, whole.mean.element), shape)],
            body,
            index_name=block.arguments[0].name,
            names=[block.arguments[1 + one.mean].name],
            **whole.loop.attributes,
        )
        return total if whole.axis is None else b.sum(total, whole.axis)


@dataclass(frozen=True)
class _Whole:
    """Moments, of lanes or of all of them, and the values that they are."""

    loop: Op
    moments: Moments
    count: Value
    mean: Value
    squares: Value | None
    axis: int | None = None
    """That lanes were merged along."""
