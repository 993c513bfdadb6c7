"""Behind a decorator that makes arguments contiguous; pointers may be None, and a hook zeroes the sums."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

exp2 = tl.math.exp2
log2 = tl.log2
SUPPORTS_NEW = hasattr(tl, "make_tensor_descriptor")
NUM_WARPS = [1, 2, 4] if SUPPORTS_NEW else [4]


def input_guard(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Contiguous tensors, and the device of the first of them."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        def ready(value):
            return value.contiguous() if isinstance(value, torch.Tensor) else value

        args = tuple(ready(value) for value in args)
        kwargs = {name: ready(value) for name, value in kwargs.items()}
        bound = inspect.signature(fn).bind(*args, **kwargs)
        bound.apply_defaults()
        tensor = next((value for value in bound.arguments.values() if isinstance(value, torch.Tensor)), None)
        context = contextlib.nullcontext() if tensor is None else torch.cuda.device(tensor.device.index)
        with context:
            return fn(*args, **kwargs)

    return wrapper


def _zero(nargs):
    if nargs["dw"] is not None:
        nargs["dw"].zero_()


@triton.heuristics({"HAS_DW": lambda args: args["dw"] is not None, "HAS_DX": lambda args: args["dx"] is not None})
@triton.autotune(
    configs=[triton.Config({"BT": bt}, num_warps=warps, pre_hook=_zero) for warps in NUM_WARPS[:2] for bt in (1, 4)],
    key=["D"],
    restore_value=None,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_bwd_kernel(
    dy, x, w, rstd, dx, dw, T, D, BT: tl.constexpr, BD: tl.constexpr, HAS_DW: tl.constexpr, HAS_DX: tl.constexpr
):
    i_t = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = tl.load(w + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BD], dtype=tl.float32)
    for i in range(BT):
        t = i_t * BT + i
        if t < T:
            b_x = tl.load(x + t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_dy = tl.load(dy + t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_rstd = exp2(log2(tl.load(rstd + t)))
            b_xhat = b_x * b_rstd
            if HAS_DW:
                b_dw += b_dy * b_xhat
            if HAS_DX:
                b_wdy = b_dy * b_w
                b_c = tl.sum(b_xhat * b_wdy, 0) / D
                tl.store(dx + t * D + o_d, ((b_wdy - b_xhat * b_c) * b_rstd).to(dx.dtype.element_ty), mask=m_d)
    if HAS_DW:
        tl.atomic_add(dw + o_d, b_dw, mask=m_d)


@input_guard
def rms_norm_bwd(dy, x, w, rstd, *, need_dx: bool = True, need_dw: bool = True):
    T, D = x.view(-1, x.shape[-1]).shape
    if D > 65536:
        warnings.warn(f"rows of {D} are long", stacklevel=2)
    dx = torch.empty_like(x) if need_dx else None
    dw = torch.empty_like(w, dtype=torch.float) if need_dw else None
    rms_norm_bwd_kernel[lambda meta: (triton.cdiv(T, meta["BT"]),)](
        dy=dy, x=x, w=w, rstd=rstd, dx=dx, dw=dw, T=T, D=D, BD=triton.next_power_of_2(D)
    )
    return dx, None if dw is None else dw.to(w.dtype)


def backward(saved, dy, needs=(True, True)):
    return rms_norm_bwd(dy, *saved, need_dx=needs[0], need_dw=needs[1])
