"""Attributes of operations: constants, flags, segment sizes, symbols."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import torch

from kernel_agent.ir.types import STORED_FLOATS, Type, parse_type

Scalar = bool | int | float
_NUMBER = re.compile(r"(-?(?:0x[0-9A-Fa-f]+|[\d.]+(?:[eE][+-]?\d+)?)) : (\S+)")
_INTEGER_FORMAT = {8: "b", 16: "h", 32: "i", 64: "q"}


@dataclass(frozen=True)
class Dense:
    """A constant tensor: one scalar for a splat, else one scalar per element in row-major order."""

    type: Type
    data: Scalar | tuple[Scalar, ...]


Attribute = Any
"""bool, int, float, str, tuple of scalars, or `Dense`; what is none of these stays as its text."""


def parse_attribute(text: str) -> Attribute:
    """Read one attribute value from the generic form."""
    if text in ("true", "false"):
        return text == "true"
    if text == "unit":
        return True
    if text.startswith('"'):
        return _ESCAPE.sub(_unescaped, text[1:-1])
    if text.startswith("array<"):
        element, _, items = text[6:-1].partition(":")
        return tuple(_scalar(item, element.strip()) for item in items.split(",") if item.strip())
    if text.startswith("dense"):
        return _dense(text)
    match = _NUMBER.fullmatch(text)
    return _scalar(match.group(1), match.group(2)) if match else text


_ESCAPE = re.compile(r'\\([0-9A-F]{2}|\\|")')


def _unescaped(match: re.Match[str]) -> str:
    """MLIR writes characters that do not print as two hexadecimal digits."""
    code = match.group(1)
    return chr(int(code, 16)) if len(code) == 2 else code


def _dense(text: str) -> Dense:
    match = re.fullmatch(r"dense<(.*)> : (.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"constant {text[:60]} is not in a known form")
    body, type_ = match.group(1), parse_type(match.group(2))
    element = type_.scalar.name
    if body.startswith('"'):
        return Dense(type_, _from_bytes(bytes.fromhex(body[3:-1]), type_.scalar))
    if body.startswith("["):
        return Dense(type_, tuple(_scalar(item, element) for item in re.sub(r"[\[\]]", "", body).split(",")))
    return Dense(type_, _scalar(body, element))


def _scalar(text: str, type_name: str) -> Scalar:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if not re.match(r"b?f\d", type_name):
        return int(text, 0)
    if not text.startswith("0x"):
        if type_name == "f32" and _significant_digits(text) > _DECIMAL_DIGITS:
            (named,) = struct.unpack("<f", struct.pack("<f", float(text)))
            return float(named)
        return float(text)
    dtype = STORED_FLOATS[type_name]
    raw = int(text, 16).to_bytes(dtype.itemsize, "little")
    return float(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).double().item())


_DECIMAL_DIGITS = 7
"""A decimal of so many digits is what its author wrote, `0.1` or `0.044715`: the executor computes with that."""


def _significant_digits(text: str) -> int:
    """Digits of a float between the first and the last that is not zero. MLIR writes nine of them where six would name
    another float32: there the float itself is meant, and the decimal may be off by half of its last digit."""
    return len(re.sub(r"[eE].*|[^0-9]", "", text).strip("0"))


def _from_bytes(raw: bytes, element: Type) -> tuple[Scalar, ...]:
    if element.name in STORED_FLOATS:
        dtype = STORED_FLOATS[element.name]
        return tuple(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).double().tolist())
    code = _INTEGER_FORMAT[element.bits]
    return struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)
