"""Functions of CUDA's libdevice, by their name without prefix and width suffix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "cbrt": lambda x: torch.sign(x) * torch.abs(x) ** (1.0 / 3.0),
    "ceil": torch.ceil,
    "copysign": torch.copysign,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "div_rn": torch.div,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp10": lambda x: torch.pow(10.0, x),
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fabs": torch.abs,
    "fast_cosf": torch.cos,
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_log2f": torch.log2,
    "fast_sinf": torch.sin,
    "fast_tanhf": torch.tanh,
    "fast_powf": torch.pow,
    "finitef": torch.isfinite,
    "floor": torch.floor,
    "fma": lambda a, b, c: a * b + c,
    "fma_rn": lambda a, b, c: a * b + c,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "isfinited": torch.isfinite,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "lgamma": torch.lgamma,
    "llrint": lambda x: torch.round(x.detach()).to(torch.int64),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "mul_rn": torch.mul,
    "nearbyint": torch.round,
    "normcdf": lambda x: 0.5 * torch.erfc(-x * 0.5**0.5),
    "pow": torch.pow,
    "rcp_rn": torch.reciprocal,
    "rint": torch.round,
    "round": lambda x: torch.sign(x) * torch.floor(torch.abs(x) + 0.5),
    "rsqrt": torch.rsqrt,
    "signbit": torch.signbit,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "sqrt_rn": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}


@rule("tt.extern_elementwise")
def _call(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[Tensor]:
    symbol = str(op.attributes["symbol"])
    name = symbol.removeprefix("__nv_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f")) or _FUNCTIONS.get(name.removesuffix("d"))
    if function is None:
        raise machine.unsupported(op, f"library function {symbol} is not supported")
    result = function(*operands)
    wanted = op.results[0].type.dtype
    return [result if result.dtype == wanted else result.to(wanted)]
