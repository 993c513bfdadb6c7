"""Finds 32-bit offsets that wrap at the sizes of a launch, by looking at single points of it; see `points`.

Looked at are the corners of the grid and programs between them, the first, middle and last lane of each dimension, and
the first, second and last iteration of each loop. Nothing is executed, so that sizes do not matter.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.sanitizer.address import Lane, makers, sources
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Findings
from kernel_agent.ir.sanitizer.points import Address, Area, Launched, Point, entered
from kernel_agent.ir.sanitizer.ranges import may_wrap
from kernel_agent.ir.sanitizer.unlimited import Number, Untold, Wrap
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import BlockPointer, Pointer, RuntimeValue

_ACCESSES = {
    "tt.load": "load",
    "tt.store": "store",
    "tt.atomic_rmw": "atomic update",
    "tt.atomic_cas": "atomic update",
    "tt.descriptor_load": "load",
    "tt.descriptor_store": "store",
}
_LIMIT = 1 << 31
_PROGRAMS = 40
_POINTS = 4000
"""Points looked at per access."""
_FEW_POINTS = 200
"""The same where neither a buffer nor an argument nor the grid is large by itself."""
_UNTOLD = 100
"""Points without an answer after which an access is left alone."""


@dataclass(frozen=True)
class _Place:
    """One access with the loops and conditions around it, outermost first."""

    op: Op
    path: tuple[tuple[Op, int], ...]
    """(structured operation, index of the region)."""
    block: Block
    """The block of the entry function that holds it."""


def find_wraps(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    findings: Findings,
    unknown: Collection[int] = (),
) -> None:
    """Add a finding for every access whose address a 32-bit number moves to the wrong place.

    `unknown` are the identities of buffers whose contents must not be read.
    """
    points = _points_worth_looking_at(module, grid, arguments) if math.prod(grid) else 0
    if points == 0:
        return
    entry = module.entry
    given = {parameter.id: value for parameter, value in zip(entry.blocks[0].arguments, arguments, strict=True)}

    def contents(buffer: Buffer, element: int) -> int | None:
        """An integer in memory, where the memory is there."""
        root: Tensor = buffer.root
        if root.is_meta or root.is_floating_point() or id(buffer) in unknown:
            return None
        return int(root.reshape(-1)[element])

    launched = Launched(module, grid, given, contents)
    for place in _places(entry.blocks):
        found = _first_wrap(launched, place, points)
        if found is not None:
            findings.add(found)


def _points_worth_looking_at(module: Module, grid: tuple[int, int, int], arguments: Sequence[RuntimeValue]) -> int:
    """How many points of each access to look at: none where no product can come near the limit."""
    numbers, elements = [1, 1], 0
    for value in arguments:
        pointer = value.base if isinstance(value, BlockPointer) else value
        if isinstance(pointer, Pointer) and pointer.buffer is not None:
            elements = max(elements, pointer.buffer.size)
        elif type(value) is int:
            numbers.append(abs(value))
    *_, second, first = sorted(numbers)
    lanes = math.prod(grid) * module.widest
    if elements < _LIMIT // 2 and lanes * first * second < _LIMIT:
        return 0
    if not may_wrap(module, grid, arguments):
        return 0
    return _POINTS if max(elements, lanes, first << 11) >= _LIMIT // 2 else _FEW_POINTS


def _places(blocks: list[Block]) -> Iterator[_Place]:
    def inside(ops: list[Op], path: tuple[tuple[Op, int], ...], top: Block) -> Iterator[_Place]:
        for op in ops:
            if op.name in _ACCESSES:
                yield _Place(op, path, top)
            if op.name in ("scf.for", "scf.if", "scf.while"):
                for number, region in enumerate(op.regions):
                    for block in region:
                        yield from inside(block.ops, (*path, (op, number)), top)

    for block in blocks:
        yield from inside(block.ops, (), block)


def _first_wrap(launched: Launched, place: _Place, points: int) -> Finding | None:
    tile = _tile(place.op)
    lanes = list(itertools.product(*[_ends(size) for size in tile]))
    looked = untold = 0
    for program in _programs(launched.grid):
        for point in _points(launched, place, program):
            for lane in lanes:
                looked += 1
                try:
                    found = _judge(point, place, lane)
                except Untold:
                    untold += 1
                    continue
                if found is not None:
                    return found
            if looked > points or untold > _UNTOLD:
                return None
    return None


def _tile(op: Op) -> tuple[int, ...]:
    if op.name in ("tt.store", "tt.descriptor_store"):
        return op.operands[1].type.tile
    return op.results[0].type.tile


def _ends(size: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((size - 1, 0, size // 2)))


def _programs(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """The last program first: what wraps does so there, unless a mask stops it."""
    total = math.prod(grid)
    axes = [tuple(dict.fromkeys(max(0, at) for at in (n - 1, n - 2, n // 2, 0))) for n in grid]
    corners = [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    drawn = random.Random(0).sample(range(total), min(total, _PROGRAMS // 2)) if total < 1 << 62 else []
    x, y, _ = grid
    between = [(n % x, n // x % y, n // (x * y)) for n in sorted(drawn, reverse=True)]
    return list(dict.fromkeys([*corners[:_PROGRAMS], *between]))


def _points(launched: Launched, place: _Place, program: tuple[int, int, int]) -> Iterator[Point]:
    """One program at the ends of every loop around an access, where it comes there."""
    start = Point(launched, program, {})
    if place.block not in entered(start, launched.module.entry.blocks):
        return
    points = [start]
    for op, region in place.path:
        points = [inner for point in points for inner in _into(launched, point, op, region)]
    yield from points


def _into(launched: Launched, point: Point, op: Op, region: int) -> list[Point]:
    if op.name == "scf.if":
        try:
            condition = point.number(op.operands[0])
        except Untold:
            return [point]
        return [point] if bool(condition.actual) == (region == 0) else []
    if op.name == "scf.while":
        return [point]
    try:
        trips = point.trips(op)
    except Untold:
        trips = 1
    induction = op.regions[0][0].arguments[0].id
    turns = dict.fromkeys(turn for turn in (trips - 1, 0, 1) if 0 <= turn < trips)
    return [Point(launched, point.program, {**point.iterations, induction: turn}) for turn in turns]


# --- one access


def _judge(point: Point, place: _Place, lane: Lane) -> Finding | None:
    op = place.op
    pointer = point.value(op.operands[0], () if op.operands[0].type.kind is not Kind.TENSOR else lane)
    if isinstance(pointer, Area):
        address, used = _in_block(point, op, pointer, lane)
    elif isinstance(pointer, Address):
        address, used = pointer, _unmasked(point, op, lane)
    else:
        raise Untold(op.name)
    element = address.element
    if not used or element.actual == element.true or element.origin is None:
        return None
    return _finding(point, op, lane, address, element.origin)


def _unmasked(point: Point, op: Op, lane: Lane) -> bool:
    """Whether the mask lets a lane through, as computed or as meant."""
    mask = _mask_of(op)
    if mask is None:
        return True
    number = point.number(op.operands[mask], lane)
    return bool(number.actual or number.true)


def _mask_of(op: Op) -> int | None:
    if op.name == "tt.load":
        segments = op.attributes.get("operandSegmentSizes", (1, int(len(op.operands) > 1), 0))
        return 1 if segments[1] else None
    place = {"tt.store": 2, "tt.atomic_rmw": 2}.get(op.name)
    return place if place is not None and len(op.operands) > place else None


def _in_block(point: Point, op: Op, area: Area, lane: Lane) -> tuple[Address, bool]:
    """Address and use of a lane of a block: the hardware computes both with 64 bits from 32-bit offsets."""
    offsets = area.offsets
    checked = op.attributes.get("boundaryCheck", ())
    if op.name == "tt.descriptor_load":
        offsets = tuple(point.number(operand) for operand in op.operands[1:])
    elif op.name == "tt.descriptor_store":
        offsets = tuple(point.number(operand) for operand in op.operands[2:])
    if op.name.startswith("tt.descriptor"):
        checked = range(len(offsets))
        lane = (0,) * (len(offsets) - len(lane)) + lane
    element, used = area.base.element, True
    for dim, (offset, stride) in enumerate(zip(offsets, area.strides, strict=True)):
        actual, true = offset.actual + lane[dim], offset.true + lane[dim]
        element = Number(
            element.actual + actual * stride.actual,
            element.true + true * stride.true,
            element.origin or offset.origin or stride.origin,
        )
        extent = area.extents[dim].true
        used &= dim not in checked or 0 <= actual < extent or 0 <= true < extent
    return Address(area.base.buffer, area.base.view, element), used


def _finding(point: Point, op: Op, lane: Lane, address: Address, wrap: Wrap) -> Finding:
    module = point.launched.module
    view = address.view or address.buffer.extents.all(address.buffer.name)
    kernel, place, at = module.entry.name, module.place(wrap.op), module.place(op)
    names = [_name(module, operand) for operand in wrap.op.operands]
    sign = {"arith.muli": "*", "arith.addi": "+", "arith.subi": "-", "arith.shli": "<<"}.get(wrap.op.name, "and")
    said = f"{names[0]} {sign} {names[1]} is {wrap.left} {sign} {wrap.right} = {wrap.true}"
    access = _ACCESSES[op.name] + (f" at line {at.line}" if at and place and at.line != place.line else "")
    element = address.element
    message = (
        f"{said}, which int32 cannot hold: the {access} of {view.name} goes to element "
        f"{element.actual - view.shown.offset} instead of {element.true - view.shown.offset}"
        f"{_from_where(module, wrap, names)}; program {point.program}" + (f", lane {list(lane)}" if lane else "")
    )
    where = f"{kernel}, {place.file.rpartition('/')[2]}:{place.line}: " if place else f"{kernel}: "
    variables = dict.fromkeys(source.value.variable for source in sources(module, op, lane))
    return Finding(
        FindingKind.WRAPPED_OFFSET,
        where + message,
        kernel,
        place.file if place else "",
        place.line if place else None,
        view.name,
        element.true - view.shown.offset,
        view.shown.elements,
        point.program,
        lane,
        tuple(variables),
    )


def _from_where(module: Module, wrap: Wrap, names: Sequence[str]) -> str:
    """The smallest number at which a product wraps, where one factor depends on the program and the other does not."""
    if wrap.op.name != "arith.muli" or min(wrap.left, wrap.right) <= 0:
        return ""
    varies = [_depends_on_program(module, operand) for operand in wrap.op.operands]
    if varies[0] == varies[1]:
        return ""
    place = varies.index(True)
    fixed = (wrap.right, wrap.left)[place]
    return f" (it wraps from {names[place]} = {-(-_LIMIT // fixed)} on)"


def _depends_on_program(module: Module, value: Value) -> bool:
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        maker = makers(module).get(current.id)
        if current.id in seen or maker is None:
            continue
        if maker.name == "tt.get_program_id":
            return True
        seen.add(current.id)
        waiting += maker.operands
    return False


def _name(module: Module, operand: Value) -> str:
    """What the source calls an operand: its variable, a number, or the variables it is made of."""
    found = sources(module, Op("", [operand], [], {}, [], [], ""), (0,) * len(operand.type.tile))
    names = list(dict.fromkeys(source.value.variable for source in found))
    if names:
        return names[0] if len(names) == 1 else f"({', '.join(names)})"
    maker = makers(module).get(operand.id)
    while maker is not None and maker.name in ("tt.splat", "tt.expand_dims", "tt.broadcast"):
        maker = makers(module).get(maker.operands[0].id)
    if maker is not None and maker.name == "tt.get_program_id":
        return f"program_id({maker.attributes['axis']})"
    if maker is not None and maker.name == "arith.constant":
        value = maker.attributes["value"]
        return str(value.data if isinstance(value, Dense) else value)
    return "a number"
