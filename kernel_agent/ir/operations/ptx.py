"""Meaning of the simplest PTX: one instruction, or the same one for each element of a pack.

Approximate instructions are exact here, like everything else. An instruction reads the registers of its element only,
so a snippet that uses them in another order is not taken for one of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

_INSTRUCTION = re.compile(r"([a-z0-9_.]+) (\$\d+(?:, ?(?:\$\d+|0f[0-9A-Fa-f]{8}))*)")
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")
_QUALIFIERS = frozenset({"approx", "full", "ftz", "rn", "rz", "rm", "rp", "f32", "f64", "f16", "bf16"})

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "cos": torch.cos,
    "div": torch.div,
    "ex2": torch.exp2,
    "fma": lambda a, b, c: a * b + c,
    "lg2": torch.log2,
    "mov": lambda a: a,
    "mul": torch.mul,
    "neg": torch.neg,
    "rcp": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "sub": torch.sub,
    "tanh": torch.tanh,
}
"""Instructions on floats, by their name without qualifiers."""


def straight_line(text: str, results: int, operands: int, pack: int) -> Callable[..., Tensor] | None:
    """The function of one lane that a snippet computes, or None when it is not of this simple kind.

    `results` and `operands` count tensors; packed 16-bit floats share registers two by two.
    """
    body = text.strip().removeprefix("{").removesuffix("}").strip()
    lines = [line.strip() for line in body.split(";") if line.strip()]
    matches = [_INSTRUCTION.fullmatch(line) for line in lines]
    if results != 1 or not matches or not all(matches):
        return None
    names = {match.group(1) for match in matches if match}
    registers = [[name.strip() for name in match.group(2).split(",")] for match in matches if match]
    if len(names) != 1 or any(len(line) != operands + 1 for line in registers):
        return None
    name, *qualifiers = names.pop().split(".")
    kind = qualifiers[-1] if qualifiers else ""
    function = OPERATIONS.get(name)
    if function is None or kind not in _FLOATS or not set(qualifiers[:-1]) <= _QUALIFIERS:
        return None
    count = len(registers)
    if count * (2 if kind.endswith("x2") else 1) != pack:
        return None
    wanted = [[f"${count * place + k}" for place in range(operands + 1)] for k in range(count)]
    return function if registers == wanted else None


def _softplus(x: Tensor, largest: float, base: float) -> Tensor:
    """log(1 + base**x) to a base, x itself above `largest`."""
    above = x > largest
    scale = math.log(base)
    return torch.where(above, x, torch.log1p(torch.exp(torch.where(above, 0.0, x) * scale)) / scale)


SOFTPLUS = {
    "{ .reg .pred p; setp.gt.f32 p, $1, 20.; @p mov.f32 $0, $1; @!p mul.f32 $0, $1, 1.4426950408889634; "
    "@!p ex2.approx.ftz.f32 $0, $0; @!p add.f32 $0, $0, 1.0; @!p lg2.approx.ftz.f32 $0, $0; "
    "@!p mul.f32 $0, $0, 0.6931471805599453; }": lambda x: _softplus(x, 20.0, math.e),
    "{ .reg .pred p; setp.gt.f32 p, $1, 15.; @p mov.f32 $0, $1; @!p ex2.approx.ftz.f32 $0, $1; "
    "@!p add.f32 $0, $0, 1.0; @!p lg2.approx.ftz.f32 $0, $0; }": lambda x: _softplus(x, 15.0, 2.0),
}
"""Softplus as attention libraries write it, natural and to base 2."""
