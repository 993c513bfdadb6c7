"""Arithmetic as the device does it: every result is rounded to the type that the IR declares.

Values stay float64 tensors, here of representable values. Most operations are computed as ever and their result is
rounded once, to nearest even; that is what an instruction does that is correctly rounded (+, -, *, /, sqrt, fma). The
others have a rule below. What the device does otherwise, and is not modelled:

- approximate instructions (`ex2.approx`, `rsqrt.approx`, `div.full`, libdevice) are taken for correctly rounded; they
  may be off by one or two units in the last place more;
- a product and a sum that the compiler fuses into one `fma` are rounded twice here;
- nothing is flushed to zero, though `.ftz` variants of some instructions would;
- the order of a reduction is a binary tree over neighbours; the device's order depends on the layout;
- atomic additions to one element come in the order of the programs;
- tensor cores align the products of one instruction with a few extra bits only; here their sum is exact, and the
  accumulator is rounded once per instruction. Hopper's fp8 accumulators keep about 14 bits; here they are float32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.memory import CPU
from kernel_agent.ir.operations.registry import Rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.rounding import Mode, fused_multiply_add, rounded, tf32_nearest, tf32_truncated
from kernel_agent.ir.types import STORED_FLOATS, Kind, Type
from kernel_agent.ir.values import Active, Bits, RuntimeValue, expand_tile, on_device

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

FAITHFUL: dict[str, Rule] = {}
"""Operations whose device arithmetic is not the exact result rounded once."""

_MOVES = frozenset(
    {
        *("tt.splat", "tt.unsplat", "tt.expand_dims", "tt.broadcast", "ttg.convert_layout", "tt.reshape", "tt.trans"),
        *("tt.join", "tt.split", "tt.cat", "tt.gather", "arith.select", "arith.extf", "arith.negf", "math.absf"),
        *("arith.maxnumf", "arith.minnumf", "arith.maximumf", "arith.minimumf", "tt.clampf", "ub.poison"),
        *("tt.call", "scf.for", "scf.if", "scf.while", "tt.reduce", "tt.scan", "tt.map_elementwise"),
    }
)
"""Operations whose results are representable because their operands are, or that ran operations of their own."""

_LOG2_E = 1.4426950408889634


def _faithful(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            FAITHFUL[name] = function
        return function

    return register


def storage_dtype(machine: Machine, op: Op, type_: Type) -> torch.dtype:
    """The dtype of a float type. Raises `UnsupportedOp` for a format that torch does not know."""
    dtype = STORED_FLOATS.get(type_.scalar.name)
    if dtype is None:
        raise machine.unsupported(op, f"rounding to {type_.scalar.name} is not supported")
    return dtype


def apply_faithful(machine: Machine, op: Op, operands: list[RuntimeValue], active: Active) -> Sequence[RuntimeValue]:
    """Run one operation and round its results."""
    rule = FAITHFUL.get(op.name)
    if rule is not None and not any(isinstance(value, Bits) for value in operands):
        return rule(machine, op, [on_device(value, machine.device) for value in operands], active)
    results = machine.compute(op, operands, active)
    if op.name in _MOVES:
        return results
    return [
        rounded(result, storage_dtype(machine, op, value.type))
        if value.type.scalar.kind is Kind.FLOAT and isinstance(result, Tensor)
        else result
        for value, result in zip(op.results, results, strict=True)
    ]


_TO_ZERO = 0
"""Value of the `rounding` attribute of a cast that truncates; 1 is to nearest even."""


@_faithful("arith.truncf", "tt.fp_to_fp")
def _cast(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[Tensor]:
    """Casts to 8 bits saturate, as `cvt.satfinite` does."""
    target = op.results[0].type.scalar
    mode = Mode.TO_ZERO if op.attributes.get("rounding") == _TO_ZERO else Mode.NEAREST
    return [rounded(operands[0], storage_dtype(machine, op, target), mode, saturate=target.bits == 8)]


@_faithful("arith.sitofp")
def _from_integer(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    """64-bit integers do not fit float64: on their way to float32 they are rounded once."""
    if operands[0].dtype == torch.int64 and op.results[0].type.scalar.name == "f32":
        return [operands[0].to(torch.float32).to(torch.float64)]
    (exact,) = machine.compute(op, operands, active)
    return [rounded(exact, storage_dtype(machine, op, op.results[0].type))]


@_faithful("math.fma")
def _fma(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    if op.results[0].type.scalar.name == "f64":
        return list(machine.compute(op, operands, active))
    return [rounded(fused_multiply_add(*operands), storage_dtype(machine, op, op.results[0].type))]


@_faithful("math.exp")
def _exp(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    """Triton computes exp of float32 as 2 ** (x * log2(e)), with the product rounded."""
    if op.results[0].type.scalar.name != "f32":
        (exact,) = machine.compute(op, operands, active)
        return [rounded(exact, storage_dtype(machine, op, op.results[0].type))]
    log2_e = rounded(torch.tensor(_LOG2_E, dtype=torch.float64, device=CPU), torch.float32)
    return [rounded(torch.exp2(rounded(operands[0] * log2_e.item(), torch.float32)), torch.float32)]


# --- matrix products


class InputPrecision(enum.IntEnum):
    """How float32 operands of a dot become operands of tensor cores, numbered as in the IR."""

    TF32 = 0
    TF32X3 = 1
    IEEE = 2
    BF16X3 = 3
    BF16X6 = 4


_INSTRUCTION_BYTES = 32
"""Bytes of a row of A that one tensor core instruction multiplies: k = 16 of float16, 8 of tf32, 32 of fp8."""


@_faithful("tt.dot")
def _dot(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    element, result = op.operands[0].type.scalar, op.results[0].type
    if element.kind is not Kind.FLOAT or "f64" in (element.name, result.scalar.name):
        return list(machine.compute(op, operands, active))
    target = storage_dtype(machine, op, result)
    a, b, c = [expand_tile(value, of.type.tile) for value, of in zip(operands, op.operands, strict=True)]
    if element.name != "f32":
        return [_accumulated(a, b, c, _INSTRUCTION_BYTES * 8 // element.bits, target)]
    precision = InputPrecision(op.attributes.get("inputPrecision", InputPrecision.IEEE))
    if precision is InputPrecision.IEEE:
        return [_term_by_term(a, b, c, target)]
    if precision is InputPrecision.TF32:
        return [_accumulated(tf32_truncated(a), tf32_truncated(b), c, 8, target)]
    return [_in_parts(a, b, c, precision, target)]


def _term_by_term(a: Tensor, b: Tensor, accumulator: Tensor, target: torch.dtype) -> Tensor:
    """a (..., m, k) times b (..., k, n) plus accumulator (..., m, n) without tensor cores: one fma per term, in order.

    Measured on an H200: the error is that of this chain, several times that of a blocked product.
    """
    for k in range(a.size(-1)):
        accumulator = rounded(torch.addcmul(accumulator, a[..., :, k : k + 1], b[..., k : k + 1, :]), target)
    return accumulator


def _accumulated(a: Tensor, b: Tensor, accumulator: Tensor, depth: int, target: torch.dtype) -> Tensor:
    """a (..., m, k) times b (..., k, n) plus accumulator (..., m, n), `depth` of k per instruction.

    A float32 accumulator is truncated after every instruction (Fasi, Higham, Mikaitis, Pranesh 2021, section 5), a
    float16 one rounded to nearest.
    """
    mode = Mode.NEAREST if target == torch.float16 else Mode.TO_ZERO
    largest = torch.finfo(target).max
    for left, right in zip(a.split(depth, dim=-1), b.split(depth, dim=-2), strict=True):
        total = torch.matmul(left, right) + accumulator
        accumulator = rounded(total, target, mode)
        if mode is Mode.TO_ZERO:
            accumulator = torch.where(total.abs() > largest, total.sign() * torch.inf, accumulator)
    return accumulator


_TERMS = {
    InputPrecision.TF32X3: ((1, 0), (0, 1)),
    InputPrecision.BF16X3: ((1, 0), (0, 1)),
    InputPrecision.BF16X6: ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1)),
}
"""Parts of a and b that are multiplied, smallest first, before the leading parts."""


def _in_parts(a: Tensor, b: Tensor, accumulator: Tensor, precision: InputPrecision, target: torch.dtype) -> Tensor:
    """Operands as sums of two or three narrow numbers, whose products are accumulated from the smallest on.

    As Triton's pass for float32 dots does it; NaN of the small products (inf - inf) count as zero.
    """
    narrow = tf32_nearest if precision is InputPrecision.TF32X3 else _to_bf16
    depth = 8 if precision is InputPrecision.TF32X3 else 16
    count = 3 if precision is InputPrecision.BF16X6 else 2
    lefts, rights = _parts(a, narrow, count), _parts(b, narrow, count)
    total = torch.zeros_like(accumulator)
    for i, j in _TERMS[precision]:
        total = _accumulated(lefts[i], rights[j], total, depth, torch.float32)
    total = _accumulated(lefts[0], rights[0], torch.where(total.isnan(), 0.0, total), depth, torch.float32)
    return rounded(total + accumulator, target)


def _to_bf16(values: Tensor) -> Tensor:
    return rounded(values, torch.bfloat16)


def _parts(values: Tensor, narrow: Callable[[Tensor], Tensor], count: int) -> list[Tensor]:
    parts = []
    for _ in range(count):
        parts.append(narrow(values))
        values = values - parts[-1]
    return parts
