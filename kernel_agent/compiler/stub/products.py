"""`product_tiles`: sizes that a launch which sums, mostly matrix products, starts with, where it chooses its tiles.

The forward's sizes suit the forward. A backward kernel holds other sums in registers: two accumulators where the
forward had one, or a row of the output where it had a column. Two ways of working are known. Where every extent of the
sum is a tile, the kernel is a product of matrices. Where one is a width that the call gives, such as a head's, the
kernel owns a tile of rows, walks over tiles of others, and holds tiles of owned by walked elements, the scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.schedule.hold import operands_held
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, walk

LARGE = 64
"""A forward with no larger tile than this was not written for matrices that fill a GPU: its numbers stay."""
REGISTERS = 200
"""Of the 255 of a thread, for accumulators and scores; addresses and operands of products take the others."""
ACCUMULATOR = 64
"""Registers of a thread for one accumulator; more warps share what is wider."""
SHARED = {8: 160 << 10, 4: 108 << 10}
"""Bytes of shared memory for what is owned and for the tiles under way, by warps; the scores take some of the 227 KiB,
too. Programs of four warps are two on a processor."""
OWNED, WARPS = (128, 64), (4, 8)
WALKED = ((128, 3), (64, 3), (64, 2), (32, 4), (32, 3), (16, 4))
"""Tiles that are walked by, with the stages that hide their loads."""
LEAST = (64, 16)
"""Of a walk, if possible: sm_90 loads the factors of a narrower product for longer than it multiplies them."""
NARROW, LONG = 32, 256
"""Of a kernel that sums elements: the tile that is owned, a sector of memory or two wide, and the one walked by."""
WARP = 32
WIDTHS = (128, 256)
"""Bytes of a row up to which there is a choice of its own; the last choice is for anything wider, sized for the
double."""
HALF = 2
"""Bytes of an element that the choices are sized for. Rows of wider ones hold fewer, so that they need no more."""


@dataclass(frozen=True)
class ProductTiles:
    """What a launch starts with, perhaps depending on the width of a row."""

    tiles: tuple[str, ...]
    """Constexprs that are given sizes."""
    width: str
    """Constexpr of the extent that the call gives; empty where there is none."""
    operand: str
    """Argument of the kernel that the products read: the bytes of its elements matter. Empty where they do not."""
    choices: tuple[Mapping[str, int], ...]
    """Sizes by constexpr, with `num_warps` and `num_stages`, for each of WIDTHS and for what is wider; one where no
    width is given."""
    per_row: str = ""
    """Of a product of matrices: the tile that is walked by, as many elements as 128 bytes hold."""


@dataclass(frozen=True)
class _Sums:
    """Accumulators of the loops of a kernel over products."""

    extents: frozenset[tuple[int, ...]]
    accumulators: int
    scores: frozenset[tuple[int, ...]]
    """Extents of products that are not summed."""
    alive: int
    """Of those, in one trip."""
    inside: tuple[Op, ...]
    """Operations of one loop."""


def product_tiles(kernel: Kernel, chosen: Collection[str], readable: Collection[str]) -> ProductTiles | None:
    """Sizes for the tiles a launch chooses; None where it is another kind of kernel.

    `chosen`: those tiles; `readable`: arguments whose bytes per element the backward can ask for.
    """
    sums = _sums(kernel)
    if sums is None:
        return _narrow(kernel, chosen)
    if len(sums.extents) != 1:
        return None
    (extents,) = sums.extents
    names = [kernel.extents.get(extent, "") for extent in extents]
    walked = {kernel.extents.get(extent, "") for op in sums.inside for extent in _extents(op)}
    walked = (walked & set(chosen)) - set(names)
    loads = [op for op in sums.inside if op.code is Code.LOAD and len(op.result.shape) == 2]
    operand = next((op.base.name for op in loads if op.base.name in readable), "")
    if len(extents) != 2 or len(walked) != 1 or not operand or "" in names or len(set(names)) != 2:
        return None
    (step,) = walked
    own = [name for name in names if name in chosen]
    if len(own) == 2 and not sums.scores and set(chosen) == {*own, step}:
        sizes = {**dict.fromkeys(own, 128), "num_warps": 8, "num_stages": 3}
        return ProductTiles((*own, step), "", operand, (sizes,), per_row=step)
    if len(own) != 1 or not sums.scores or set(chosen) != {own[0], step}:
        return None
    if any({kernel.extents.get(extent) for extent in shape} != {own[0], step} for shape in sums.scores):
        return None
    (width,) = (name for name in names if name not in chosen)
    rows = (*WIDTHS, 2 * WIDTHS[-1])
    found = [
        fitting(width, sums.accumulators, sums.alive, len(loads), operands_held(kernel, width))
        for width in (row // HALF for row in rows)
    ]
    if any(one is None for one in found):
        return None
    choices = tuple(
        {own[0]: one.owned, step: one.walked, "num_warps": one.warps, "num_stages": one.stages} for one in found if one
    )
    return ProductTiles((own[0], step), width, operand, choices)


def _narrow(kernel: Kernel, chosen: Collection[str]) -> ProductTiles | None:
    """Sizes for a kernel whose programs own a few sums and walk over all there is to add, without products.

    A forward has programs for tiles both ways, such a kernel one way only: narrow tiles make it as many programs, and
    a long walk at once keeps enough loads under way.
    """
    loops = [op for op in kernel.ops if op.code is Code.FOR]
    if len(loops) != 1 or len(chosen) != 2 or any(op.code is Code.DOT for op in kernel.ops):
        return None
    added = [op for op in _carried(loops[0].blocks[0]) if op.code is Code.ADD]
    if len(added) != len(loops[0].blocks[0].yields) or any(len(op.result.shape) != 1 for op in added):
        return None
    owned = {kernel.extents.get(op.result.shape[0], "") for op in added}
    walked = set(chosen) - owned
    loads = [op.result.shape for op in walk(loops[0].blocks[0]) if op.code is Code.LOAD and len(op.result.shape) == 2]
    if len(owned) != 1 or len(walked) != 1 or not loads:
        return None
    if any({kernel.extents.get(extent) for extent in shape} != set(chosen) for shape in loads):
        return None
    sizes = {owned.pop(): NARROW, walked.pop(): LONG, "num_warps": 8, "num_stages": 3}
    return ProductTiles(tuple(chosen), "", "", (sizes,))


@dataclass(frozen=True)
class Fitting:
    """Sizes that fit."""

    owned: int
    """Rows of a program."""
    walked: int
    """Rows of a trip."""
    warps: int
    stages: int
    """Trips whose loads are under way."""


def fitting(width: int, accumulators: int, scores: int, loaded: int, operands: int = 0) -> Fitting | None:
    """The largest tiles that registers and shared memory have room for, by the fewest warps.

    `width`: elements of a row; `scores`: tiles of owned by walked elements in registers; `loaded`: tiles of a trip;
    `operands`: owned tiles in registers, which are then not in shared memory. Where there are several accumulators, or
    operands, fewer warps come before larger tiles: two programs on a processor compute while the other one multiplies,
    and each has more to compute for every tile that it loads.
    """
    shapes = [(owned, warps) for owned in OWNED for warps in WARPS]
    if accumulators > 1 or operands:
        shapes.sort(key=lambda shape: shape[1])
    for least in LEAST:
        for owned, warps in shapes:
            held = owned * width // (warps * WARP)
            if held > ACCUMULATOR:
                continue
            for walked, stages in WALKED:
                shared = HALF * width * ((0 if operands else 2 * owned) + stages * loaded * walked)
                registers = (accumulators + operands / HALF) * held + scores * owned * walked // (warps * WARP)
                if least <= walked <= owned and registers <= REGISTERS and shared <= SHARED[warps]:
                    return Fitting(owned, walked, warps, stages)
    return None


def _sums(kernel: Kernel) -> _Sums | None:
    """The sums of products that loops carry; None where there are none."""
    extents, scores, counts, alive = set(), set(), set(), set()
    inside: tuple[Op, ...] = ()
    for op in kernel.ops:
        if op.code is not Code.FOR:
            continue
        products = set(_products(op.blocks[0]))
        if not products:
            continue
        summed = {
            product
            for product in products
            if any(product is add or product.result in add.operands for add in _carried(op.blocks[0]))
        }
        if not summed:
            continue
        inside = tuple(walk(op.blocks[0]))
        extents |= {product.result.shape for product in summed}
        scores |= {product.result.shape for product in products - summed}
        counts.add(len(summed))
        alive.add(len(products - summed))
    if not inside or len(counts) != 1 or len(alive) != 1:
        return None
    return _Sums(frozenset(extents), counts.pop(), frozenset(scores), alive.pop(), inside)


def _products(block: Block) -> Iterator[Op]:
    return (op for op in block.ops if op.code is Code.DOT)


def _carried(block: Block) -> Iterator[Op]:
    """What a loop hands on from trip to trip, where that is a sum."""
    for value in block.yields:
        if value.producer is not None and value.producer.code in (Code.ADD, Code.DOT):
            yield value.producer


def _extents(op: Op) -> Iterator[int]:
    for value in op.results:
        yield from value.shape
