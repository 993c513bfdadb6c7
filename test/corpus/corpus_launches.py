"""What surrounds a launch: autotuning, heuristics, constants, tuples, modules, autograd functions and operators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


def _fits(configs: list[triton.Config], arguments: dict[str, object], **_: object) -> list[triton.Config]:
    return [config for config in configs if config.kwargs["BLOCK"] <= 4 * arguments["N"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": size}, num_warps=warps) for size in (1024, 32, 16) for warps in (4, 8)],
    key=["N"],
    prune_configs_by={"early_config_prune": _fits},
)
@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def _tuned_sum(X, Y, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if EVEN:
            x = tl.load(X + row * N + c)
        else:
            x = tl.load(X + row * N + c, mask=c < N, other=0.0)
        acc += x * tl.exp(-x * x)
    tl.store(Y + row, tl.sum(acc, 0))


def tuned_sum(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _tuned_sum[(x.shape[0],)](x, y, x.shape[1])
    return y


def _clear(arguments: dict[str, Tensor]) -> None:
    arguments["OUT"].zero_()


@triton.autotune(configs=[triton.Config({"BLOCK": 16}, pre_hook=_clear)], key=[])
@triton.jit
def _accumulate(X, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    tl.atomic_add(OUT, tl.sum(x * x, 0))


def cleared_by_hook(x: Tensor) -> Tensor:
    """The accumulator is never set by the stub: a hook of the configuration clears it."""
    out = torch.empty((), dtype=torch.float32, device=x.device)
    _accumulate[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})],
    key=["n"],
    reset_to_zero=["OUT"],
    restore_value=["X"],
)
@triton.jit
def _consume(X, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    tl.atomic_add(OUT + o, x * x, mask=o < n)
    tl.store(X + o, x * 2.0, mask=o < n)


def consumed(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    _consume[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out, x


_HALF = tl.constexpr(0.5)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    tl.static_assert(KIND == "gelu" or KIND == "silu", "unknown activation")
    if KIND == "gelu":
        y = _HALF * x * (1.0 + tl.erf(x * 0.75))
    else:
        y = x * tl.sigmoid(x)
    return y


@triton.jit
def _constants(X, BIAS, Y, n, KIND: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.max_contiguous(tl.multiple_of(o, BLOCK), BLOCK)
    tl.assume(n > 0)
    x = tl.load(X + o, mask=o < n, other=0.0)
    if BIAS is not None:
        x += tl.load(BIAS + o, mask=o < n, other=0.0)
    for _ in tl.static_range(REPEAT):
        x = _activate(x, KIND)
    tl.store(Y + o, x, mask=o < n)


def constants(x: Tensor, bias: Tensor | None, kind: str, repeat: int) -> Tensor:
    y = torch.empty_like(x)
    _constants[(triton.cdiv(x.numel(), 32),)](x, bias, y, x.numel(), KIND=kind, REPEAT=repeat, BLOCK=32)
    return y


def _constants_reference(x: Tensor, bias: Tensor | None, kind: str, repeat: int) -> Tensor:
    x = x if bias is None else x + bias
    for _ in range(repeat):
        x = 0.5 * x * (1 + torch.erf(0.75 * x)) if kind == "gelu" else torch.nn.functional.silu(x)
    return x


@triton.jit
def _weighted_pair(tensors, weights, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(len(tensors)):
        total += weights[k] * tl.load(tensors[k] + o, mask=o < n, other=0.0)
    tl.store(out + o, total * total, mask=o < n)


def tuple_arguments(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.empty_like(a)
    _weighted_pair[(triton.cdiv(a.numel(), 16),)]((a, b, c), (1.0, -0.5, 2), out, a.numel(), BLOCK=16)
    return out


@triton.jit
def _square(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n)
    tl.store(Y + o, x * x, mask=o < n)


def _square_launch(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _square[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, power: int) -> Tensor:
        for _ in range(power):
            x = _square_launch(x)
        return x

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise AssertionError("the kernel's own gradient is wanted")


def autograd_function(x: Tensor) -> Tensor:
    """The forward of a function whose backward is not to be believed."""
    return _Square.apply(x, 2) + 1.0


class _Block(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return _square_launch(torch.nn.functional.linear(x, self.weight)) @ self.weight


class _Gated(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sigmoid()


def subclassed_module(x: Tensor, weight: Tensor) -> Tensor:
    return _Gated(weight)(x)


def _module_reference(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight.t()) ** 2 @ weight) * x.sigmoid()


def detached_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is a constant to autograd; a detached output carries no gradient."""
    scale = 1.0 / (x.detach().abs().max() + 1.0)
    y = _square_launch(x * scale)
    return y, y.detach() * 3.0


def _detached_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x / (x.detach().abs().max() + 1)) ** 2
    return y, 3 * y.detach()


@triton.jit
def _by_type(X, Y, n, flag, scale, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    if X.dtype.element_ty == tl.bfloat16 or X.dtype.element_ty == tl.float16:
        x = x.to(tl.float32) * scale
    if flag:
        x = x * x
    tl.device_assert(n < 1000, "too many elements")
    tl.store(Y + o, x.to(Y.dtype.element_ty), mask=o < n)


def by_type(x: Tensor, flag: bool) -> Tensor:
    """Takes another path for low precision; the flag is a bool argument."""
    y = torch.empty_like(x)
    _by_type[(triton.cdiv(x.numel(), 16), 1, 1)](x, y, x.numel(), flag, 3, BLOCK=16, num_warps=1)
    return y


def _by_type_reference(x: Tensor, flag: bool) -> Tensor:
    return x**2 if flag else x


CASES = [
    *in_dtypes(
        Case("autotune_heuristics", tuned_sum, lambda: (torch.randn(4, 48),), lambda x: (x * (-x * x).exp()).sum(1)),
    ),
    Case("autotune_ragged", tuned_sum, lambda: (torch.randn(3, 45),), lambda x: (x * (-x * x).exp()).sum(1)),
    Case("autotune_hook_clears", cleared_by_hook, lambda: (torch.randn(41),), lambda x: (x * x).sum()),
    Case("autotune_restores", consumed, lambda: (torch.randn(37),), lambda x: (x * x, 2 * x)),
    Case("constexpr_branches", constants, lambda: (torch.randn(50), torch.randn(50), "gelu", 3), _constants_reference),
    Case("constexpr_none", constants, lambda: (torch.randn(50), None, "silu", 2), _constants_reference),
    *in_dtypes(
        Case(
            "tuple_arguments",
            tuple_arguments,
            lambda: (torch.randn(20), torch.randn(20), torch.randn(20)),
            lambda a, b, c: (a - 0.5 * b + 2 * c) ** 2,
        ),
        HALF,
    ),
    Case("autograd_function", autograd_function, lambda: (torch.randn(30),), lambda x: x**4 + 1),
    Case("subclassed_module", subclassed_module, lambda: (torch.randn(5, 8), torch.randn(8, 8)), _module_reference),
    Case("detached_statistics", detached_statistics, lambda: (torch.randn(30),), _detached_reference),
    Case("path_by_dtype", by_type, lambda: (torch.randn(40), True), _by_type_reference),
    Case(
        "path_by_dtype-bfloat16",
        by_type,
        lambda: (torch.randn(40), True),
        lambda x, flag: (3 * x) ** 2,
        dtype=BF16,
    ),
]
