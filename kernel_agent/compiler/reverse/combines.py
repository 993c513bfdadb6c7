"""The adjoint of a REDUCE or SCAN with a combine of its own, by the combine's own derivative.

A combine is associative, so a reduction is f(f(before, x[i]), after) for every i, with what the elements before and
after x[i] come to: two scans, unless it merges moments, whose derivatives are known (see `merged`). A running total is
t[i] = f(t[i-1], x[i]); its adjoint is the linear recurrence d[i] = g[i] + c[i+1] d[i+1] with the derivative c of f by
its first argument, and x[i] gets d[i] times that by the second. Of several tiles that holds for each where its total
does not depend on those of the others; where it does, c is a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.elements import adjoint_element, index_along, last_along, moved_along
from kernel_agent.compiler.reverse.merged import merged, reduced
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.value import Block, Op, Value, broadcast_shape

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


def reverse_combine(r: Reversal, op: Op, cotangents: Cotangents) -> None:
    """The adjoint of a REDUCE or SCAN. Raises CannotDerive for a combine that does more than compute."""
    incoming = [cotangents.get(result) for result in op.results]
    if all(g is None for g in incoming) or all(value not in r.activity for value in op.operands):
        return
    b = r.b
    xs = [b.whole(r[value], value.shape) for value in op.operands]
    settled = [None if g is None else r.lanes.settled(g) for g in incoming]
    parts = _of_reduce(r, op, xs, settled) if op.code is Code.REDUCE else _of_scan(r, op, xs, settled)
    for value, part in zip(op.operands, parts, strict=True):
        cotangents.add(value, part)


def _of_reduce(r: Reversal, op: Op, xs: list[Value], incoming: list[Value | None]) -> list[Value | None]:
    b, axis, count = r.b, op.attributes["axis"], len(xs)
    shape = xs[0].shape
    form = merged(op.blocks[0])
    if form is not None:
        ends = [b.expand(r[result], axis) for result in op.results]
        return reduced(b, form, xs, ends, [None if g is None else b.expand(g, axis) for g in incoming])
    first, last = _ends(b, shape, axis)
    before = [moved_along(b, value, axis, -1) for value in _scanned(b, op, xs)]
    after = [moved_along(b, value, axis, 1) for value in _scanned(b, op, xs, back=True)]
    combine = _Combine(r, op, shape)
    joined = combine.run([*before, *xs])
    upto = [b.select(first, x, value) for x, value in zip(xs, joined, strict=True)]
    whole = [None if g is None else b.expand(g, axis) for g in incoming]
    inside = combine.adjoint([*upto, *after], [_unless(b, last, g) for g in whole])[:count]
    total = [_either(b, last, end, part) for end, part in zip(whole, inside, strict=True)]
    parts = combine.adjoint([*before, *xs], [_unless(b, first, g) for g in total])[count:]
    return [_either(b, first, end, part) for end, part in zip(total, parts, strict=True)]


def _of_scan(r: Reversal, op: Op, xs: list[Value], incoming: list[Value | None]) -> list[Value | None]:
    b, axis, back = r.b, op.attributes["axis"], bool(op.attributes.get("reverse"))
    shape, count = xs[0].shape, len(xs)
    start = _ends(b, shape, axis)[1 if back else 0]
    before = [moved_along(b, b.whole(r[result], shape), axis, 1 if back else -1) for result in op.results]
    combine = _Combine(r, op, shape)
    parts: list[Value | None] = [None] * count
    for place, g in enumerate(incoming):
        if g is None:
            continue
        one = b.number(1.0, g)
        slopes = combine.adjoint([*before, *xs], [one if k == place else None for k in range(count)])
        if any(slope is not None for k, slope in enumerate(slopes[:count]) if k != place):
            return _of_coupled(combine, op, xs, before, incoming)
        total = _recurrence(b, b.whole(g, shape), slopes[place], {"axis": axis, "reverse": not back})
        for k, slope in enumerate(slopes[count:]):
            own = _either(b, start, one if k == place else None, slope)
            if own is not None:
                part = b.mul(total, own)
                known = parts[k]
                parts[k] = part if known is None else b.add(known, part)
    return parts


def _of_coupled(
    combine: _Combine, op: Op, xs: list[Value], before: list[Value], incoming: list[Value | None]
) -> list[Value | None]:
    """Of a SCAN whose totals depend on each other: d[i] = g[i] + C[i+1]' d[i+1] with a matrix C, by a scan of maps
    d -> M d + v, of which a later one is applied first: (M, v) after (N, w) is (M N, M w + v)."""
    b, axis, back = combine.r.b, op.attributes["axis"], bool(op.attributes.get("reverse"))
    shape, places = xs[0].shape, [k for k, x in enumerate(xs) if x.is_float]
    ends = _ends(b, shape, axis)
    first, last = ends[::-1] if back else ends
    element = adjoint_element(xs[places[0]].element)
    one, zero = b.const(1.0, element), b.const(0.0, element)

    def moved(slope: Value | None) -> Value:
        if slope is None:
            return b.whole(zero, shape)
        return b.whole(b.select(last, zero, moved_along(b, b.whole(slope, shape), axis, -1 if back else 1)), shape)

    slopes = {p: combine.adjoint([*before, *xs], [one if k == p else None for k in range(len(xs))]) for p in places}
    tiles = [moved(slopes[p][k]) for k in places for p in places]
    tiles += [b.whole(zero if g is None else g, shape) for k in places for g in [incoming[k]]]
    found = b.add_op(_maps(b, tiles, len(places), {"axis": axis, "reverse": not back})).results
    total: list[Value | None] = [None] * len(xs)
    for k, value in zip(places, found[-len(places) :], strict=True):
        total[k] = value
    parts = combine.adjoint([*before, *xs], [_unless(b, first, g) for g in total])[len(xs) :]
    return [_either(b, first, end, part) for end, part in zip(total, parts, strict=True)]


def _maps(b: Builder, tiles: list[Value], size: int, along: dict[str, Any]) -> Op:
    """The SCAN that composes maps of vectors of a size: matrices by rows, then vectors."""
    arguments = [Value(tile.element) for tile in (*tiles, *tiles)]
    block = Block(arguments)
    inner, outer = arguments[: len(tiles)], arguments[len(tiles) :]

    def row_by(row: int, column: list[Value]) -> Value:
        terms = [b.mul(outer[row * size + k], value) for k, value in enumerate(column)]
        total = terms[0]
        for term in terms[1:]:
            total = b.add(total, term)
        return total

    with b.inside(block):
        columns = [[inner[k * size + column] for k in range(size)] for column in range(size)]
        block.yields = [row_by(row, column) for row in range(size) for column in columns]
        block.yields += [b.add(row_by(row, inner[size * size :]), outer[size * size + row]) for row in range(size)]
    return Op(Code.SCAN, tiles, [Value(tile.element, tile.shape) for tile in tiles], along, [block])


def _recurrence(b: Builder, g: Value, slope: Value | None, along: dict[str, int]) -> Value:
    """d[i] = g[i] + slope[i + 1] d[i + 1], or i - 1 as `along` says."""
    if slope is None:
        return g
    c = b.whole(slope, g.shape)
    return b.add(g, b.pure(Code.LINEAR_SCAN_BEFORE, (c, b.mul(c, g)), g.element, g.shape, along))


class _Combine:
    """The combine of an operation, on tiles."""

    def __init__(self, r: Reversal, op: Op, shape: tuple[int, ...]) -> None:
        self.r = r
        self.block = _tiled(op.blocks[0], shape)
        values = [*self.block.arguments, *(result for inner in self.block.ops for result in inner.results)]
        r.activity.varied.update(value for value in values if value.is_float)

    def run(self, arguments: Sequence[Value]) -> list[Value]:
        """What it gives."""
        for old, new in zip(self.block.arguments, arguments, strict=True):
            self.r[old] = new
        return self.r.block(self.block)

    def adjoint(self, arguments: Sequence[Value], incoming: Sequence[Value | None]) -> list[Value | None]:
        """Cotangents of its arguments, None where they are zero."""
        self.run(arguments)
        found = self.r.fresh()
        for value, g in zip(self.block.yields, incoming, strict=True):
            found.add(value, g)
        self.r.reverse(self.block, found)
        return [found.get(value) for value in self.block.arguments]


def _tiled(block: Block, shape: tuple[int, ...]) -> Block:
    """A combine of scalars as one of tiles. Raises CannotDerive where it does more than compute."""
    arguments = [Value(value.element, shape, value.name) for value in block.arguments]
    known = dict(zip(block.arguments, arguments, strict=True))
    made = Block(arguments)
    for op in block.ops:
        if op.code not in ELEMENTWISE | {Code.CONST}:
            raise CannotDerive(
                f"the combine of a reduction or scan has a {op.code.value}, which has no derivative rule there",
                remedy="choose with tl.where instead",
            )
        operands = [known.get(value, value) for value in op.operands]
        result = Value(op.result.element, broadcast_shape([value.shape for value in operands]), op.result.name)
        made.ops.append(Op(op.code, operands, [result], dict(op.attributes)))
        known[op.result] = result
    made.yields = [known.get(value, value) for value in block.yields]
    return made


def _scanned(b: Builder, op: Op, xs: list[Value], *, back: bool = False) -> tuple[Value, ...]:
    """Running totals up to each element, or with `back` from each one on: arguments change places then."""
    source = op.blocks[0]
    half = len(xs)
    values = [Value(value.element, (), value.name) for value in source.arguments]
    known = dict(zip(source.arguments, [*values[half:], *values[:half]] if back else values, strict=True))
    block = Block(values)
    for inner in source.ops:
        result = Value(inner.result.element, (), inner.result.name)
        operands = [known.get(value, value) for value in inner.operands]
        block.ops.append(Op(inner.code, operands, [result], dict(inner.attributes)))
        known[inner.result] = result
    block.yields = [known.get(value, value) for value in source.yields]
    results = [Value(x.element, x.shape) for x in xs]
    return b.add_op(Op(Code.SCAN, xs, results, {"axis": op.attributes["axis"], "reverse": back}, [block])).results


def _ends(b: Builder, shape: tuple[int, ...], axis: int) -> tuple[Value, Value]:
    """Masks of the first and the last element along an axis."""
    index = index_along(b, shape, axis)
    return b.compare("eq", index, b.const(0)), b.compare("eq", index, last_along(b, shape, axis))


def _unless(b: Builder, condition: Value, g: Value | None) -> Value | None:
    return None if g is None else b.select(condition, b.zero(g), g)


def _either(b: Builder, condition: Value, end: Value | None, part: Value | None) -> Value | None:
    """`end` where the condition holds, `part` elsewhere; None is zero."""
    given = end if end is not None else part
    if given is None:
        return None
    zero = b.const(0.0, adjoint_element(given.element))
    return b.select(condition, zero if end is None else end, zero if part is None else part)
