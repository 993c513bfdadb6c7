"""Adjoints of torch functions that choose, move or sum elements of rows."""

from __future__ import annotations

from torch import Tensor

from kernel_agent.compiler.stub.torchcall import TorchCall
from kernel_agent.compiler.stub.torchrules import rule, spread

_GELU_SLOPES = {
    "none": """def gelu_slope(x):
    return 0.5 + 0.5 * torch.erf(x * 0.7071067811865476) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
""",
    "tanh": """def gelu_slope(x):
    t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    return 0.5 + 0.5 * t + 0.3989422804014327 * x * (1.0 - t * t) * (1.0 + 0.134145 * x * x)
""",
}
"""Derivatives of both forms of torch's gelu."""


@rule("amax", "amin", "max", "min")
def _extreme(call: TorchCall, grad: str, _place: int) -> str | None:
    """As autograd: without indices equal elements share; with them, the one that is named has it all."""
    if len(call.operands) > 1 and isinstance(call.operands[1].value, Tensor):
        return None  # the larger of two tensors, which has a name of its own
    axes, keep = call.option("dim", 1, None), call.option("keepdim", 2, False)
    if call.name in ("max", "min") and isinstance(axes, int):
        return _chosen(call, grad, axes, keep=keep)
    if axes is not None and not isinstance(axes, (int, tuple, list)):
        return None
    x, result = call.text(0), call.result()
    rank = call.operands[0].value.dim()
    listed = list(range(rank)) if axes in (None, (), []) else [axes] if isinstance(axes, int) else list(axes)
    wide, largest = (text if axes is None else spread(text, listed, rank, keep=keep) for text in (grad, result))
    same = f"{x} == {largest}"
    return f"torch.where({same}, {wide} / ({same}).sum({tuple(listed)}, keepdim=True), 0.0)"


@rule("sort", "topk", "cummax", "cummin")
def _sorted(call: TorchCall, grad: str, _place: int) -> str | None:
    place = {"sort": 1, "topk": 2}.get(call.name, 1)
    axis = call.option("dim", place, -1)
    if not isinstance(axis, int):
        return None  # sort takes a boolean there in another of its forms
    return _chosen(call, grad, axis, keep=True, shared=call.name.startswith("cum"))


def _chosen(call: TorchCall, grad: str, axis: int, *, keep: bool, shared: bool = False) -> str:
    """The cotangent of values that a function chose, at the indices that it returns beside them."""
    wide, indices = grad, f"{call.again()}.indices"
    if not keep:
        wide, indices = f"{grad}.unsqueeze({axis})", f"{indices}.unsqueeze({axis})"
    added = "scatter_add" if shared else "scatter"
    return f"torch.zeros({call.shape(0)}, dtype={grad}.dtype, device={grad}.device).{added}({axis}, {indices}, {wide})"


@rule("gather", "take_along_dim", "index_select")
def _gathered(call: TorchCall, grad: str, _place: int) -> str | None:
    if call.keywords:
        return None
    first, second = (call.operands[n].node for n in (1, 2)) if len(call.operands) == 3 else (None, None)
    if first is None or second is None:
        return None
    axis_at, index_at = (2, 1) if call.name == "take_along_dim" else (1, 2)
    axis = call.option("dim", axis_at, None)
    zeros = f"torch.zeros({call.shape(0)}, dtype={grad}.dtype, device={grad}.device)"
    added = "index_add" if call.name == "index_select" else "scatter_add"
    return f"{zeros}.{added}({axis}, {call.text(index_at)}, {grad})"


@rule("cumsum")
def _cumsum(call: TorchCall, grad: str, _place: int) -> str:
    axis = call.option("dim", 1, 0)
    return f"{grad}.flip({axis}).cumsum({axis}).flip({axis})"


@rule("roll")
def _rolled(call: TorchCall, grad: str, _place: int) -> str:
    shifts, axes = call.option("shifts", 1, 0), call.option("dims", 2, None)
    back = -shifts if isinstance(shifts, int) else tuple(-one for one in shifts)
    return f"{grad}.roll({back})" if axes is None else f"{grad}.roll({back}, {axes})"


@rule("pad")
def _padded(call: TorchCall, grad: str, _place: int) -> str | None:
    if call.option("mode", 2, "constant") != "constant":
        return None
    return f"torch.nn.functional.pad({grad}, {tuple(-one for one in call.option('pad', 1, ()))})"


@rule("repeat_interleave")
def _repeated(call: TorchCall, grad: str, _place: int) -> str | None:
    times, axis = call.option("repeats", 1, None), call.option("dim", 2, None)
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    axis %= call.operands[0].value.dim()
    return f"{grad}.unflatten({axis}, (-1, {times})).sum({axis + 1})"


@rule("leaky_relu")
def _leaky(call: TorchCall, grad: str, _place: int) -> str:
    return f"torch.where({call.text(0)} > 0, {grad}, {grad} * {call.option('negative_slope', 1, 0.01)!r})"


@rule("gelu")
def _gelu(call: TorchCall, grad: str, _place: int) -> str | None:
    how = call.option("approximate", 1, "none")
    if how not in _GELU_SLOPES:
        return None
    call.helper(_GELU_SLOPES[how])
    return f"{grad} * gelu_slope({call.text(0)})"


@rule("var", "std")
def _spread_of_rows(call: TorchCall, grad: str, _place: int) -> str | None:
    """`2 (x - mean) / (n - 1)`, over twice the root for `std`."""
    if call.keywords.keys() - {"dim", "keepdim", "unbiased", "correction"}:
        return None
    axis, keep = call.option("dim", 1, None), call.option("keepdim", 3, False)
    less = call.option("correction", 9, None) if "correction" in call.keywords else call.option("unbiased", 2, True)
    if not isinstance(axis, int) or isinstance(axis, bool) or not isinstance(less, (bool, int)):
        return None
    x, rank = call.text(0), call.operands[0].value.dim()
    scale = f"({call.shape(0)}[{axis}] - {int(less)})"
    wide = spread(grad, [axis], rank, keep=keep)
    apart = f"({x} - {x}.mean({axis}, keepdim=True))"
    if call.name == "var":
        return f"{wide} * 2 * {apart} / {scale}"
    return f"{wide} * {apart} / ({spread(call.result(), [axis], rank, keep=keep)} * {scale})"
