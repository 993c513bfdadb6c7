"""Functions of the libraries, whose derivatives are in tables by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.elements import adjoint_element, widened
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value

Slope = Callable[[Builder, Value, Value], Value]
"""Builder, argument, result -> derivative."""
Parts = Callable[[Builder, Value, tuple[Value, ...], Value], Found]
"""Builder, cotangent, arguments, result -> cotangents of the arguments."""


def _exp(b: Builder, x: Value) -> Value:
    return b.unary(Code.EXP, x)


def _square(b: Builder, x: Value) -> Value:
    return b.mul(x, x)


def _less(b: Builder, value: float, x: Value) -> Value:
    """value - x."""
    return b.sub(b.number(value, x), x)


def _more(b: Builder, value: float, x: Value) -> Value:
    """value + x."""
    return b.add(x, b.number(value, x))


def _times(b: Builder, value: float, x: Value) -> Value:
    return b.mul(x, b.number(value, x))


def _inverse(b: Builder, x: Value) -> Value:
    return b.div(b.number(1.0, x), x)


def _rsqrt(b: Builder, x: Value) -> Value:
    return b.unary(Code.RSQRT, x)


def _call(b: Builder, name: str, *operands: Value) -> Value:
    return b.elementwise(Code.CALL, operands, operands[0].element, {"function": f"libdevice.{name}"})


def _digamma(b: Builder, x: Value) -> Value:
    """Which the library does not have: a function beside the kernel."""
    return b.elementwise(Code.CALL, (x,), x.element, {"function": "lgamma_slope"})


def _at_zero(b: Builder, x: Value, value: float, otherwise: Value) -> Value:
    return b.select(b.compare("eq", x, b.zero(x)), b.number(value, x), otherwise)


_BELL = 2.0 / math.sqrt(math.pi)
_LN2, _LN10 = math.log(2.0), math.log(10.0)

SLOPES: dict[str, Slope] = {
    "acos": lambda b, x, _: b.neg(_rsqrt(b, _less(b, 1.0, _square(b, x)))),
    "acosh": lambda b, x, _: _rsqrt(b, _more(b, -1.0, _square(b, x))),
    "asin": lambda b, x, _: _rsqrt(b, _less(b, 1.0, _square(b, x))),
    "asinh": lambda b, x, _: _rsqrt(b, _more(b, 1.0, _square(b, x))),
    "atan": lambda b, x, _: _inverse(b, _more(b, 1.0, _square(b, x))),
    "atanh": lambda b, x, _: _inverse(b, _less(b, 1.0, _square(b, x))),
    "cbrt": lambda b, _, y: _inverse(b, _times(b, 3.0, _square(b, y))),
    "rcbrt": lambda b, x, y: b.neg(b.div(y, _times(b, 3.0, x))),
    "cosh": lambda b, x, _: _call(b, "sinh", x),
    "sinh": lambda b, x, _: _call(b, "cosh", x),
    "cospi": lambda b, x, _: _times(b, -math.pi, _call(b, "sinpi", x)),
    "sinpi": lambda b, x, _: _times(b, math.pi, _call(b, "cospi", x)),
    "tan": lambda b, _, y: _more(b, 1.0, _square(b, y)),
    "fast_tanf": lambda b, _, y: _more(b, 1.0, _square(b, y)),
    "erfc": lambda b, x, _: _times(b, -_BELL, _exp(b, b.neg(_square(b, x)))),
    "erfcx": lambda b, x, y: _more(b, -_BELL, _times(b, 2.0, b.mul(x, y))),
    "erfinv": lambda b, _, y: _times(b, 1.0 / _BELL, _exp(b, _square(b, y))),
    "erfcinv": lambda b, _, y: _times(b, -1.0 / _BELL, _exp(b, _square(b, y))),
    "normcdf": lambda b, x, _: _times(b, 1.0 / math.sqrt(2.0 * math.pi), _exp(b, _times(b, -0.5, _square(b, x)))),
    "normcdfinv": lambda b, _, y: _times(b, math.sqrt(2.0 * math.pi), _exp(b, _times(b, 0.5, _square(b, y)))),
    "exp10": lambda b, _, y: _times(b, _LN10, y),
    "fast_exp10f": lambda b, _, y: _times(b, _LN10, y),
    "expm1": lambda b, _, y: _more(b, 1.0, y),
    "log10": lambda b, x, _: _inverse(b, _times(b, _LN10, x)),
    "fast_log10f": lambda b, x, _: _inverse(b, _times(b, _LN10, x)),
    "log1p": lambda b, x, _: _inverse(b, _more(b, 1.0, x)),
    "cyl_bessel_i0": lambda b, x, _: _call(b, "cyl_bessel_i1", x),
    "cyl_bessel_i1": lambda b, x, y: _at_zero(b, x, 0.5, b.sub(_call(b, "cyl_bessel_i0", x), b.div(y, x))),
    "j0": lambda b, x, _: b.neg(_call(b, "j1", x)),
    "j1": lambda b, x, y: _at_zero(b, x, 0.5, b.sub(_call(b, "j0", x), b.div(y, x))),
    "y0": lambda b, x, _: b.neg(_call(b, "y1", x)),
    "y1": lambda b, x, y: b.sub(_call(b, "y0", x), b.div(y, x)),
    "lgamma": lambda b, x, _: _digamma(b, x),
    "softplus": lambda b, x, _: b.unary(Code.SIGMOID, x),
    "softplus2": lambda b, x, _: b.unary(Code.SIGMOID, _times(b, _LN2, x)),
}
"""Derivatives of functions of one float."""

STEPS = frozenset(
    {"trunc", "round", "rint", "nearbyint", "logb", "isinf", "isnan", "isfinited", "finitef", "signbit", "ilogb",
     "llrint", "llround"}
)  # fmt: skip
"""Functions whose derivative is zero wherever it exists."""


def _power(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    """d/dx = n x^(n-1), which is 0 for n = 0; d/dn = x^n log x, which is 0 at x = 0 for n >= 0, as in torch."""
    x, n = arguments
    less = _call(b, "pow", x, _more(b, -1.0, n))
    zero = b.zero(g)
    dx = b.select(b.compare("eq", n, b.zero(n)), zero, b.mul(g, b.mul(n, less)))
    still = b.logical_and(b.compare("eq", x, b.zero(x)), b.compare("ge", n, b.zero(n)))
    return dx, b.select(still, zero, b.mul(g, b.mul(y, b.unary(Code.LOG, x))))


def _whole_power(b: Builder, g: Value, arguments: tuple[Value, ...], _: Value) -> Found:
    x, n = arguments
    less = _call(b, "powi", x, b.sub(n, b.number(1, n)))
    times = b.mul(b.cast(n, g.element), less)
    return b.select(b.compare("eq", n, b.zero(n)), b.zero(g), b.mul(g, times)), None


def _angle(b: Builder, g: Value, arguments: tuple[Value, ...], _: Value) -> Found:
    y, x = arguments
    part = b.div(g, b.add(_square(b, x), _square(b, y)))
    return b.mul(part, x), b.neg(b.mul(part, y))


def _length(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    """x / length; the zero vector has the derivative zero."""
    still = b.compare("eq", y, b.zero(y))
    return [b.select(still, b.zero(g), b.mul(g, b.div(x, y))) for x in arguments]


def _inverse_length(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    cube = b.mul(_square(b, y), y)
    return [b.neg(b.mul(g, b.mul(x, cube))) for x in arguments]


def _copied_sign(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    x, _ = arguments
    return b.select(b.compare("eq", x, b.zero(x)), b.zero(g), b.mul(g, b.div(y, x))), None


def _rest(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    """x - n divisor."""
    x, divisor = arguments
    turns = b.unary(Code.FLOOR, _more(b, 0.5, b.div(b.sub(x, y), divisor)))
    return g, b.neg(b.mul(g, turns))


def _positive_difference(b: Builder, g: Value, arguments: tuple[Value, ...], _: Value) -> Found:
    part = b.select(b.compare("ge", *arguments), g, b.zero(g))
    return part, b.neg(part)


def _scaled(name: str) -> Parts:
    return lambda b, g, arguments, _: (_call(b, name, g, arguments[1]), None)


def _saturated(b: Builder, g: Value, arguments: tuple[Value, ...], y: Value) -> Found:
    return (b.select(b.compare("eq", arguments[0], y), g, b.zero(g)),)


PARTS: dict[str, Parts] = {
    "pow": _power,
    "fast_powf": _power,
    "powi": _whole_power,
    "atan2": _angle,
    "hypot": _length,
    "norm3d": _length,
    "norm4d": _length,
    "rhypot": _inverse_length,
    "rnorm3d": _inverse_length,
    "rnorm4d": _inverse_length,
    "copysign": _copied_sign,
    "fmod": _rest,
    "remainder": _rest,
    "fdim": _positive_difference,
    "ldexp": _scaled("ldexp"),
    "scalbn": _scaled("scalbn"),
    "nextafter": lambda _, g, __, ___: (g, None),
    "saturatef": _saturated,
}
"""Cotangents of functions of several arguments, or with a choice."""


@rule(Code.CALL)
def _library(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    name = str(op.attributes["function"]).removeprefix("libdevice.")
    if name in STEPS:
        return (None,) * len(op.operands)
    arguments = tuple(widened(b, primal(x)) if x.is_float else primal(x) for x in op.operands)
    y = widened(b, primal(op.result))
    assert g.element == adjoint_element(op.result.element)
    if name in SLOPES:
        return (b.mul(g, SLOPES[name](b, arguments[0], y)),)
    if name in PARTS:
        return PARTS[name](b, g, arguments, y)
    raise CannotDerive(
        f"the library function {op.attributes['function']}{op.result.where} has no derivative rule",
        remedy="write it with Triton's own operations, or mark its input as one without gradient",
    )
