"""Memory read or written as another type than the tensor's own.

Of equal width, floats become `Bits` and come back from them; integers have their bits read as floats. Of another
width, integers are put together or taken apart exactly. Floats are so only where nothing is lost: no gradient can
follow half a float, so one that would have to is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.operations.bits import to_bits, to_floats
from kernel_agent.ir.operations.integers import widened
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type, float_type
from kernel_agent.ir.values import Bits, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def size_of(element: Type) -> int:
    """Bytes of an element in memory."""
    return 8 if element.kind is Kind.POINTER else max(element.bits, 8) // 8


def from_memory(machine: Machine, op: Op, buffer: Buffer, value: Tensor, element: Type) -> RuntimeValue:
    """What a buffer holds, as elements of a type of equal width."""
    if buffer.is_float:
        declared = float_type(buffer.declared)
        if element.kind is Kind.INT:
            return to_bits(machine, value, declared, op)
        if element.kind is Kind.FLOAT and element.name != declared.name:
            return to_floats(machine, to_bits(machine, value, declared, op).pattern, element, op)
    elif element.kind is Kind.FLOAT:
        return to_floats(machine, value, element, op)
    dtype = torch.int64 if element.kind is Kind.POINTER else element.dtype
    return value if value.dtype == dtype else value.to(dtype)


def to_memory(machine: Machine, op: Op, buffer: Buffer, value: RuntimeValue, element: Type) -> Tensor:
    """Elements of a type of equal width, in the form the buffer holds."""
    if buffer.is_float:
        declared = float_type(buffer.declared)
        if element.kind is Kind.INT:
            return to_floats(machine, value, declared, op)
        if element.kind is Kind.FLOAT and element.name != declared.name:
            return to_floats(machine, to_bits(machine, value, element, op).pattern, declared, op)
    elif element.kind is Kind.FLOAT:
        value = to_bits(machine, value, element, op)
    plain = value.pattern if isinstance(value, Bits) else value
    return plain.to(buffer.root.dtype)


def gathered(
    machine: Machine,
    op: Op,
    buffer: Buffer,
    byte: Tensor | None,
    element: Type,
    read: Callable[[int], Tensor],
) -> RuntimeValue:
    """Elements of another width. `read(k)` is what the buffer holds k elements on; `byte` is where in it they start."""
    _check_whole(machine, op, buffer, element)
    size, held = size_of(element), buffer.itemsize
    if size > held:
        parts = [widened(_pattern(machine, op, buffer, read(k))) << (8 * held * k) for k in range(size // held)]
        pattern = torch.stack(torch.broadcast_tensors(*parts)).sum(0)
    else:
        pattern = _pattern(machine, op, buffer, read(0)).to(torch.int64)
        if byte is not None:
            pattern = pattern >> (8 * byte)
    pattern = pattern.to(_INTEGER[size])
    if element.kind is Kind.FLOAT:
        return to_floats(machine, pattern, element, op)
    return (pattern != 0) if element.dtype == torch.bool else pattern


def pieces(machine: Machine, op: Op, buffer: Buffer, value: RuntimeValue, element: Type) -> list[Tensor]:
    """Wider elements as parts the buffer can hold, lowest first."""
    _check_whole(machine, op, buffer, element)
    pattern = _integers(machine, op, value, element)
    held = _INTEGER[buffer.itemsize]
    parts = [(pattern >> (8 * buffer.itemsize * k)).to(held) for k in range(size_of(element) // buffer.itemsize)]
    if buffer.is_float:
        return [to_floats(machine, part, float_type(buffer.declared), op) for part in parts]
    return [part.to(buffer.root.dtype) for part in parts]


def inserted(
    machine: Machine, op: Op, buffer: Buffer, old: Tensor, value: RuntimeValue, element: Type, byte: int
) -> Tensor:
    """What the buffer holds after narrower elements are written into it `byte` bytes on."""
    _check_whole(machine, op, buffer, element)
    width = 8 * size_of(element)
    mask = ((1 << width) - 1) << (8 * byte)
    mask = mask - (1 << 64) if mask >= 1 << 63 else mask
    new = _integers(machine, op, value, element) << (8 * byte)
    pattern = (_pattern(machine, op, buffer, old).to(torch.int64) & ~mask) | (new & mask)
    pattern = pattern.to(_INTEGER[buffer.itemsize])
    if buffer.is_float:
        return to_floats(machine, pattern, float_type(buffer.declared), op)
    return pattern.to(buffer.root.dtype)


def _integers(machine: Machine, op: Op, value: RuntimeValue, element: Type) -> Tensor:
    if element.kind is Kind.FLOAT:
        if value.requires_grad:
            raise _refusal(machine, op, f"writing {element.name} in parts")
        value = to_bits(machine, value, element, op)
    return (value.pattern if isinstance(value, Bits) else value).to(torch.int64)


def _check_whole(machine: Machine, op: Op, buffer: Buffer, element: Type) -> None:
    """Refuse to take apart or put together floats whose gradient is asked for."""
    if buffer.is_float and machine.tape(buffer).records():
        raise _refusal(machine, op, f"using {buffer.name} ({_name(buffer)}) as {element.name}")


def _refusal(machine: Machine, op: Op, what: str) -> Exception:
    return machine.unsupported(
        op,
        f"{what} splits floats that carry gradients, which is not supported",
        remedy="Pass a tensor of the dtype the kernel works with, or cast values instead of their bits.",
    )


def _pattern(machine: Machine, op: Op, buffer: Buffer, value: Tensor) -> Tensor:
    """The bits a buffer holds; floats must be representable, since rounding them would make other numbers."""
    if not buffer.is_float:
        return value.to(torch.int8) if value.dtype == torch.bool else value
    stored = value.detach().to(buffer.declared)
    if not bool(((stored.to(torch.float64) == value) | value.isnan()).all()):
        raise _refusal(machine, op, f"reading the bits of {buffer.name}, which are not those of {_name(buffer)},")
    return stored.contiguous().view(_INTEGER[buffer.itemsize])


def _name(buffer: Buffer) -> str:
    return str(buffer.declared).removeprefix("torch.")
