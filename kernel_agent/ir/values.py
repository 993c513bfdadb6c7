"""Values of the executor: one torch tensor holds a value of all active programs at once.

A value is a tensor `[P or 1, *tile]` whose tile dimensions may be 1 where the value does not vary (lazy broadcast).
Divergent programs are not masked but compacted: an `Active` set holds the programs that take a path, and values of an
outer set are narrowed to it when read. That keeps lanes that never run from contaminating gradients (0 x NaN).

When programs run on a GPU, numbers that are the same for all of them (scalar arguments, constants, and what is made of
these) stay on the host as tensors of one element: a loop asks the device for its bounds only where programs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernel_agent.ir.memory import Buffer
    from kernel_agent.ir.sanitizer.views import View

RuntimeValue = Any
"""A tensor, a `Pointer`, a `BlockPointer` or `Bits`."""


class Active:
    """A set of programs that run together; the root set is one launch, children are subsets of their parent."""

    def __init__(self, ids: Tensor, parent: Active | None = None, rows: Tensor | None = None) -> None:
        self.ids = ids
        """Linear program ids, shape (P,), int64."""
        self.parent = parent
        self.rows = rows
        """Positions of these programs in the parent, shape (P,), int64; None at the root."""
        self.size = int(ids.numel())
        self.narrowed: dict[int, tuple[RuntimeValue, RuntimeValue]] = {}
        """Value id -> (value of the outer set, the same narrowed to this set)."""

    def subset(self, rows: Tensor) -> Active:
        """The programs at the given positions."""
        return Active(self.ids[rows], self, rows)

    def is_within(self, ancestor: Active) -> bool:
        """Whether these programs were narrowed from `ancestor`, or are that set itself."""
        current: Active | None = self
        while current is not None and current is not ancestor:
            current = current.parent
        return current is ancestor

    def rows_in(self, ancestor: Active) -> Tensor:
        """Positions of these programs in an ancestor set."""
        rows = torch.arange(self.size, device=self.ids.device)
        current = self
        while current is not ancestor:
            if current.parent is None or current.rows is None:
                raise RuntimeError("a value was read outside the programs it was computed for")
            rows = current.rows[rows]
            current = current.parent
        return rows


class Deferred:
    """A value that is kept in another form than one tensor; only machines that make such values meet them."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Deferred:
        """The same value for other programs."""
        raise NotImplementedError

    @classmethod
    def join(cls, pieces: Sequence[tuple[Tensor, RuntimeValue]], size: int) -> RuntimeValue:
        """See `join_rows`; at least one piece is of this class."""
        raise NotImplementedError


@dataclass(eq=False)
class Pointer:
    """Pointers into one buffer, or, without a buffer, virtual byte addresses."""

    buffer: Buffer | None
    offset: Tensor
    """Elements from the start of the buffer, or the virtual byte address; int64."""
    view: View | None = None
    """What of the buffer the argument reaches that they come from, where that is known."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Pointer:
        """The same pointers with another layout."""
        return Pointer(self.buffer, change(self.offset), self.view)

    def address(self) -> Tensor:
        """Virtual byte addresses, int64."""
        if self.buffer is None:
            return self.offset
        return self.offset * self.buffer.itemsize + self.buffer.base


@dataclass(eq=False)
class BlockPointer:
    """A block pointer or a tensor descriptor: base, and per dimension extent, stride and current offset."""

    base: Pointer
    extents: list[Tensor]
    strides: list[Tensor]
    offsets: list[Tensor]
    pad_nan: bool = False
    """Whether loads of a descriptor give NaN outside of it, instead of zero."""

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockPointer:
        """The same block pointers for other programs."""
        parts = [[change(item) for item in part] for part in (self.extents, self.strides, self.offsets)]
        extents, strides, offsets = parts
        return BlockPointer(self.base.map(change), extents, strides, offsets, self.pad_nan)


@dataclass(eq=False)
class Bits:
    """Integers made from floats."""

    pattern: Tensor
    """The integer value, at the declared width."""
    element: Tensor
    """1 + position of the float in the machine's memory of floats; 0 where none is known. int64, shape of `pattern`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Bits:
        """The same lanes in another layout."""
        return Bits(change(self.pattern), change(self.element))

    @classmethod
    def of(cls, integers: Tensor) -> Bits:
        """Integers that come from no float."""
        return cls(integers, integers.new_zeros((1,) * integers.dim(), dtype=torch.int64))

    def choose(self, condition: Tensor, otherwise: RuntimeValue | None) -> Bits:
        """These lanes where the condition holds, `otherwise` (or zero) elsewhere."""
        if isinstance(otherwise, Bits):
            pattern, element = otherwise.pattern, otherwise.element
        else:
            pattern = self.pattern.new_zeros(()) if otherwise is None else otherwise
            element = self.element.new_zeros(())
        return Bits(torch.where(condition, self.pattern, pattern), torch.where(condition, self.element, element))


def mapped(value: RuntimeValue, change: Callable[[Tensor], Tensor]) -> RuntimeValue:
    """A value in another layout, whatever tensors it is made of."""
    return change(value) if isinstance(value, Tensor) else value.map(change)


_TWIN = "_twin_on_device"


def on_device(value: RuntimeValue, device: torch.device) -> RuntimeValue:
    """A value on the device of the programs. Numbers of the host are filled in there, once, without waiting."""
    if not isinstance(value, Tensor):
        return value.map(lambda part: on_device(part, device))
    if value.device.type == device.type:
        return value
    twin = getattr(value, _TWIN, None)
    if twin is None:
        twin = torch.full(value.shape, value.item(), dtype=value.dtype, device=device)
        setattr(value, _TWIN, twin)
    return twin


def take_rows(value: RuntimeValue, rows: Tensor) -> RuntimeValue:
    """A value narrowed to the programs at `rows`; what does not vary over programs stays as it is."""
    if not isinstance(value, Tensor):
        return value.map(lambda part: take_rows(part, rows))
    return value if value.size(0) == 1 else value.index_select(0, rows)


def join_rows(pieces: Sequence[tuple[Tensor, RuntimeValue]], size: int) -> RuntimeValue:
    """Put together values of disjoint subsets. `pieces` holds (positions, value) that cover `range(size)`."""
    pieces = [piece for piece in pieces if piece[0].numel()]
    if len(pieces) == 1:
        return pieces[0][1]
    pieces = [(rows, on_device(value, rows.device)) for rows, value in pieces]
    first = pieces[0][1]
    deferred = next((value for _, value in pieces if isinstance(value, Deferred)), None)
    if deferred is not None:
        return deferred.join(pieces, size)
    if isinstance(first, Pointer):
        buffers = {id(value.buffer) for _, value in pieces}
        if len(buffers) == 1:
            view = first.view if all(value.view is first.view for _, value in pieces) else None
            return Pointer(first.buffer, join_rows([(rows, value.offset) for rows, value in pieces], size), view)
        return Pointer(None, join_rows([(rows, value.address()) for rows, value in pieces], size))
    if isinstance(first, BlockPointer):
        return _join_blocks(pieces, size)
    if any(isinstance(value, Bits) for _, value in pieces):
        bits = [(rows, value if isinstance(value, Bits) else Bits.of(value)) for rows, value in pieces]
        return Bits(
            join_rows([(rows, value.pattern) for rows, value in bits], size),
            join_rows([(rows, value.element) for rows, value in bits], size),
        )
    tile = common_shape(*[value.shape[1:] for _, value in pieces])
    stacked = torch.cat([value.expand(rows.numel(), *tile) for rows, value in pieces])
    order = torch.cat([rows for rows, _ in pieces])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(size, device=order.device)
    return stacked.index_select(0, inverse)


def _join_blocks(pieces: Sequence[tuple[Tensor, BlockPointer]], size: int) -> BlockPointer:
    def join(part: Callable[[BlockPointer], list[Tensor]]) -> list[Tensor]:
        rank = len(part(pieces[0][1]))
        return [join_rows([(rows, part(value)[k]) for rows, value in pieces], size) for k in range(rank)]

    base = join_rows([(rows, value.base) for rows, value in pieces], size)
    extents, strides = join(lambda value: value.extents), join(lambda value: value.strides)
    # descriptors of one place in the code have one padding
    return BlockPointer(base, extents, strides, join(lambda value: value.offsets), pieces[0][1].pad_nan)


def common_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes broadcast to, as `torch.broadcast_shapes`, which takes longer than most operations."""
    rank = max(len(shape) for shape in shapes)
    common = [1] * rank
    for shape in shapes:
        for dim, n in enumerate(shape, rank - len(shape)):
            if n != 1:
                if common[dim] not in (1, n):
                    raise ValueError(f"shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast")
                common[dim] = n
    return tuple(common)


def expand_tile(value: Tensor, tile: tuple[int, ...]) -> Tensor:
    """Expand lazily broadcast tile dimensions; the program dimension stays as it is."""
    return value.expand(value.size(0), *tile)


def same_programs(values: Sequence[Tensor]) -> list[Tensor]:
    """Values expanded to a common program dimension."""
    size = max(value.size(0) for value in values)
    return [value.expand(size, *value.shape[1:]) for value in values]
