"""Statistics computed again, with functions that are imported from where this version of Triton has them."""

import operator

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.libdevice import rsqrt
except ModuleNotFoundError:
    from triton.language.extra.cuda.libdevice import rsqrt

MAX_FUSED_SIZE = 65536 // 2
EPS: tl.constexpr = tl.constexpr(1e-6)
if hasattr(tl, "float8e5"):
    _STAGES = 3
else:
    _STAGES = 2


def calculate_settings(n):
    block = triton.next_power_of_2(n)
    if operator.gt(block, MAX_FUSED_SIZE):
        raise RuntimeError(f"Cannot launch Triton kernel since n = {n} exceeds the maximum block {MAX_FUSED_SIZE}.")
    warps = 4
    if block >= 32768:
        warps = 32 if torch.version.hip is None else 16
    elif block >= 8192:
        warps = 16
    return block, warps


@triton.jit
def _rms_norm_backward(
    dY_ptr, dY_row, dY_column, X_ptr, X_row, W_ptr, dX_ptr, dW_ptr, dW_row, rows, columns, per,
    eps: tl.constexpr = EPS, BLOCK: tl.constexpr = 1,
):  # fmt: skip
    """dx = (1 / RMS) * [dy * w - (1 / N) * (1 / RMS^2) * ((dy * w) dot x) * x]."""
    block_id = tl.program_id(0).to(tl.int64)
    start = block_id * per
    end = min((block_id + 1) * per, rows)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    w = tl.load(W_ptr + offsets, mask=mask, other=0.0)
    for row in range(start, end):
        dy = tl.load(dY_ptr + row * dY_row + offsets * dY_column, mask=mask, other=0.0)
        x = tl.load(X_ptr + row * X_row + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = rsqrt(tl.sum(x * x, axis=0) / columns + eps)
        m = (dy * w).to(tl.float32)
        dx = rstd * m
        dx += (rstd) * (-(1 / columns) * rstd * rstd * tl.sum(m * x, axis=0) * x)
        dw += dy * (x * rstd)
        tl.store(dX_ptr + row * X_row + offsets, dx, mask=mask)
    tl.store(dW_ptr + block_id * dW_row + offsets, dw, mask=mask)


def rms_norm_backward(dY, X, W, most):
    shape = dY.shape
    dim = shape[-1]
    dY = dY.view(-1, dim) if dY.is_contiguous() else dY.reshape(-1, dim)
    n_rows, n_cols = dY.shape
    block, warps = calculate_settings(n_cols)
    sms = min(most, torch.cuda.get_device_properties(X.device).multi_processor_count)
    _dW = torch.empty((sms, n_cols), dtype=torch.float32, device=W.device)
    per = -(-n_rows // sms)
    dX = torch.empty_like(X)
    _rms_norm_backward[(sms,)](
        dY, dY.stride(0), dY.stride(1), X, X.stride(0), W, dX, _dW, _dW.stride(0), n_rows, n_cols, per,
        BLOCK=block, num_warps=warps, num_stages=_STAGES,
    )  # fmt: skip
    return dX.view(*shape), _dW.sum(dim=0).to(W.dtype)


def backward(saved, *grad_outputs):
    X, W, _ = saved
    (dY,) = grad_outputs
    return rms_norm_backward(dY, X, W, 5)
