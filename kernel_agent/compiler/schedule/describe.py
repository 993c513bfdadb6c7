"""`described`: loops of products that load their tiles by tensor descriptors, where a launch can.

A descriptor says once where a matrix lies; a tile is then loaded by the numbers of its first row and column, by a unit
of its own (Hopper and later): no thread computes an address, asks a mask or keeps an offset. In loops that compute with
products before they multiply again, as attention does, every such instruction stands in the way of those that count.

Hardware asks for rows without gaps between elements, at multiples of 16 bytes. A constexpr says whether a launch may,
so that one kernel serves other strides too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, made_in, written_to
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, broadcast_shape, is_constant, is_setting, unspread

FITS = "loads_tiles"
"""Function of the stub: whether tiles of some tensors can be loaded by descriptors."""
NAME = "DESCRIPTORS"
EVEN = 8
"""Elements of 16 bits in what every row begins at a multiple of."""
MOST = 256
"""Rows or columns of a tile that hardware loads at once."""
_MOVES = frozenset((Code.EXPAND, Code.BROADCAST, Code.FULL))


@dataclass(frozen=True)
class Matrices:
    """What a launch must give for tiles of one tensor to be loaded by descriptors."""

    tensor: str
    """Argument."""
    units: tuple[str, ...]
    """Expressions that must be 1: strides along rows."""
    steps: tuple[str, ...]
    """Expressions that must be multiples of 16 bytes, in elements."""


@dataclass(frozen=True)
class Described:
    """A kernel that may use descriptors."""

    kernel: Kernel
    name: str
    """Its constexpr."""
    matrices: tuple[Matrices, ...]


@dataclass(frozen=True)
class Term:
    """A part of an offset: the product of an index and factors."""

    index: Value
    factors: tuple[Value, ...]
    axis: int | None
    """Of the tile that it was met on; None where it was met on the whole tile."""


@dataclass(frozen=True)
class Tile:
    """A load or a store of rows from `row` on and columns from `col` on of the matrix at `start`."""

    access: Op
    start: tuple[Value, ...]
    """Numbers whose sum it is; so are the next two."""
    row: tuple[Value, ...]
    col: tuple[Value, ...]
    stride: Value
    unit: Value | None
    """Stride of the columns; None where it is 1."""
    limits: tuple[Value | None, Value | None]
    """Rows and columns that there are, where the load asks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        value = self.access.result if self.access.code is Code.LOAD else self.access.stored
        return broadcast_shape([self.access.offset.shape, value.shape])

    @property
    def described_by(self) -> tuple[Value, ...]:
        """The numbers of a descriptor. A loop that defines one would make a descriptor in every trip, for one tile, and
        Triton 3.6 fails to compile such loops."""
        return (*self.start, self.stride, *(limit for limit in self.limits if limit is not None))

    @property
    def matrix(self) -> tuple[Value, ...]:
        """Alike for tiles of one matrix."""
        return (self.access.base, self.stride, *self.start)


def described(kernel: Kernel, launch: Launch) -> Described | None:
    """The kernel with descriptors in its loops of products; None where no loop has a use for them."""
    forms, written = Forms(kernel, launch), written_to(kernel.body)
    uses = Uses.of(kernel)
    tiles: dict[Op, Tile] = {}
    for loop in kernel.ops:
        if loop.code is Code.FOR and _computes_between_products(loop.blocks[0]):
            own = made_in(loop.blocks[0])
            for op in loop.blocks[0].ops:
                free = op.code is Code.LOAD and op.base not in written
                if free and op.attributes.get("form") != BY_DESCRIPTOR and _is_factor(op.result, uses):
                    tile = tile_of(op)
                    if tile is not None and not own.intersection(tile.described_by):
                        tiles[op] = tile
    tiles = _limited(tiles)
    asked = {op: asked_of(forms, tile) for op, tile in tiles.items()}
    tiles = {op: tile for op, tile in tiles.items() if asked[op] is not None}
    if not tiles:
        return None
    name = kernel.free_name(NAME)
    matrices = tuple(dict.fromkeys(one for one in asked.values() if one is not None))
    return Described(TileDescriber(kernel, tiles, name).copy(), name, matrices)


def fits(kernels: Sequence[Described]) -> str:
    """Expression of whether a launch of these may use descriptors."""
    found = dict.fromkeys(one for kernel in kernels for one in kernel.matrices)
    return f"{FITS}({', '.join(_shown(one) for one in found)})"


def _shown(one: Matrices) -> str:
    units, steps = (", ".join(texts) + "," * (len(texts) == 1) for texts in (one.units, one.steps))
    return f"({one.tensor}, ({units}), ({steps}))"


def _computes_between_products(block: Block) -> bool:
    """Whether a loop has products of products: tiles that it computes from products are factors again."""
    products = [op for op in block.ops if op.code is Code.DOT]
    made = {op.result for op in products}
    for op in block.ops:
        if op.code is Code.DOT and made & set(op.operands):
            return True
        if made & set(op.operands) and op.code is not Code.DOT:
            made.update(op.results)
    return False


def _is_factor(value: Value, uses: Uses) -> bool:
    """Whether a tile is read by products alone, turned perhaps."""
    readers = [reader for use in uses[value] for reader in (uses[use.result] if use.code is Code.TRANS else (use,))]
    return bool(readers) and value not in uses.yielded and all(reader.code is Code.DOT for reader in readers)


# --- what a load loads


def tile_of(access: Op) -> Tile | None:
    """A load or a store of a tile of a matrix as such; None where it is anything else."""
    value = access.result if access.code is Code.LOAD else access.stored
    shape = broadcast_shape([operand.shape for operand in (access.offset, value)])
    if len(shape) != 2 or not value.is_float or max(shape) > MOST or min(shape) < EVEN:
        return None
    if access.code is Code.LOAD and access.other is not None and not is_constant(unspread(access.other), 0):
        return None
    terms = index_terms(access.offset)
    lanes = [lane_of(terms, axis) for axis in (0, 1)]
    if lanes[0] is None or lanes[1] is None or len(lanes[0].factors) != 1 or len(lanes[1].factors) > 1:
        return None
    parts: tuple[list[Value], list[Value], list[Value]] = ([], [], [])
    for term in terms:
        if term in lanes:
            continue
        if term.index.shape:
            return None
        axis = next((n for n, lane in enumerate(lanes) if lane and _along(term, lane, n)), None)
        if axis is None and term.factors:
            return None
        parts[2 if axis is None else axis].append(term.index)
    if any(value.element != "i32" for value in (*parts[0], *parts[1])):
        return None
    limits = _limits(access.mask, (lanes[0], lanes[1]), parts)
    if limits is None:
        return None
    unit = next(iter(lanes[1].factors), None)
    return Tile(access, tuple(parts[2]), tuple(parts[0]), tuple(parts[1]), lanes[0].factors[0], unit, limits)


def lane_of(terms: Iterable[Term], axis: int | None) -> Term | None:
    """The term that counts the lanes of an axis, where one does."""
    found = [term for term in terms if term.index.shape and term.axis == axis]
    return found[0] if len(found) == 1 and is_count(found[0].index) else None


def is_count(value: Value) -> bool:
    """Whether a tile counts its lanes from zero."""
    op = value.producer
    return op is not None and op.code is Code.ARANGE and op.attributes["start"] == 0


def _along(term: Term, lane: Term, axis: int) -> bool:
    """Whether a number is added to the index of an axis."""
    return term.axis == axis and term.factors == lane.factors


def index_terms(value: Value, factors: tuple[Value, ...] = (), axis: int | None = None) -> list[Term]:
    """What an index is the sum of, in order."""
    op = value.producer
    if op is not None and value.shape:
        if op.code is Code.ADD:
            return [term for operand in op.operands for term in index_terms(operand, factors, axis)]
        if op.code is Code.CAST and not op.attributes.get("unsigned"):
            return index_terms(op.operands[0], factors, axis)
        if op.code in _MOVES:
            if op.code is Code.EXPAND:
                axis = 1 - int(op.attributes["axis"])
            return index_terms(op.operands[0], factors, axis)
        if op.code is Code.MUL:
            for one, other in (op.operands, op.operands[::-1]):
                number = unspread(other)
                if number.shape == ():
                    return index_terms(one, (*factors, _narrow(number)), axis)
    elif op is not None and op.code is Code.ADD:
        return [term for operand in op.operands for term in index_terms(operand, factors, axis)]
    elif op is not None and axis is not None:
        value = _narrow(value)
    return [Term(value, factors, axis)]


def _narrow(value: Value) -> Value:
    """A number before it was widened."""
    op = value.producer
    widened = op is not None and op.code is Code.CAST and value.element == "i64" and op.operands[0].element == "i32"
    return op.operands[0] if op is not None and widened else value


def _limits(
    mask: Value | None, lanes: tuple[Term, Term], parts: Sequence[Sequence[Value]]
) -> tuple[Value | None, Value | None] | None:
    """The extents that a mask asks for along both axes; None where it asks for anything else."""
    found: list[Value | None] = [None, None]
    for condition in conditions_of(mask, None) if mask is not None else ():
        op = condition.value.producer
        if op is None or op.code is not Code.CMP or op.attributes.get("unsigned"):
            return None
        predicate = op.attributes["predicate"]
        index, limit = op.operands if predicate == "lt" else op.operands[::-1]
        limit = unspread(limit)
        terms = index_terms(index, (), condition.axis)
        counted = [(term.index, term.axis) for term in terms]
        place = next((n for n, lane in enumerate(lanes) if (lane.index, n) in counted), None)
        if predicate not in ("lt", "gt") or place is None or limit.shape or found[place] is not None:
            return None
        if any(term.axis != place or term.factors for term in terms):
            return None
        numbers = [term.index for term in terms if not term.index.shape]
        if numbers != list(parts[place]) or len(numbers) + 1 != len(terms):
            return None
        found[place] = limit
    return found[0], found[1]


@dataclass(frozen=True)
class Condition:
    """What must hold where a mask does."""

    value: Value
    axis: int | None
    """Of the tile that it speaks of; None where it was met on the whole tile."""
    spares: Value | None = None
    """The constexpr that says that it holds, where one may."""


def conditions_of(mask: Value, axis: int | None, spares: Value | None = None) -> list[Condition]:
    """What all must hold where a mask does."""
    op = mask.producer
    if op is not None and op.code is Code.OR and is_setting(op.operands[1]):
        return conditions_of(op.operands[0], axis, op.operands[1])
    if op is not None and op.code in _MOVES | {Code.AND}:
        axis = 1 - int(op.attributes["axis"]) if op.code is Code.EXPAND else axis
        return [part for operand in op.operands for part in conditions_of(operand, axis, spares)]
    return [Condition(mask, axis, spares)]


def _limited(tiles: dict[Op, Tile]) -> dict[Op, Tile]:
    """Tiles with a number of rows: a loop whose trips ask no mask loads of the same matrix as the one that does."""
    known = {(tile.matrix, op.result.source_line): tile.limits[0] for op, tile in tiles.items() if tile.limits[0]}
    found = {}
    for op, tile in tiles.items():
        rows = tile.limits[0] or known.get((tile.matrix, op.result.source_line))
        if rows is not None and (tile.limits[1] is not None or not tile.col):
            found[op] = Tile(op, tile.start, tile.row, tile.col, tile.stride, tile.unit, (rows, tile.limits[1]))
    return found


def asked_of(forms: Forms, tile: Tile) -> Matrices | None:
    """What a launch must give; None where that cannot be asked, or does not hold."""
    stride = forms.of(tile.stride).invariant
    unit = ONE if tile.unit is None else forms.of(tile.unit).invariant
    if stride is None or unit is None or not unit.printable or (unit.number is not None and unit != ONE):
        return None
    texts = asked_steps(forms, tile.start, EVEN, (stride,))
    return None if texts is None else Matrices(tile.access.base.name, () if unit == ONE else (unit.text(),), texts)


def asked_steps(
    forms: Forms, start: Iterable[Value], even: int, others: Iterable[Polynomial] = ()
) -> tuple[str, ...] | None:
    """Expressions that must be multiples of `even` for what begins at the sum of `start` to do so in all programs, and
    `others`; None where that cannot be asked, or does not hold."""
    steps: list[Polynomial] = []
    for value in start:
        form = forms.of(value)
        steps += [*(number for _, number in form.terms), form.base]
    steps += others
    if any(not step.printable or (step.number or 0) % even for step in steps):
        return None
    return tuple(dict.fromkeys(step.text() for step in steps if step.number is None))


def sum_of(copier: Copier, numbers: Sequence[Value]) -> Value:
    """Of the copies of numbers; zero of none."""
    found = copier.all(numbers) or [copier.b.const(0)]
    total = found[0]
    for number in found[1:]:
        total = copier.b.add(total, number)
    return total


class Describer(Copier):
    """Copies a kernel, with a branch around the loads of each loop that have descriptors. A subclass says which."""

    def __init__(self, source: Kernel, loads: Collection[Op], name: str) -> None:
        super().__init__(source)
        self.loads = loads
        self.name = name
        self.b.kernel.constants[name] = True

    def descriptor_of(self, load: Op) -> Value:
        """The descriptor for a load."""
        raise NotImplementedError

    def corner(self, load: Op) -> list[Value]:
        """The numbers of the first row and column that it loads."""
        raise NotImplementedError

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """All of a block's loads where the first one is."""
        mine = [op for op in block.ops if op in self.loads]
        for op in block.ops:
            if mine and op is mine[0]:
                self._load(mine)
            elif op not in self.loads:
                self.op(op)
        return self.all(block.yields if kept is None else [block.yields[place] for place in kept])

    def _load(self, loads: Sequence[Op]) -> None:
        b = self.b
        hint, line, b.hint, b.line = b.hint, b.line, "", loads[0].result.source_line
        descriptors = [self.descriptor_of(op) for op in loads]
        corners = [self.corner(op) for op in loads]

        def by_descriptor() -> Sequence[Value]:
            return [
                b.load_block(made, corner, op.result.name)
                for op, made, corner in zip(loads, descriptors, corners, strict=True)
            ]

        def by_pointers() -> Sequence[Value]:
            for op in loads:
                self.op(op)
            return self.all(op.result for op in loads)

        found = b.branch(b.setting(self.name), by_descriptor, by_pointers)
        for op, value in zip(loads, found, strict=True):
            self[op.result] = value
            value.source_line = op.result.source_line
        b.hint, b.line = hint, line


class TileDescriber(Describer):
    """Of tiles of matrices."""

    def __init__(self, source: Kernel, tiles: Mapping[Op, Tile], name: str) -> None:
        super().__init__(source, tiles, name)
        self.tiles = tiles

    def descriptor_of(self, load: Op) -> Value:
        """Of its matrix."""
        tile = self.tiles[load]
        rows, cols = tile.limits
        assert rows is not None
        extents = (self[rows], self.b.extent(tile.shape[1]) if cols is None else self[cols])
        return self.b.descriptor(load.base, sum_of(self, tile.start), extents, (self[tile.stride],), tile.shape)

    def corner(self, load: Op) -> list[Value]:
        """Row and column."""
        return [sum_of(self, self.tiles[load].row), sum_of(self, self.tiles[load].col)]
