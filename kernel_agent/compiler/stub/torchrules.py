"""Adjoints of torch functions that compute, written out as torch code.

A rule gives, for the place of one argument, what the cotangent of the result is for it. What it calls must be among
what `pairs.adjoints` allows for the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from kernel_agent.compiler.stub.torchcall import TorchCall

Rule = Callable[[TorchCall, str, int], "str | None"]
_RULES: dict[str, Rule] = {}


def adjoint(call: TorchCall, grad: str, place: int) -> str | None:
    """An expression of the cotangent of an argument, given a name of the result's; None where no rule knows it."""
    known = _RULES.get(call.name)
    return None if known is None else known(call, grad, place)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of functions, by their plain names."""

    def register(one: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, one))
        return one

    return register


@rule("add", "sub")
def _sum(call: TorchCall, grad: str, place: int) -> str | None:
    if "alpha" in call.keywords:
        return None
    return call.summed(f"-{grad}" if call.name == "sub" and place == 1 else grad, place)


@rule("neg")
def _neg(_call: TorchCall, grad: str, _place: int) -> str:
    return f"-{grad}"


@rule("mul")
def _mul(call: TorchCall, grad: str, place: int) -> str:
    return call.summed(f"{grad} * {call.text(1 - place)}", place)


@rule("div")
def _div(call: TorchCall, grad: str, place: int) -> str | None:
    if "rounding_mode" in call.keywords:
        return None
    if place == 0:
        return call.summed(f"{grad} / {call.text(1)}", 0)
    return call.summed(f"-{grad} * {call.text(0)} / {call.text(1)}.square()", 1)


@rule("pow")
def _pow(call: TorchCall, grad: str, place: int) -> str | None:
    if place == 1 or isinstance(call.operands[1].value, Tensor):
        return None
    power = call.text(1)
    if power == "2":
        return f"{grad} * (2 * {call.text(0)})"
    return f"{grad} * ({power} * {call.text(0)} ** ({power} - 1))"


_OF_ONE = {
    "exp": "{grad} * {result}",
    "exp2": f"{{grad}} * {{result}} * {math.log(2)!r}",
    "expm1": "{grad} * ({result} + 1.0)",
    "log": "{grad} / {x}",
    "log2": f"{{grad}} / ({{x}} * {math.log(2)!r})",
    "log10": f"{{grad}} / ({{x}} * {math.log(10)!r})",
    "log1p": "{grad} / ({x} + 1.0)",
    "sqrt": "{grad} / ({result} * 2.0)",
    "rsqrt": "{grad} * {result} ** 3 * -0.5",
    "reciprocal": "-{grad} * {result}.square()",
    "square": "{grad} * ({x} * 2.0)",
    "sigmoid": "{grad} * {result} * (1.0 - {result})",
    "tanh": "{grad} * (1.0 - {result}.square())",
    "sin": "{grad} * {x}.cos()",
    "cos": "-{grad} * {x}.sin()",
    "erf": f"{{grad}} * (-{{x}}.square()).exp() * {2 / math.sqrt(math.pi)!r}",
    "silu": "{grad} * {x}.sigmoid() * (1.0 + {x} * (1.0 - {x}.sigmoid()))",
    "softplus": "{grad} * {x}.sigmoid()",
    "logsigmoid": "{grad} * (-{x}).sigmoid()",
    "relu": "torch.where({x} > 0, {grad}, 0.0)",
    "abs": "{grad} * {x}.sign()",
}
"""Functions of one number, element by element."""


@rule(*_OF_ONE)
def _of_one(call: TorchCall, grad: str, _place: int) -> str | None:
    if len(call.operands) > 1 or call.keywords.keys() - {"inplace"}:
        return None  # another scale, or another end
    form = _OF_ONE[call.name]
    x = call.text(0) if "{x}" in form else ""
    return form.format(grad=grad, x=x, result=call.result() if "{result}" in form else "")


@rule("clamp")
def _clamp(call: TorchCall, grad: str, place: int) -> str | None:
    if place > 0:
        return None
    which = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(call.event.name, ("min", "max"))
    given = {name: call.option(name, n, None) for n, name in enumerate(which, start=1)}
    low, high, x = given.get("min"), given.get("max"), call.text(0)
    asked = [f"({x} >= {low!r})"] if low is not None else []
    asked += [f"({x} <= {high!r})"] if high is not None else []
    return f"torch.where({' & '.join(asked)}, {grad}, 0.0)"


@rule("where")
def _where(call: TorchCall, grad: str, place: int) -> str | None:
    if len(call.operands) != 3 or place == 0:
        return None
    chosen = f"{grad}, 0.0" if place == 1 else f"0.0, {grad}"
    return call.summed(f"torch.where({call.text(0)}, {chosen})", place)


@rule("maximum", "minimum")
def _extreme(call: TorchCall, grad: str, place: int) -> str:
    mine, other = call.text(place), call.text(1 - place)
    sign = ">" if call.name == "maximum" else "<"
    even = f"torch.where({mine} == {other}, {grad} * 0.5, 0.0)"
    return call.summed(f"torch.where({mine} {sign} {other}, {grad}, {even})", place)


@rule("masked_fill")
def _masked_fill(call: TorchCall, grad: str, place: int) -> str | None:
    return None if place > 0 else call.summed(f"{grad}.masked_fill({call.text(1)}, 0.0)", 0)


@rule("tril", "triu")
def _triangle(call: TorchCall, grad: str, _place: int) -> str:
    return f"{grad}.{call.name}({call.option('diagonal', 1, 0)})"


@rule("flip")
def _flip(call: TorchCall, grad: str, _place: int) -> str:
    return f"{grad}.flip({call.option('dims', 1, None)!r})"


@rule("mean")
def _mean(call: TorchCall, grad: str, _place: int) -> str:
    axes, keep = call.option("dim", 1, None), call.option("keepdim", 2, False)
    shape = call.shape(0)
    if axes is None:
        return f"({grad} / {call.references.count(call.operands[0].value)}).expand({shape})"
    listed = [axes] if isinstance(axes, int) else list(axes)
    count = " / ".join(f"{shape}[{axis}]" for axis in listed)
    return f"({spread(grad, listed, call.operands[0].value.dim(), keep=keep)} / {count}).expand({shape})"


@rule("logsumexp")
def _logsumexp(call: TorchCall, grad: str, _place: int) -> str | None:
    axis, keep = call.option("dim", 1, None), call.option("keepdim", 2, False)
    if not isinstance(axis, int):
        return None
    return f"{spread(grad, [axis], call.operands[0].value.dim(), keep=keep)} * {call.text(0)}.softmax({axis})"


@rule("softmax")
def _softmax(call: TorchCall, grad: str, _place: int) -> str:
    axis, result = call.option("dim", 1, -1), call.result()
    return f"{result} * ({grad} - ({grad} * {result}).sum({axis}, keepdim=True))"


@rule("log_softmax")
def _log_softmax(call: TorchCall, grad: str, _place: int) -> str:
    axis = call.option("dim", 1, -1)
    return f"{grad} - {call.result()}.exp() * {grad}.sum({axis}, keepdim=True)"


def spread(grad: str, axes: list[int], rank: int, *, keep: bool) -> str:
    """The cotangent of a reduction with the axes that it reduced as extents of 1."""
    if keep:
        return grad
    for axis in sorted(axis % rank for axis in axes):
        grad = f"{grad}.unsqueeze({axis})"
    return grad
