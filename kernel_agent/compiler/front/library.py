"""Functions of the libraries: plain mathematics gets its code, the rest stays whole as a CALL."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernel_agent.compiler.front.items import Item
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, is_constant
from kernel_agent.ir.operations.libdevice import FUNCTIONS, meaning
from kernel_agent.ir.operations.ptx import SOFTPLUS, straight_line
from kernel_agent.ir.program import Op

KEPT = ("rand", "randn", "randint")
"""Functions of `triton.language.random` that give one result and stay whole, if the module calls them still."""

KEPT_STANDARD = ("flip",)
"""The same of `triton.language.standard`."""

_CODES = {
    "exp": Code.EXP, "fast_expf": Code.EXP, "exp2": Code.EXP2, "log": Code.LOG, "fast_logf": Code.LOG,
    "log2": Code.LOG2, "fast_log2f": Code.LOG2, "sqrt": Code.SQRT, "rsqrt": Code.RSQRT, "sin": Code.SIN,
    "fast_sinf": Code.SIN, "cos": Code.COS, "fast_cosf": Code.COS, "tanh": Code.TANH, "fast_tanhf": Code.TANH,
    "erf": Code.ERF, "floor": Code.FLOOR, "ceil": Code.CEIL, "fabs": Code.ABS, "abs": Code.ABS, "llabs": Code.ABS,
    "fma": Code.FMA, "umulhi": Code.MULHI, "umul64hi": Code.MULHI,
}  # fmt: skip
"""By their name without `__nv_` and the suffix of their width."""
_ROUNDED = re.compile(r"[fd](add|sub|mul|div|rcp|sqrt|rsqrt|fma)_r[nzud]|fma[f]?_r[nzud]")
_BIT_CASTS = frozenset(
    {"float_as_int", "float_as_uint", "double_as_longlong", "int_as_float", "uint_as_float", "longlong_as_double"}
)


def call(reader: Reader, op: Op, operands: Sequence[Value], function: str) -> Value:
    """A CALL with the element that the IR says."""
    element = element_of(op.results[0].type)
    return reader.builder.elementwise(Code.CALL, operands, element, {"function": function})


def bitcast(builder: Builder, value: Value, element: str) -> Value:
    """The same bits as another element; there and back is nothing."""
    if value.element == element:
        return value
    op = value.producer
    if op is not None and op.code is Code.BITCAST and op.operands[0].element == element:
        return op.operands[0]
    return builder.elementwise(Code.BITCAST, (value,), element)


def sigmoid(builder: Builder, one: Value, under: Value) -> Value | None:
    """SIGMOID of x for 1 / (1 + exp(-x)): in one piece it neither overflows nor has a derivative that does."""
    total = under.producer
    if not is_constant(one, 1) or total is None or total.code is not Code.ADD:
        return None
    for power, other in (total.operands, total.operands[::-1]):
        producer = power.producer
        if is_constant(other, 1) and producer is not None and producer.code is Code.EXP:
            return builder.elementwise(Code.SIGMOID, (builder.neg(producer.operands[0]),))
    return None


@reads("tt.extern_elementwise")
def _extern(reader: Reader, op: Op, operands: list[Value]) -> Value:
    symbol = str(op.attributes["symbol"])
    name = symbol.removeprefix("__nv_")
    element = element_of(op.results[0].type)
    if name in _BIT_CASTS:
        return bitcast(reader.builder, operands[0], element)
    short = name if name in FUNCTIONS else name[:-1]
    code = _CODES.get(short)
    if code is not None:
        return reader.builder.elementwise(code, operands, element)
    if short in ("fmax", "fmin"):
        which = Code.MAX if short == "fmax" else Code.MIN
        return reader.builder.elementwise(which, operands, element, {"nan": False})
    if short == "fast_fdividef":
        return reader.builder.div(*operands)
    arithmetic = _arithmetic(reader.builder, name, operands)
    if arithmetic is not None:
        return arithmetic
    if meaning(name) is None and short != "nextafter":
        raise reader.refuse(op, f"library function {symbol} is not supported", "Write it with Triton's own functions.")
    return call(reader, op, operands, "libdevice." + (short if short in FUNCTIONS else name))


def _arithmetic(builder: Builder, name: str, operands: Sequence[Value]) -> Value | None:
    """Of functions that only say how they round."""
    match = _ROUNDED.fullmatch(name)
    if match is None:
        return None
    kind = match.group(1) or "fma"
    if kind in ("add", "sub", "mul", "div"):
        return {"add": builder.add, "sub": builder.sub, "mul": builder.mul, "div": builder.div}[kind](*operands)
    if kind == "rcp":
        return builder.div(builder.number(1, operands[0]), operands[0])
    return builder.elementwise({"sqrt": Code.SQRT, "rsqrt": Code.RSQRT, "fma": Code.FMA}[kind], operands)


_INSTRUCTIONS = {
    "abs": Code.ABS, "cos": Code.COS, "ex2": Code.EXP2, "fma": Code.FMA, "lg2": Code.LOG2, "rsqrt": Code.RSQRT,
    "sin": Code.SIN, "sqrt": Code.SQRT, "tanh": Code.TANH,
}  # fmt: skip


@reads("tt.elementwise_inline_asm")
def _assembly(reader: Reader, op: Op, operands: list[Value]) -> Sequence[Item]:
    text = re.sub(r"\s+", " ", re.sub(r"//[^\n]*|/\*.*?\*/", " ", str(op.attributes["asm_string"]), flags=re.DOTALL))
    text = text.strip()
    if "griddepcontrol." in text:
        return [reader.builder.const(0, element_of(result.type)) for result in op.results]
    if text in SOFTPLUS:
        base = "libdevice.softplus2" if "15." in text else "libdevice.softplus"
        return [call(reader, op, operands, base)]
    pack = int(op.attributes["packed_element"])
    if straight_line(text, len(op.results), len(operands), pack) is None:
        raise reader.refuse(op, f"the inline assembly {text[:60]!r} is not known", "Write it in Triton.")
    name = text.removeprefix("{").strip().split(" ")[0].split(".")[0]
    builder = reader.builder
    two = {"add": builder.add, "sub": builder.sub, "mul": builder.mul, "div": builder.div}
    if name in two:
        return [two[name](*operands)]
    if name == "mov":
        return operands
    if name == "neg":
        return [builder.neg(operands[0])]
    if name == "rcp":
        return [builder.div(builder.number(1, operands[0]), operands[0])]
    return [builder.elementwise(_INSTRUCTIONS[name], operands)]
