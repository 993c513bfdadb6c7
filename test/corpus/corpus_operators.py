"""How libraries wrap their kernels: registered operators, autograd functions with decorators, warmed-up kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _axpy(X, Y, OUT, n, alpha, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    y = tl.load(Y + o, mask=o < n, other=0.0)
    tl.store(OUT + o, alpha * x * x + y, mask=o < n)


@triton_op("kernel_agent_corpus::axpy", mutates_args={})
def _axpy_operator(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    out = torch.empty_like(x)
    wrap_triton(_axpy)[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), alpha, BLOCK=16)
    return out


def registered_operator(x: Tensor, y: Tensor) -> Tensor:
    """`wrap_triton` inside of `triton_op`, called as a Python function and through `torch.ops`."""
    z = _axpy_operator(x, y, 0.5)
    return torch.ops.kernel_agent_corpus.axpy(z, x, 2.0)


def _registered_reference(x: Tensor, y: Tensor) -> Tensor:
    return 2 * (0.5 * x * x + y) ** 2 + x


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """As libraries guard their functions: inputs made contiguous, the device of the first made current."""

    @functools.wraps(function)
    def guarded(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.cuda.device(device.index):
            return function(ctx, *args, **kwargs)

    return guarded


class _Axpy(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    @_contiguous
    def forward(ctx: Any, x: Tensor, y: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        _axpy[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), alpha, BLOCK=16)
        count = torch.tensor(x.numel(), device=x.device)
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(count)
        ctx.alpha = alpha
        ctx.set_materialize_grads(False)
        return out, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the kernel's own gradient is wanted")


def guarded_function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x comes transposed and is made contiguous on its way."""
    assert x.is_cuda
    return _Axpy.apply(x, y, 3.0)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _axpy[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), 0.5, BLOCK=16)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the kernel's own gradient is wanted")


def function_with_context(x: Tensor, y: Tensor) -> Tensor:
    return _Halves.apply(x, _Halves.apply(y, x))


@triton.jit
def _rows_of(X, Y, stride, N, rows, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        c = tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + c, mask=c < N, other=-float("inf"))
        tl.store(Y + row * N + c, tl.exp(x - tl.max(x, 0)), mask=c < N)


def warmed_up(x: Tensor) -> Tensor:
    """The grid is computed from what the compiled kernel says of its registers."""
    rows, N = x.shape
    y = torch.empty_like(x)
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    kernel = _rows_of.warmup(x, y, x.stride(0), N, rows, BLOCK=16, STAGES=2, num_warps=4, grid=(1,))
    kernel._init_handles()
    occupancy = max(1, properties["max_num_regs"] // (kernel.n_regs * 32 * 4))
    programs = min(properties["multiprocessor_count"] * occupancy, rows)
    kernel[(programs, 1, 1)](x, y, x.stride(0), N, rows, 16, 2)
    return y


def _warmed_reference(x: Tensor) -> Tensor:
    return (x - x.amax(1, keepdim=True)).exp()


def nested_arguments(tensors: dict[str, list[Tensor]], *, scale: float = 2.0) -> dict[str, Any]:
    """Tensors in lists of a dict go in and a dict comes back."""
    x, y = tensors["pair"]
    out = torch.empty_like(x)
    _axpy[(triton.cdiv(x.numel(), 16),)](X=x, Y=y, OUT=out, n=x.numel(), alpha=scale, BLOCK=16, num_stages=1)
    return {"out": out, "more": (None, [y * scale])}


def keyword_launch(x: Tensor, y: Tensor) -> dict[str, Any]:
    return nested_arguments({"pair": [x, y]}, scale=-1.5)


def _keyword_reference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return -1.5 * x * x + y, -1.5 * y


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    """Autocast lowers the product's declared dtype; nothing is rounded, and the kernel sees bfloat16."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        h = x @ w
    out = torch.empty_like(h)
    _axpy[(triton.cdiv(h.numel(), 16),)](h, h, out, h.numel(), 1.0, BLOCK=16)
    return out.float()


def in_inference_mode(x: Tensor, y: Tensor) -> Tensor:
    """Stubs made for inference have gradients all the same."""
    with torch.no_grad():
        out = torch.zeros_like(x)
        _axpy[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), 1.0, BLOCK=16)
    return out


CASES = [
    Case("registered_operator", registered_operator, lambda: (torch.randn(40), torch.randn(40)), _registered_reference),
    *in_dtypes(
        Case(
            "guarded_function",
            guarded_function,
            lambda: (torch.randn(5, 7).t(), torch.randn(7, 5)),
            lambda x, y: (3 * x * x + y, torch.tensor(x.numel())),
        ),
        BF16,
    ),
    Case(
        "function_with_context",
        function_with_context,
        lambda: (torch.randn(30), torch.randn(30)),
        lambda x, y: 0.5 * x * x + 0.5 * y * y + x,
    ),
    Case("warmed_up_kernel", warmed_up, lambda: (torch.randn(7, 13),), _warmed_reference),
    *in_dtypes(
        Case("keyword_launch", keyword_launch, lambda: (torch.randn(20), torch.randn(20)), _keyword_reference), HALF
    ),
    Case(
        "under_autocast",
        under_autocast,
        lambda: (torch.randn(6, 8), torch.randn(8, 4)),
        lambda x, w: (x @ w) ** 2 + x @ w,
    ),
    Case("in_inference_mode", in_inference_mode, lambda: (torch.randn(20), torch.randn(20)), lambda x, y: x * x + y),
]
