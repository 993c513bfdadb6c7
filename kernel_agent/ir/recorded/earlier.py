"""`EarlierMemory`: what a call uses of memory that was there before it, such as a workspace among a module's globals.

What an earlier call has left there is no part of a record: whoever carries the call out again finds memory that nobody
wrote, and sees who reads it before it is written. A table, which is only read, stands there with its elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.recorded.forms import CannotRecord
from kernel_agent.ir.recorded.program import Constant, Workspace

MOST_ELEMENTS = 4096
"""Elements of one tensor that may stand in a program because nothing in it made them."""
_CLEARED = (0, math.inf, -math.inf)
"""What a call leaves everywhere in floats that it clears behind it: sums and extremes begin with these."""


@dataclass
class _Memory:
    """One storage that was there before the call."""

    first: int
    """Number of the first tensor in it that the call used."""
    elements: int
    holds: float | int | bool | None
    """What all of it held then; None where elements differ."""
    read: bool = False
    """Whether a torch function or the caller was given its elements."""
    written: bool = False
    """Whether a torch function changed them."""


@dataclass(frozen=True)
class Use:
    """A tensor that was there before the call, where the call first uses it: which step that is shows at the end."""

    tensor: Tensor
    number: int
    memory: _Memory
    values: tuple[float | int | bool, ...] | None
    """Its elements then; None for too many."""


class EarlierMemory:
    """Of one call."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was used before and was there before the call."""
        return _storage(tensor) in self._memories

    def use(self, tensor: Tensor, number: int) -> Use:
        """Note a tensor that was there before the call and that the call has not changed yet."""
        key = _storage(tensor)
        if key not in self._memories:
            flat = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            alike = flat.numel() > 0 and bool((flat == flat[0]).all())
            self._memories[key] = _Memory(number, int(flat.numel()), flat[0].item() if alike else None)
        values = tuple(tensor.detach().flatten().tolist()) if tensor.numel() <= MOST_ELEMENTS else None
        return Use(tensor, number, self._memories[key], values)

    def took_part(self, name: str, inputs: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """A torch function had these inputs; those that it has `written` are not read by that."""
        changed = {_storage(tensor) for tensor in written}
        for key in changed & self._memories.keys():
            self._memories[key].written = True
        if class_of(name, floats=True) not in (None, CallClass.VIEW, CallClass.ALLOCATION):
            self.read([tensor for tensor in inputs if _storage(tensor) not in changed])

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Somebody was given the elements of these."""
        for tensor in tensors:
            if self.holds(tensor):
                self._memories[_storage(tensor)].read = True

    def is_written(self, tensor: Tensor, buffer: Buffer | None) -> bool:
        """Whether a tensor lies in such memory and the call has changed it; `buffer` is what kernels know it by."""
        return self.holds(tensor) and _changed(self._memories[_storage(tensor)], buffer)

    def step(self, use: Use, buffer: Buffer | None) -> Constant | Workspace:
        """What stands in the record for it, once the call is over. Raises `CannotRecord`."""
        memory, shape, dtype = use.memory, tuple(use.tensor.shape), declared_dtype(use.tensor)
        name = str(dtype).removeprefix("torch.")
        read = memory.read or (buffer is not None and buffer.read)
        if read and not _changed(memory, buffer):
            if use.values is None:
                raise CannotRecord(
                    f"a tensor of shape {shape} is used that neither is an argument nor was made in this call, "
                    "and what it held before is read: make it in the call"
                )
            return Constant(dtype=name, shape=shape, values=use.values, result=use.number)
        cleared = not dtype.is_floating_point or memory.holds in _CLEARED
        return Workspace(
            dtype=name,
            elements=memory.elements,
            holds=memory.holds if cleared else None,
            shape=shape,
            strides=tuple(use.tensor.stride()),
            offset=int(use.tensor.storage_offset()),
            first=memory.first,
            result=use.number,
        )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(memory: _Memory, buffer: Buffer | None) -> bool:
    return memory.written or (buffer is not None and buffer.changed)
