"""Which arguments a kernel's stores and atomics may reach, read from its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from kernel_agent.ir.program import Module, Op, Value
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import BlockPointer, Pointer, RuntimeValue

_WRITES = frozenset(
    {
        *("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce"),
        *("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_store"),
    }
)


def written_buffers(module: Module, arguments: Sequence[RuntimeValue]) -> set[int] | None:
    """Ids of the buffers that the kernel may write; None where the text does not tell.

    Pointers that meet in one operation count as one, so that loops, branches and selections need no rules of their own.
    """
    places = _written_places(module)
    if places is None:
        return None
    found: set[int] = set()
    for place, given in enumerate(arguments):
        pointer = given.base if isinstance(given, BlockPointer) else given
        if isinstance(pointer, Pointer) and place in places:
            found.add(id(pointer.buffer))
    return found


@lru_cache(maxsize=64)
def _written_places(module: Module) -> frozenset[int] | None:
    """Which parameters the kernel may write through."""
    if len(module.functions) > 1 or any(_from_memory(op) for op in module.all_ops):
        return None
    groups = _Groups()
    blocks = module.entry.blocks
    jumps = [value for block in blocks[1:] for value in block.arguments]
    for op in module.all_ops:
        groups.unite(_pointers_of(op))
        if op.successors:
            jumps += op.operands
    groups.unite([value for value in jumps if _points(value.type)])
    targets = {groups.of(op.operands[0].id) for op in module.all_ops if op.name in _WRITES}
    parameters = enumerate(blocks[0].arguments)
    return frozenset(place for place, parameter in parameters if groups.of(parameter.id) in targets)


def _from_memory(op: Op) -> bool:
    """Whether an operation makes pointers of numbers."""
    return op.name == "tt.int_to_ptr" or (op.name == "tt.load" and _points(op.results[0].type))


def _points(type_: Type) -> bool:
    return type_.scalar.kind in (Kind.POINTER, Kind.DESCRIPTOR)


def _pointers_of(op: Op) -> list[Value]:
    return [value for value in _values_of(op) if _points(value.type)]


def _values_of(op: Op) -> Iterator[Value]:
    """Operands, results, and what an operation passes to its regions and gets from them."""
    yield from op.operands
    yield from op.results
    for region in op.regions:
        for block in region:
            yield from block.arguments
            if block.ops:
                yield from block.ops[-1].operands


class _Groups:
    """Values that may hold the same pointer."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def of(self, value_id: int) -> int:
        """The representative of a value."""
        while (parent := self._parent.get(value_id, value_id)) != value_id:
            value_id = parent
        return value_id

    def unite(self, values: list[Value]) -> None:
        """Put values together."""
        for value in values[1:]:
            self._parent[self.of(value.id)] = self.of(values[0].id)
