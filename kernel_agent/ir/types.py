"""Types of Triton IR values, read from their MLIR spelling."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


class Kind(str, enum.Enum):
    """What a value of a type is to the executor."""

    INT = "int"
    FLOAT = "float"
    POINTER = "pointer"
    TENSOR = "tensor"
    DESCRIPTOR = "descriptor"
    OTHER = "other"


@dataclass(frozen=True)
class Type:
    """One MLIR type."""

    kind: Kind
    name: str
    """MLIR spelling, such as `i32`, `bf16` or `tensor<16x!tt.ptr<f32>>`."""
    shape: tuple[int, ...] = ()
    """Tile shape of tensors, block pointers and descriptors; empty for scalars."""
    element: Type | None = None
    """Element of a tensor, pointee of a pointer."""

    @cached_property
    def scalar(self) -> Type:
        """The element type of a tensor, the type itself otherwise."""
        return self.element if self.kind is Kind.TENSOR and self.element is not None else self

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """Shape of a value of this type without the program dimension."""
        return self.shape if self.kind is Kind.TENSOR else ()

    @cached_property
    def bits(self) -> int:
        """Width of the scalar in bits; `index` counts as 64."""
        name = self.scalar.name
        if name == "index":
            return 64
        if name == "tf32":
            return 32
        match = re.match(r"(?:[su]?i|b?f)(\d+)", name)
        if match is None:
            raise ValueError(f"type {self.name} has no width")
        return int(match.group(1))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The torch dtype values of this type are held in: float64 for every float, exact width for integers."""
        scalar = self.scalar
        return torch.float64 if scalar.kind is Kind.FLOAT else _INTEGERS[scalar.bits]


_INTEGERS = {1: torch.bool, 8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

STORED_FLOATS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
    "f8E4M3FNUZ": torch.float8_e4m3fnuz,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""Storage dtype of each float type, for the bit patterns of constants and bitcasts."""

_FLOATS = {dtype: Type(Kind.FLOAT, name) for name, dtype in STORED_FLOATS.items()}


def float_type(dtype: torch.dtype) -> Type:
    """The float type that memory of a dtype holds."""
    return _FLOATS[dtype]


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """Read one MLIR type. Types the executor never computes with come back as `Kind.OTHER`."""
    text = text.strip()
    if text.startswith("tensor<"):
        shape, element = _shape_and_element(_first_part(text[7:-1]))
        return Type(Kind.TENSOR, text, shape, element)
    if text.startswith("!tt.ptr<"):
        pointee = parse_type(_first_part(text[8:-1]))
        return Type(Kind.POINTER, text, pointee.shape, pointee)
    if text.startswith("!tt.tensordesc<"):
        body = text[15:-1]
        inner = body[7:-1] if body.startswith("tensor<") else body
        shape, element = _shape_and_element(_first_part(inner))
        return Type(Kind.DESCRIPTOR, text, shape, element)
    if re.fullmatch(r"[su]?i\d+|index", text):
        return Type(Kind.INT, text)
    if re.fullmatch(r"b?f\d+\w*|tf32", text):
        return Type(Kind.FLOAT, text)
    return Type(Kind.OTHER, text)


def _shape_and_element(body: str) -> tuple[tuple[int, ...], Type]:
    match = re.match(r"(?:\d+x)*", body)
    prefix = match.group(0) if match else ""
    shape = tuple(int(size) for size in prefix.split("x") if size)
    return shape, parse_type(body[len(prefix) :])


def _first_part(body: str) -> str:
    """Drop what follows the first top-level comma: an encoding or an address space."""
    depth = 0
    for position, char in enumerate(body):
        if char == "<":
            depth += 1
        elif char == ">":
            depth -= 1
        elif char == "," and depth == 0:
            return body[:position]
    return body
