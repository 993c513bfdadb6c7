"""Values of a call as JSON and back: numbers, text, containers, dtypes, tensors by number, kernels by name and line."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch._ops import OpOverload
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.ir.capture.signature import Address
from kernel_agent.ir.errors import IRError


class CannotRecord(IRError):
    """A call does what steps cannot say, or steps say what no call does."""


SPACES: dict[str, Any] = {
    "Tensor": Tensor,
    "torch": torch,
    "functional": torch.nn.functional,
    "nn": torch._C._nn,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}
"""Where torch functions have their names."""

_NEVER = frozenset(
    {"from_file", "load", "save", "compile", "numpy", "share_memory_", "map_", "map2_", "apply_", "register_hook"}
)
"""Functions that reach files, other processes or Python code."""
_PYTHON_MODULES = frozenset({"torch.functional", "torch._tensor", "torch.nn.functional", "torch"})
"""Where torch functions that are written in Python may come from."""
_PLAIN = (bool, int, float, str, type(None))


def spelled(func: Any) -> tuple[str, str]:
    """Where a torch function is found, and by which name. Raises `CannotRecord`."""
    if isinstance(func, OpOverload):
        return "ops", f"{func._schema.name}.{func._overloadname}"
    name = str(getattr(func, "__name__", ""))
    for space, owner in SPACES.items():
        if getattr(owner, name, None) == func:
            return space, name
    raise CannotRecord(f"torch function {name or func!r} cannot be written down")


def looked_up(space: str, name: str) -> Any:
    """The torch function of that name, of those that only compute with tensors. Raises `CannotRecord`."""
    refusal = CannotRecord(f"torch function {name} of {space} is not carried out again")
    if space == "ops":
        packet, _, overload = name.rpartition(".")
        library, _, base = packet.partition("::")
        if library != "aten":
            raise refusal
        found = getattr(getattr(torch.ops.aten, base, None), overload, None)
        if not isinstance(found, OpOverload):
            raise refusal
        return found
    hidden = name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
    found = getattr(SPACES.get(space), name, None)
    if hidden or name in _NEVER or not callable(found) or isinstance(found, type):
        raise refusal
    if hasattr(found, "__code__") and found.__module__ not in _PYTHON_MODULES:
        raise refusal
    return found


def kernel_line(kernel: Any) -> int:
    """The line of a kernel's `def`."""
    lines = kernel.raw_src if isinstance(kernel.raw_src, list) else str(kernel.raw_src).split("\n")
    above = next((k for k, text in enumerate(lines) if str(text).lstrip().startswith("def ")), 0)
    return int(kernel.starting_line_number) + above


class Writer:
    """Values -> forms."""

    def __init__(self, number_of: Any, address: Any) -> None:
        self._number_of = number_of
        """Tensor -> its number."""
        self._address = address
        """Whole number -> (number of a tensor, bytes behind the start of its memory) if it is an address, or None."""

    def form(self, value: Any) -> Any:
        """The form of a value. Raises `CannotRecord`."""
        if isinstance(value, tl.constexpr):
            return self.form(value.value)
        if isinstance(value, int) and not isinstance(value, bool):
            place = self._address(int(value))
            return int(value) if place is None else {"address": {"tensor": place[0]}, "bytes": place[1]}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._number_of(value)}
        if isinstance(value, (list, tuple)):
            parts = [self.form(part) for part in value]
            if isinstance(value, list):
                return parts
            names = getattr(value, "_fields", None)  # kernels read parts of named tuples by their names
            return {"tuple": parts} if names is None else {"tuple": parts, "names": [str(name) for name in names]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self.form(part) for key, part in value.items()}}
        if isinstance(value, slice):
            return {"slice": [self.form(part) for part in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": None}
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, tl.dtype):
            return {"language": value.name}
        if isinstance(value, JITFunction):
            return {"kernel": [value.fn.__name__, kernel_line(value)]}
        if isinstance(value, Address):
            dtype = self.form(value.dtype)
            return {"pointer": self.form(value.value), "of": dtype}
        if isinstance(value, TensorDescriptor):
            parts = [self.form(part) for part in (value.base, list(value.shape), list(value.strides))]
            return {"descriptor": [*parts, self.form(list(value.block_shape)), getattr(value, "padding", "zero")]}
        raise CannotRecord(f"a {type(value).__name__} cannot be written down")


class Pointer:
    """Stands for what `triton.reinterpret` makes: an address with a dtype."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._address


class Reader:
    """Forms -> values."""

    def __init__(self, tensors: list[Tensor], kernels: Any, address_of: Any) -> None:
        self._tensors = tensors
        self._kernels = kernels
        self._address_of = address_of
        """Tensor -> the address at which its memory starts."""

    def value(self, form: Any) -> Any:
        """The value of a form. Raises `CannotRecord` for what is none."""
        if isinstance(form, _PLAIN):
            return form
        if isinstance(form, list):
            return [self.value(part) for part in form]
        if not isinstance(form, dict) or not form:
            raise CannotRecord("a step holds what no value is written as")
        kind, inner = next(iter(form.items()))
        try:
            return self._of_kind(kind, inner, form)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CannotRecord(f"a step holds a {kind} that is none: {error}") from error

    def _of_kind(self, kind: str, inner: Any, form: dict[str, Any]) -> Any:
        if kind == "tensor":
            if not 0 <= int(inner) < len(self._tensors):
                raise CannotRecord("a step names a tensor that no step before it made")
            return self._tensors[int(inner)]
        if kind == "tuple":
            parts = [self.value(part) for part in inner]
            return (
                namedtuple("Named", [str(name) for name in form["names"]])(*parts) if "names" in form else tuple(parts)
            )
        if kind == "dict":
            return {str(key): self.value(part) for key, part in inner.items()}
        if kind == "slice":
            return slice(*(self.value(part) for part in inner))
        if kind == "ellipsis":
            return Ellipsis
        if kind in ("dtype", "memory_format", "layout"):
            found = getattr(torch, str(inner))
            if not isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
                raise CannotRecord(f"torch.{inner} is no {kind}")
            return found
        if kind == "device":
            return torch.device(str(inner))
        if kind == "language":
            return tl.dtype(str(inner))
        if kind == "kernel":
            return self._kernels[str(inner[0]), int(inner[1])]
        if kind == "address":
            return self._address_of(self.value(inner)) + int(form["bytes"])
        if kind == "pointer":
            return Pointer(int(self.value(inner)), self.value(form["of"]))
        if kind == "descriptor":
            base, shape, strides, block, padding = (self.value(part) for part in inner)
            extra = {} if padding == "zero" else {"padding": padding}
            return TensorDescriptor(base, shape, strides, block, **extra)
        raise CannotRecord(f"a step holds a {kind}, which no value is written as")
