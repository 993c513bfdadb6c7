"""Arguments of a launch -> Triton's signature, constants, and values for the entry function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.errors import LaunchError
from kernel_agent.ir.lower import Path
from kernel_agent.ir.memory import ADDRESS_BITS, CPU, Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.values import BlockPointer, Pointer, RuntimeValue

_ELEMENTS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}


@dataclass(frozen=True)
class Address:
    """An argument that is no tensor but has a `data_ptr()`, such as `triton.reinterpret(tensor, dtype)`."""

    value: int
    """Virtual byte address."""
    dtype: torch.dtype | tl.dtype
    """What it points to."""


class Signature:
    """How Triton specialises a kernel for a set of arguments."""

    def __init__(
        self, kernel: Any, values: dict[str, Any], buffer_of: Callable[..., Buffer], buffers: dict[int, Buffer]
    ) -> None:
        self.kernel = kernel
        self.constants: dict[Path, Any] = {}
        """Constant arguments by path."""
        self._values: list[RuntimeValue] = []
        self._buffer_of = buffer_of
        self._buffers = buffers
        self.types: dict[str, Any] = {
            parameter.name: self._classify((place,), values[parameter.name], parameter)
            for place, parameter in enumerate(kernel.params)
        }
        """Triton's type string of every parameter; nested tuples for tuples."""

    def arguments(self, module: Module) -> list[RuntimeValue]:
        """One value per parameter of the entry function.

        A descriptor is followed by its extents and strides, and on some versions of Triton by flags: whether it pads
        with NaN, whether it rounds to tf32. How many there are shows in the number of parameters.
        """
        parameters = len(module.entry.blocks[0].arguments)
        descriptors = [value for value in self._values if isinstance(value, BlockPointer)]
        rest = parameters - len(self._values) - sum(2 * len(value.extents) for value in descriptors)
        flags, odd = divmod(rest, len(descriptors)) if descriptors else (0, rest)
        if odd or not 0 <= flags <= 2:
            name = self.kernel.fn.__name__
            raise LaunchError(
                f"kernel {name} takes {parameters} values, which does not fit its arguments {list(self.types)}",
                remedy="Use a supported Triton: 3.6 to 3.9.",
                kernel=name,
            )
        found: list[RuntimeValue] = []
        for value in self._values:
            found.append(value)
            if isinstance(value, BlockPointer):
                found += [int(part) for part in (*value.extents, *value.strides)]
                found += [value.pad_nan, False][:flags]
        return found

    def _classify(self, path: Path, value: Any, parameter: Any) -> Any:
        if (len(path) == 1 and parameter.is_constexpr) or _always_constant(value):
            self.constants[path] = value.value if isinstance(value, tl.constexpr) else value
            return "constexpr"
        if isinstance(value, (tuple, list)):
            parts = [self._classify((*path, place), part, parameter) for place, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return self._descriptor(value, parameter.name)
        if isinstance(value, Tensor):
            self._values.append(self._pointer(value, parameter.name))
            return "*" + self._element(value, parameter.name)
        if isinstance(value, Address):
            return "*" + self._at(value, parameter.name)
        if not isinstance(value, (bool, int, float)):
            raise LaunchError(
                f"kernel {self.kernel.fn.__name__}: argument {parameter.name} is a {type(value).__name__}, "
                "not a tensor or number",
                kernel=self.kernel.fn.__name__,
            )
        if parameter.annotation_type:
            self._values.append(value)
            return parameter.annotation_type
        if type(value) is int and value == 1 and not parameter.do_not_specialize:
            self.constants[path] = 1
            return "constexpr"
        self._values.append(value)
        return _number_type(value)

    def _pointer(self, tensor: Tensor, name: str) -> Pointer:
        buffer = self._buffer_of(tensor, name=name)
        if buffer.name.startswith("tensor("):
            buffer.name = name
        return Pointer(buffer, torch.tensor([tensor.storage_offset()], device=CPU), buffer.extents.view(tensor, name))

    def _at(self, address: Address, name: str) -> str:
        """Note a pointer that is given by its address; the result is what it points to."""
        buffer = self._buffers.get(address.value >> ADDRESS_BITS)
        if buffer is None or (address.value - buffer.base) % buffer.itemsize:
            kernel = self.kernel.fn.__name__
            raise LaunchError(f"kernel {kernel}: argument {name} is no address of an element", kernel=kernel)
        offset = (address.value - buffer.base) // buffer.itemsize
        self._values.append(Pointer(buffer, torch.tensor([offset], device=CPU)))
        return self._element_name(address.dtype, name)

    def _element(self, tensor: Tensor, name: str) -> str:
        return self._element_name(declared_dtype(tensor), name)

    def _element_name(self, dtype: torch.dtype | tl.dtype, name: str) -> str:
        if isinstance(dtype, tl.dtype):
            return str(dtype)
        if dtype not in _ELEMENTS:
            kernel = self.kernel.fn.__name__
            raise LaunchError(f"kernel {kernel}: argument {name} is {dtype}, which Triton does not know", kernel=kernel)
        return _ELEMENTS[dtype]

    def _descriptor(self, value: Any, name: str) -> str:
        base = self._pointer(value.base, name)
        extents = [torch.tensor([size], device=CPU) for size in value.shape]
        strides = [torch.tensor([stride], device=CPU) for stride in value.strides]
        pad_nan = getattr(value, "padding", "zero") == "nan"
        self._values.append(BlockPointer(base, extents, strides, [], pad_nan))
        return f"tensordesc<{self._element(value.base, name)}{list(value.block_shape)}>"


def _always_constant(value: Any) -> bool:
    """Whether an argument is part of the specialisation whatever its parameter says."""
    return value is None or isinstance(value, (str, tl.dtype, tl.constexpr, JITFunction)) or callable(value)


def _number_type(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"
