"""Functions of CUDA's libdevice. Values are exact: what a name says of rounding or speed makes no difference here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations import bessel, integers, special
from kernel_agent.ir.operations.bits import to_bits, to_floats
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.operations.safe import differentiable
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "cbrt": special.cbrt,
    "ceil": torch.ceil,
    "copysign": torch.copysign,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "cospi": special.cospi,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcinv": special.erfcinv,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp10": special.exp10,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fabs": torch.abs,
    "fast_cosf": torch.cos,
    "fast_exp10f": special.exp10,
    "fast_expf": torch.exp,
    "fast_fdividef": torch.div,
    "fast_log10f": torch.log10,
    "fast_log2f": torch.log2,
    "fast_logf": torch.log,
    "fast_powf": lambda x, y: torch.exp2(y * torch.log2(x)),
    "fast_sinf": torch.sin,
    "fast_tanf": torch.tan,
    "fast_tanhf": torch.tanh,
    "fdim": lambda x, y: torch.clamp(x - y, min=0.0),
    "finitef": torch.isfinite,
    "floor": torch.floor,
    "fma": lambda a, b, c: a * b + c,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "fmod": special.fmod,
    "hypot": torch.hypot,
    "ilogb": special.ilogb,
    "isfinited": torch.isfinite,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "j0": bessel.j0,
    "j1": bessel.j1,
    "jn": bessel.jn,
    "ldexp": special.scale_by_power,
    "lgamma": torch.lgamma,
    "llrint": lambda x: integers.to_integer(torch.round(x), torch.int64),
    "llround": lambda x: integers.to_integer(special.round_half_away(x), torch.int64),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logb": special.logb,
    "nearbyint": torch.round,
    "norm3d": special.norm,
    "norm4d": special.norm,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "pow": torch.pow,
    "powi": lambda x, n: torch.pow(x, n.to(torch.float64)),
    "rcbrt": special.rcbrt,
    "remainder": special.remainder,
    "rhypot": lambda x, y: 1.0 / torch.hypot(x, y),
    "rint": torch.round,
    "rnorm3d": lambda *parts: 1.0 / special.norm(*parts),
    "rnorm4d": lambda *parts: 1.0 / special.norm(*parts),
    "round": special.round_half_away,
    "rsqrt": torch.rsqrt,
    "saturatef": lambda x: torch.clamp(torch.where(x.isnan(), 0.0, x), 0.0, 1.0),
    "scalbn": special.scale_by_power,
    "signbit": torch.signbit,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sinpi": special.sinpi,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "tgamma": special.gamma,
    "trunc": torch.trunc,
    "y0": bessel.y0,
    "y1": bessel.y1,
    "yn": bessel.yn,
    # integers
    "abs": torch.abs,
    "llabs": torch.abs,
    "brev": lambda a: _reversed(a),
    "brevll": lambda a: _reversed(a),
    "byte_perm": lambda a, b, s: _permuted_bytes(a, b, s),
    "clz": integers.leading_zeros,
    "clzll": integers.leading_zeros,
    "ffs": lambda a: _first_set(a),
    "ffsll": lambda a: _first_set(a),
    "hadd": lambda a, b: (a & b) + ((a ^ b) >> 1),
    "rhadd": lambda a, b: (a | b) - ((a ^ b) >> 1),
    "uhadd": lambda a, b: (a & b) + integers.shift_right(a ^ b, torch.ones_like(a ^ b)),
    "urhadd": lambda a, b: (a | b) - integers.shift_right(a ^ b, torch.ones_like(a ^ b)),
    "max": torch.maximum,
    "min": torch.minimum,
    "mul24": lambda a, b: ((a << 8) >> 8) * ((b << 8) >> 8),
    "umul24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mulhi": integers.multiply_high_signed,
    "mul64hi": integers.multiply_high_signed,
    "umulhi": integers.multiply_high,
    "umul64hi": integers.multiply_high,
    "popc": integers.population,
    "popcll": integers.population,
    "sad": lambda a, b, c: torch.where(a > b, a - b, b - a) + c,
    "usad": lambda a, b, c: torch.where(integers.ordered(a) > integers.ordered(b), a - b, b - a) + c,
}
"""Meaning of each function, by its name without `__nv_` and, unless listed so, without the suffix of its width."""


def _reversed(a: Tensor) -> Tensor:
    width = integers.width_of(a)
    bits = [((a >> place) & 1) << (width - 1 - place) for place in range(width)]
    return torch.as_tensor(sum(bits), dtype=a.dtype)


def _first_set(a: Tensor) -> Tensor:
    """Position of the lowest set bit counted from one, zero for zero."""
    return torch.where(a == 0, 0, integers.trailing_zeros(a) + 1)


def _permuted_bytes(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Four bytes of the eight of (b, a), chosen by the low three bits of each nibble of the selector."""
    both = integers.widened(a) | (b.to(torch.int64) << 32)
    chosen = [((both >> (8 * ((selector.to(torch.int64) >> (4 * k)) & 7))) & 255) << (8 * k) for k in range(4)]
    return torch.as_tensor(sum(chosen)).to(a.dtype)


_ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "rcp": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "fma": lambda a, b, c: a * b + c,
    "fmaf": lambda a, b, c: a * b + c,
}
_ROUND = {"rn": torch.round, "rz": torch.trunc, "ru": torch.ceil, "rd": torch.floor}
_ROUNDED = re.compile(r"(?:[fd](?=add|sub|mul|div|rcp|sqrt|rsqrt))?(\w+)_r[nzud]")
_TO_INTEGER = re.compile(r"(?:float|double)2(int|uint|ll|ull)_(r[nzud])")
_TO_FLOAT = re.compile(r"(u?)(?:int|ll)2(?:float|double)_r[nzud]")


def meaning(name: str) -> Callable[..., Any] | None:
    """The function behind a symbol without `__nv_`; None for one not known."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if match := _TO_INTEGER.fullmatch(name):
        kind, mode = match.groups()
        dtype = torch.int32 if kind.endswith("int") else torch.int64
        convert = integers.to_unsigned if kind.startswith("u") else integers.to_integer
        return lambda x: convert(_ROUND[mode](x), dtype)
    if match := _TO_FLOAT.fullmatch(name):
        return integers.unsigned_to_float if match.group(1) else lambda a: a.to(torch.float64)
    if re.fullmatch(r"double2float_r[nzud]", name):
        return lambda x: x
    if (match := _ROUNDED.fullmatch(name)) and match.group(1) in _ARITHMETIC:
        return _ARITHMETIC[match.group(1)]
    return FUNCTIONS.get(name[:-1]) if name[-1:] in "fd" else None


_BIT_CASTS = frozenset(
    {"float_as_int", "float_as_uint", "double_as_longlong", "int_as_float", "uint_as_float", "longlong_as_double"}
)


@rule("tt.extern_elementwise")
def _call(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[RuntimeValue]:
    symbol = str(op.attributes["symbol"])
    library = str(op.attributes.get("libpath") or op.attributes.get("libname") or "")
    if library:
        remedy = "Call tl.extra.cuda.libdevice, or write the function in Triton."
        raise machine.unsupported(op, f"{symbol} is a function of the library {library!r}", remedy=remedy)
    name = symbol.removeprefix("__nv_")
    if name in _BIT_CASTS:
        return [_bit_cast(machine, op, operands[0])]
    if name in ("nextafter", "nextafterf"):
        return [_next(op, *operands)]
    function = meaning(name)
    if function is None:
        raise machine.unsupported(op, f"library function {symbol} is not supported")
    result = differentiable(machine, function, operands)
    wanted = op.results[0].type.dtype
    return [result if result.dtype == wanted else result.to(wanted)]


def _bit_cast(machine: Machine, op: Op, value: Any) -> RuntimeValue:
    source, target = op.operands[0].type.scalar, op.results[0].type.scalar
    if source.kind is Kind.FLOAT:
        return to_bits(machine, value, source, op)
    return to_floats(machine, value, target, op)


def _next(op: Op, x: Tensor, y: Tensor) -> Tensor:
    """The neighbour at the declared width."""
    width = torch.float32 if op.results[0].type.bits == 32 else torch.float64
    return special.stepped(x, torch.nextafter(x.detach().to(width), y.detach().to(width)).to(torch.float64))
