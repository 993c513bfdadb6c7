"""`Kernel`, `Block`, `Op`, `Value`: the parts of a program. Passes do not change them: they build anew by a Builder."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.special import Special

FLOATS = frozenset({"f64", "f32", "f16", "bf16", "f8E5M2", "f8E4M3FN", "f8E4M3FNUZ", "f8E5M2FNUZ"})
"""Elements that derivatives are taken of, by their names in Triton's IR; integers are i1, i8, i16, i32, i64."""
NARROW = FLOATS - {"f64", "f32"}
VEILS = frozenset((Code.EXPAND, Code.CAST, Code.BROADCAST, Code.FULL))
"""What only changes the element of a value, or repeats it."""

_numbers = itertools.count()


class Value:
    """A scalar, a tile, or a pointer argument."""

    __slots__ = ("depth", "element", "id", "name", "producer", "shape", "source_line")

    def __init__(self, element: str, shape: Sequence[int] = (), name: str = "") -> None:
        """`name`: what the source calls it, as a hint, or empty. `element` of a pointer: `*f32`."""
        self.id = next(_numbers)
        self.element = element
        self.shape = tuple(shape)
        self.name = name
        self.producer: Op | None = None
        """None for arguments of kernels and blocks."""
        self.depth = 0
        """Scopes around it, as the builder counts them; 0 is the kernel's own."""
        self.source_line: int | None = None
        """Line of the user's file it comes from, where that is known."""

    @property
    def is_float(self) -> bool:
        """Whether it has derivatives."""
        return self.element in FLOATS

    @property
    def is_pointer(self) -> bool:
        """Whether it is a pointer argument."""
        return self.element.startswith("*")

    @property
    def pointee(self) -> str:
        """The element that a pointer argument points to."""
        assert self.is_pointer, self
        return self.element[1:]

    @property
    def where(self) -> str:
        """` (line 12)` for messages; empty where its line is not known."""
        return f" (line {self.source_line})" if self.source_line else ""

    def __repr__(self) -> str:
        tile = "x".join(map(str, (*self.shape, self.element)))
        return f"%{self.name or ''}.{self.id}:{tile}"


class Op:
    """One operation."""

    __slots__ = ("attributes", "blocks", "code", "operands", "results")

    def __init__(
        self,
        code: Code,
        operands: Sequence[Value],
        results: Sequence[Value],
        attributes: dict[str, Any] | None = None,
        blocks: Sequence[Block] = (),
    ) -> None:
        self.code = code
        self.operands = tuple(operands)
        self.results = tuple(results)
        self.attributes = attributes or {}
        """By key, as `Code` says; hashable values, and `base`, a Value."""
        self.blocks = tuple(blocks)
        for result in self.results:
            result.producer = self

    @property
    def result(self) -> Value:
        """The only result."""
        (result,) = self.results
        return result

    @property
    def base(self) -> Value:
        """The pointer argument that an access goes to."""
        base = self.attributes["base"]
        assert isinstance(base, Value)
        return base

    @property
    def offset(self) -> Value:
        """Of an access, in elements."""
        return self.operands[0]

    @property
    def stored(self) -> Value:
        """What a STORE, STORE_BLOCK or ATOMIC_ADD writes."""
        return self.operands[1]

    @property
    def mask(self) -> Value | None:
        """Of an access; None where all lanes take part."""
        if not self.attributes["masked"]:
            return None
        return self.operands[1 if self.code is Code.LOAD else 2]

    @property
    def other(self) -> Value | None:
        """What masked lanes of a LOAD get; None where that is open."""
        return self.operands[2] if self.attributes.get("padded") else None

    def __repr__(self) -> str:
        return f"{list(self.results)} = {self.code.value} {list(self.operands)} {self.attributes}"


@dataclass(eq=False)
class Block:
    """Operations in order, and what they yield."""

    arguments: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Kernel:
    """A program that runs once for every point of a grid."""

    name: str
    arguments: list[Value]
    """Pointers and scalars, in the order of a launch; no constexprs."""
    body: Block = field(default_factory=Block)
    extents: dict[int, str] = field(default_factory=dict)
    """What the source calls an extent of tiles: 128 -> `BLOCK_M`. Only extents of one name are here."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Values of the constexprs it was lowered with, by name, in the order of the source."""
    fixed: frozenset[str] = frozenset()
    """Numbers among the constants that it depends on by more than symbols: with others it is another kernel."""
    special: dict[str, Special] = field(default_factory=dict)
    """Values of the others with which it is another kernel."""

    def argument(self, name: str) -> Value:
        """The argument of a name. Raises KeyError."""
        for value in self.arguments:
            if value.name == name:
                return value
        raise KeyError(name)

    def free_name(self, wanted: str) -> str:
        """`wanted`, with underscores behind it as long as an argument or a constexpr has that name."""
        taken = {value.name for value in self.arguments} | set(self.constants)
        while wanted in taken:
            wanted += "_"
        return wanted

    @property
    def ops(self) -> Iterator[Op]:
        """Every operation, an operation before what is nested in it."""
        return walk(self.body)


def walk(block: Block) -> Iterator[Op]:
    """Every operation of a block in order, an operation before what is nested in it."""
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)


def constant(value: Value) -> bool | int | float | None:
    """What a CONST is; None for anything else, and for one that launches set."""
    op = value.producer
    if op is None or op.code is not Code.CONST or op.attributes.get("open"):
        return None
    found: bool | int | float = op.attributes["value"]
    return found


def is_setting(value: Value) -> bool:
    """Whether a value is a CONST that launches set."""
    return (
        value.producer is not None and value.producer.code is Code.CONST and bool(value.producer.attributes.get("open"))
    )


def beneath(value: Value, codes: Collection[Code]) -> Value:
    """What a value is made of by operations of these codes alone, each of which has one operand."""
    while value.producer is not None and value.producer.code in codes:
        (value,) = value.producer.operands
    return value


def unspread(value: Value) -> Value:
    """The scalar, or the smaller tile, that a tile repeats; any other value as it is."""
    return beneath(value, (Code.FULL, Code.BROADCAST))


def bare(value: Value) -> Value:
    """A value without what only changes its element or repeats it."""
    return beneath(value, VEILS)


def surely_runs(start: Value, stop: Value, step: Value) -> bool:
    """Whether a loop of these bounds is known to make a trip."""
    first, end, stride = constant(start), constant(stop), constant(step)
    return first is not None and end is not None and stride is not None and stride > 0 and first < end


def is_constant(value: Value, number: float) -> bool:
    """Whether a value is a CONST equal to `number`, of either kind."""
    found = constant(value)
    return found is not None and not isinstance(found, bool) and found == number


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an elementwise result. Raises ValueError where ranks or extents do not go together."""
    tiles = [shape for shape in shapes if shape]
    first = tiles[0] if tiles else ()
    if all(shape == first for shape in tiles):  # nearly always
        return first
    rank = max(map(len, tiles))
    result = [1] * rank
    for shape in tiles:
        if len(shape) != rank:
            raise ValueError(f"tiles of different ranks: {shapes}")
        for axis, extent in enumerate(shape):
            if extent != 1 and result[axis] not in (1, extent):
                raise ValueError(f"tiles that do not broadcast: {shapes}")
            result[axis] = max(result[axis], extent)
    return tuple(result)


def is_smaller(value: Value, like: Value) -> bool:
    """Whether a value must be broadcast to have the extents of another: folding takes extents away."""
    if value.shape == () or len(value.shape) != len(like.shape):
        return value.shape == () != like.shape
    return any(mine == 1 != wanted for mine, wanted in zip(value.shape, like.shape, strict=True))
