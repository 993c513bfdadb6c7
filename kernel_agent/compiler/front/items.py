"""What a value of Triton's IR is to the reader: a value of a kernel, or an address that kernels have no values for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.ssa.value import Value


@dataclass(frozen=True)
class Pointer:
    """A tile of addresses into one argument."""

    base: Value
    """Pointer argument of the kernel."""
    offset: Value
    """In elements of the argument; i32 or i64."""
    element: str
    """What an access through it reads: as wide as the argument's element, where not the same."""


@dataclass(frozen=True)
class Form:
    """How the source says where a block lies."""

    kind: str
    """BY_POINTER or BY_DESCRIPTOR."""
    name: str
    """Its variable, where it has one."""


@dataclass(frozen=True)
class Blocked:
    """A block pointer, or a tensor descriptor: it has no offsets of its own."""

    pointer: Pointer
    """To the tensor's first element."""
    form: Form
    extents: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...] = ()
    pad_nan: bool = False
    """Of a descriptor: elements outside read NaN."""


Item = Value | Pointer | Blocked


def parts(item: Item) -> tuple[Value, ...]:
    """The values that loops carry for an item: what of it may change."""
    if isinstance(item, Pointer):
        return (item.offset,)
    if isinstance(item, Blocked):
        return (item.pointer.offset, *item.extents, *item.strides, *item.offsets)
    return (item,)


def with_parts(item: Item, values: Iterator[Value]) -> Item:
    """An item like another with the next `values` for its parts."""
    if isinstance(item, Pointer):
        return replace(item, offset=next(values))
    if isinstance(item, Blocked):
        pointer = replace(item.pointer, offset=next(values))
        some = [tuple(next(values) for _ in group) for group in (item.extents, item.strides, item.offsets)]
        return replace(item, pointer=pointer, extents=some[0], strides=some[1], offsets=some[2])
    return next(values)


def alike(first: Item, second: Item) -> bool:
    """Whether two items differ in nothing but their parts: addresses must be of one argument."""
    if isinstance(first, Pointer) and isinstance(second, Pointer):
        return first.base is second.base and first.element == second.element
    if isinstance(first, Blocked) and isinstance(second, Blocked):
        return alike(first.pointer, second.pointer) and first.pad_nan == second.pad_nan
    return isinstance(first, Value) and isinstance(second, Value)


def all_parts(items: Sequence[Item]) -> list[Value]:
    """Of several items, in order."""
    return [value for item in items for value in parts(item)]


def all_with_parts(items: Sequence[Item], values: Sequence[Value]) -> list[Item]:
    """`with_parts` for several items."""
    source = iter(values)
    return [with_parts(item, source) for item in items]
