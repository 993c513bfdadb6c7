"""Arithmetic of a kernel, counted from its IR alone: what one program does each time it runs a block.

Operations are counted as Triton writes them: a multiplication and an addition are two, whether or not the compiler
fuses them, and integer arithmetic is counted before it is hoisted or simplified.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict

from kernel_agent.ir.program import Module, Op, walk
from kernel_agent.ir.types import Kind, Type


class Work(str, enum.Enum):
    """A kind of arithmetic; a device has a peak rate for each."""

    DOT_FP4 = "fp4 dot"
    DOT_FP8 = "fp8 dot"
    DOT_INT8 = "int8 dot"
    DOT_FP16 = "fp16 dot"
    DOT_FP16_ACC16 = "fp16 dot, fp16 accumulator"
    DOT_BF16 = "bf16 dot"
    DOT_TF32 = "tf32 dot"
    DOT_FP32 = "fp32 dot"
    DOT_FP64 = "fp64 dot"
    FP16 = "fp16 arithmetic"
    BF16 = "bf16 arithmetic"
    FP32 = "fp32 arithmetic"
    FP64 = "fp64 arithmetic"
    SPECIAL = "special functions"
    """exp, log, sqrt, division and the like, one each; in fp64 they count as fp64 arithmetic."""
    INTEGER = "integer arithmetic"


_ARITHMETIC = {
    **dict.fromkeys(["arith.addf", "arith.subf", "arith.mulf", "arith.remf"], 1),
    **dict.fromkeys(["arith.maxnumf", "arith.minnumf", "arith.maximumf", "arith.minimumf"], 1),
    **dict.fromkeys(["math.fma", "tt.clampf"], 2),
}
"""Operations on floats that cost one or two instructions."""

_FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt"),
    *("sin", "cos", "tan", "tanh", "erf", "powf"),
)
_SPECIAL = frozenset(
    {"arith.divf", "tt.precise_divf", "tt.precise_sqrt", *(f"math.{function}" for function in _FUNCTIONS)}
)

_LIBRARY_ARITHMETIC = {
    **dict.fromkeys(["fmaxf", "fminf", "fmax", "fmin", "mul_rn", "fmul_rn", "fadd_rn", "fsub_rn"], 1),
    **dict.fromkeys(["fmaf", "fma", "fmaf_rn", "fma_rn"], 2),
    **dict.fromkeys(["fabsf", "fabs", "floorf", "floor", "ceilf", "ceil", "rintf", "rint", "truncf", "trunc"], 0),
    **dict.fromkeys(["isnanf", "isnand", "isinff", "isinfd", "finitef", "isfinited", "signbitf", "copysignf"], 0),
}
"""Functions of libdevice that are no special functions, by name without prefix."""

_INTEGER_FUNCTIONS = (
    *("addi", "subi", "muli", "divsi", "divui", "remsi", "remui", "floordivsi", "ceildivsi", "ceildivui"),
    *("maxsi", "maxui", "minsi", "minui", "andi", "ori", "xori", "shli", "shrsi", "shrui", "cmpi"),
)
_INTEGERS = frozenset(
    {"tt.addptr", "tt.mulhiui", "math.absi", *(f"arith.{function}" for function in _INTEGER_FUNCTIONS)}
)

_VECTOR = {"f16": Work.FP16, "bf16": Work.BF16, "f32": Work.FP32, "f64": Work.FP64}

_TF32, _TF32X3, _IEEE, _BF16X3, _BF16X6 = range(5)
"""Values of a dot's attribute `inputPrecision`."""


def block_work(module: Module) -> dict[int, Counter[Work]]:
    """Block identity -> what one program computes when it runs the block once, without what is nested in it."""
    found: dict[int, Counter[Work]] = defaultdict(Counter)
    products = {op.results[0].id for op in module.all_ops if op.name == "tt.dot"}
    for op in module.all_ops:
        if op.name in ("arith.addf", "arith.addi") and any(value.id in products for value in op.operands):
            continue  # Triton makes the other operand the accumulator of the dot
        found[id(module.parents[id(op)])].update(op_work(op))
    return found


def op_work(op: Op) -> Counter[Work]:
    """What one program computes in one operation; regions of loops and branches are not counted."""
    if op.name == "tt.dot":
        a, b = op.operands[0].type, op.operands[1].type
        kind, passes = _dot_kind(op, a.scalar.name, b.scalar.name, op.results[0].type.scalar.name)
        return Counter({kind: passes * 2 * math.prod(op.results[0].type.tile) * a.tile[-1]})
    if op.name == "tt.dot_scaled":
        a = op.operands[0].type
        tile = op.results[0].type.tile
        packed = 2 if op.attributes.get("a_elem_type") == _E2M1 else 1
        both = {op.attributes.get("a_elem_type"), op.attributes.get("b_elem_type")}
        kind = Work.DOT_FP4 if both == {_E2M1} else Work.DOT_FP8
        return Counter({kind: 2 * math.prod(tile) * a.tile[-1] * packed})
    if op.name in ("tt.reduce", "tt.scan", "tt.map_elementwise"):
        each: Counter[Work] = Counter()
        for nested in walk(op.regions[0]):
            each.update(op_work(nested))
        return Counter({kind: count * _combinations(op) for kind, count in each.items()})
    return _elementwise(op)


_E2M1 = 4
"""Value of a scaled dot's element type attributes for 4-bit floats, two in a byte."""


def _combinations(op: Op) -> int:
    """How often the region of a reduction, scan or map runs, at least."""
    elements = math.prod(op.operands[0].type.tile)
    if op.name == "tt.map_elementwise":
        return elements // max(1, int(op.attributes.get("pack", 1)))
    length = op.operands[0].type.tile[op.attributes["axis"]]
    return elements - elements // length


def _elementwise(op: Op) -> Counter[Work]:
    if not op.results:
        return Counter()
    lanes = math.prod(op.results[0].type.tile)
    if op.name in _INTEGERS:
        return Counter({Work.INTEGER: lanes})
    kind = _VECTOR.get(op.results[0].type.scalar.name, Work.FP32)
    if op.name in _ARITHMETIC:
        return Counter({kind: _ARITHMETIC[op.name] * lanes})
    special = op.name in _SPECIAL
    if op.name == "tt.extern_elementwise" and _is_float(op.results[0].type):
        name = str(op.attributes["symbol"]).removeprefix("__nv_")
        if name in _LIBRARY_ARITHMETIC:
            return Counter({kind: _LIBRARY_ARITHMETIC[name] * lanes})
        special = True
    if special:
        return Counter({Work.FP64 if kind is Work.FP64 else Work.SPECIAL: lanes})
    return Counter()


def _is_float(type_: Type) -> bool:
    return type_.scalar.kind is Kind.FLOAT


def _dot_kind(op: Op, a: str, b: str, accumulator: str) -> tuple[Work, int]:
    """The unit a product runs on, by its wider operand, and in how many passes."""
    names = {a, b}
    if "f64" in names:
        return Work.DOT_FP64, 1
    if "f32" in names:
        precision = int(op.attributes.get("inputPrecision", _IEEE))
        return {
            _TF32: (Work.DOT_TF32, 1),
            _TF32X3: (Work.DOT_TF32, 3),
            _BF16X3: (Work.DOT_BF16, 3),
            _BF16X6: (Work.DOT_BF16, 6),
        }.get(precision, (Work.DOT_FP32, 1))
    if "bf16" in names:
        return Work.DOT_BF16, 1
    if "f16" in names:
        return (Work.DOT_FP16_ACC16 if accumulator == "f16" else Work.DOT_FP16), 1
    return (Work.DOT_INT8 if a.startswith(("i", "s", "u")) else Work.DOT_FP8), 1
