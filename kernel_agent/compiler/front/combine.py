"""Products, reductions and scans. What a combine does is found by running it: on all orders of its arguments where it
only compares and chooses, at random points where it only adds and multiplies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.front.items import Item
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Value
from kernel_agent.compiler.ssa.value import Op as Made
from kernel_agent.ir.operations.registry import POINTWISE
from kernel_agent.ir.program import Op

_PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")


@reads("tt.dot")
def _dot(reader: Reader, op: Op, operands: list[Value]) -> Value:
    builder = reader.builder
    a, b = (reader.whole(value, name.type) for value, name in zip(operands[:2], op.operands[:2], strict=True))
    element = element_of(op.results[0].type)
    precision = _PRECISIONS[int(op.attributes.get("inputPrecision", 0))] if "f32" in (a.element, b.element) else None
    return builder.add(operands[2], builder.dot(a, b, precision, element))


# --- what a combine does

_CHOOSING = frozenset(
    ("arith.cmpf", "arith.cmpi", "arith.select", "arith.andi", "arith.ori", "arith.xori", "arith.maxnumf",
     "arith.minnumf", "arith.maximumf", "arith.minimumf", "arith.maxsi", "arith.minsi", "arith.constant")
)  # fmt: skip
_POLYNOMIAL = frozenset(("arith.addf", "arith.addi", "arith.mulf", "arith.muli", "math.fma"))


def _outcome(op: Op, arguments: Sequence[Tensor]) -> list[Tensor]:
    """What the combine of a reduction or scan gives for (points,) tensors."""
    block = op.regions[0][0]
    known = {name.id: value for name, value in zip(block.arguments, arguments, strict=True)}
    for inner in block.ops:
        values = [known[name.id] for name in inner.operands]
        if inner.name.endswith(".return"):
            return values
        if inner.name == "arith.select":
            found = torch.where(*values)
        elif inner.name == "arith.constant":
            found = torch.tensor([inner.attributes["value"]], dtype=inner.results[0].type.dtype)
        else:
            found = POINTWISE[inner.name](inner, *values)
        known[inner.results[0].id] = found
    return []


def _only(op: Op, allowed: frozenset[str]) -> bool:
    """Whether a combine has no other operations, and no constants but true and false."""
    ops = op.regions[0][0].ops
    constants = [inner for inner in ops if inner.name == "arith.constant"]
    captured = op.captures
    return (
        len(op.regions[0]) == 1
        and not captured
        and all(inner.name in allowed for inner in ops[:-1])
        and all(isinstance(inner.attributes["value"], bool) for inner in constants)
    )


def _points(op: Op, values: Sequence[float]) -> list[Tensor]:
    """Every choice of `values` for the arguments of a combine; integers have none that is not finite."""
    types = [name.type for name in op.regions[0][0].arguments]
    choices = [[v for v in values if type_.dtype.is_floating_point or math.isfinite(v)] for type_ in types]
    rows = list(itertools.product(*choices))
    return [torch.tensor(column).to(type_.dtype) for column, type_ in zip(zip(*rows, strict=True), types, strict=True)]


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a.double(), b.double().expand_as(a), rtol=1e-12, atol=0, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )


def _random(op: Op) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    types = [name.type for name in op.regions[0][0].arguments]
    some = [torch.randn(64, generator=generator, dtype=torch.float64) for _ in types]
    return [
        value if type_.dtype.is_floating_point else (value * 50).to(type_.dtype)
        for value, type_ in zip(some, types, strict=True)
    ]


def _is_sum(op: Op) -> bool:
    if len(op.operands) != 1 or not _only(op, _POLYNOMIAL) or op.operands[0].type.scalar.name == "i1":
        return False
    a, b = _random(op)
    return _same(_outcome(op, [a, b]), [a + b])


def _is_product(op: Op) -> bool:
    if len(op.operands) != 1 or not _only(op, _POLYNOMIAL) or not op.operands[0].type.dtype.is_floating_point:
        return False
    a, b = _random(op)
    return _same(_outcome(op, [a, b]), [a * b])


def _extreme(op: Op) -> tuple[Code, dict[str, bool]] | None:
    """The code and attributes of a maximum or minimum."""
    if len(op.operands) != 1 or not _only(op, _CHOOSING) or op.operands[0].type.scalar.name == "i1":
        return None
    a, b = _points(op, (math.nan, 0.0, 1.0))
    found = _outcome(op, [a, b])
    for code, plain, nan in (
        (Code.REDUCE_MAX, torch.fmax, torch.maximum),
        (Code.REDUCE_MIN, torch.fmin, torch.minimum),
    ):
        if not a.is_floating_point() and _same(found, [nan(a, b)]):
            return code, {}
        for wins, function in ((False, plain), (True, nan)):
            if a.is_floating_point() and _same(found, [function(a, b)]):
                return code, {"nan": wins}
    return None


def _picks(op: Op) -> Code | None:
    """ARG_MAX or ARG_MIN for a combine of values and indices that keeps the extreme and the first index, if any, of
    equal ones."""
    if len(op.operands) != 2 or not _only(op, _CHOOSING) or op.operands[1].type.scalar.name not in ("i32", "i64"):
        return None
    v, i, w, j = _points(op, (0.0, 1.0, 2.0))
    apart = (i < j) | ((v != w) & (i != j))  # neighbours: the left one has the lower index, unless values decide
    v, i, w, j = (value[apart] for value in (v, i, w, j))
    found = _outcome(op, [v, i, w, j])
    for code, larger in ((Code.ARG_MAX, v > w), (Code.ARG_MIN, v < w)):
        left = larger | ((v == w) & (i < j))
        wanted = [torch.where(left, v, w), torch.where(left, i, j)]
        strict = v != w
        if _same(found, wanted):
            return code
        if _same([part[strict] for part in found], [part[strict] for part in wanted]) and _same(found[:1], wanted[:1]):
            return code  # which of equal ones is picked was left open
    return None


# --- reductions


@reads("tt.reduce")
def _reduce(reader: Reader, op: Op, operands: list[Value]) -> Sequence[Item]:
    builder, axis = reader.builder, int(op.attributes["axis"])
    tiles = [reader.whole(value, name.type) for value, name in zip(operands, op.operands, strict=True)]
    if _is_sum(op):
        return [builder.sum(tiles[0], axis)]
    extreme = _extreme(op)
    if extreme is not None:
        return [builder.reduce(extreme[0], tiles[0], axis, None, **extreme[1])]
    pick = _picks(op)
    if pick is not None and _counts(operands[1], axis):
        code = Code.REDUCE_MAX if pick is Code.ARG_MAX else Code.REDUCE_MIN
        nan = {"nan": False} if tiles[0].is_float else {}
        index = builder.reduce(pick, tiles[0], axis, tiles[1].element)
        return [builder.reduce(code, tiles[0], axis, None, first=True, **nan), index]
    shape = (*tiles[0].shape[:axis], *tiles[0].shape[axis + 1 :])
    return _generic(reader, op, Code.REDUCE, tiles, [shape] * len(tiles), {"axis": axis})


def _counts(value: Value, axis: int) -> bool:
    """Whether elements are their own index along an axis."""
    op = value.producer
    while op is not None and op.code in (Code.EXPAND, Code.BROADCAST, Code.CAST):
        value = op.operands[0]
        if op.code is Code.EXPAND:
            inserted = op.attributes["axis"]
            if inserted == axis:
                return False
            axis -= inserted < axis
        op = value.producer
    return op is not None and op.code is Code.ARANGE and op.attributes["start"] == 0 and axis == 0


def _generic(
    reader: Reader,
    op: Op,
    code: Code,
    tiles: list[Value],
    shapes: Sequence[tuple[int, ...]],
    attributes: Mapping[str, object],
) -> Sequence[Item]:
    """A reduction or scan with its combine."""
    region = op.regions[0][0]
    block = Block([Value(element_of(name.type), (), name.variable) for name in region.arguments])
    lanes, reader.lanes = reader.lanes, True
    with reader.builder.inside(block):
        reader.set(region.arguments, block.arguments)
        block.yields = [item for item in reader.run(region) if isinstance(item, Value)]
    reader.lanes = lanes
    results = [Value(element_of(name.type), shape) for name, shape in zip(op.results, shapes, strict=True)]
    return list(reader.builder.add_op(Made(code, tiles, results, dict(attributes), [block])).results)


# --- scans


@reads("tt.scan")
def _scan(reader: Reader, op: Op, operands: list[Value]) -> Sequence[Item]:
    builder = reader.builder
    attributes = {"axis": int(op.attributes["axis"]), "reverse": bool(op.attributes.get("reverse", False))}
    tiles = [reader.whole(value, name.type) for value, name in zip(operands, op.operands, strict=True)]
    if _is_sum(op):
        return [builder.pure(Code.CUMSUM, tiles, tiles[0].element, tiles[0].shape, attributes)]
    if _is_product(op):
        return [_products(reader, op, tiles[0], attributes)]
    factor = _linear(op)
    if factor is not None:
        a, x = tiles[factor], tiles[1 - factor]
        found = builder.pure(Code.LINEAR_SCAN, (a, x), x.element, x.shape, attributes)
        product = _products(reader, op, a, attributes) if op.results[factor].id in reader.module.used else a
        return [product, found] if factor == 0 else [found, product]
    return _generic(reader, op, Code.SCAN, tiles, [tile.shape for tile in tiles], attributes)


def _products(reader: Reader, op: Op, tile: Value, attributes: Mapping[str, Any]) -> Value:
    """The products of all elements up to each: h = a * h from a on, that is with x = a at the first and 0 behind."""
    builder, axis = reader.builder, int(attributes["axis"])
    length, symbol = tile.shape[axis], reader.symbols.get((id(op), -2 - axis))
    lane = builder.arange(0, length, symbol)
    for other in range(len(tile.shape)):
        if other != axis:
            lane = builder.expand(lane, other)
    last = builder.const(length - 1, "i32", symbol and f"({symbol} - 1)")
    first = last if attributes["reverse"] else builder.zero(lane)
    start = builder.select(builder.compare("eq", lane, first), tile, builder.zero(tile))
    return builder.pure(Code.LINEAR_SCAN, (tile, start), tile.element, tile.shape, dict(attributes))


def _linear(op: Op) -> int | None:
    """Which operand holds the factors, where a combine is that of h = a * h + x."""
    if len(op.operands) != 2 or not _only(op, _POLYNOMIAL):
        return None
    first, second, third, fourth = _random(op)
    found = _outcome(op, [first, second, third, fourth])
    if _same(found, [first * third, second * third + fourth]):
        return 0
    if _same(found, [first * fourth + third, second * fourth]):
        return 1
    return None


@reads("tt.map_elementwise")
def _map(reader: Reader, op: Op, operands: list[Value]) -> Sequence[Item]:
    if int(op.attributes.get("pack", 1)) != 1:
        raise reader.refuse(op, "tl.map_elementwise works on packs", "Use pack=1.")
    lanes, reader.lanes = reader.lanes, True
    region = op.regions[0][0]
    reader.set(region.arguments, operands)
    found = reader.run(region)
    reader.lanes = lanes
    return found
