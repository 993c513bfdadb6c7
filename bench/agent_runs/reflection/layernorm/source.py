"""LayerNorm over the last dimension, one row per program; mean and rstd are returned beside the result."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def layernorm_fwd_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    stride_xm,
    stride_ym,
    N,
    eps,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N

    b_x = tl.load(X + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(b_x, axis=0) / N
    b_centered = tl.where(mask, b_x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(b_centered * b_centered, axis=0) / N + eps)

    b_w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(B + cols, mask=mask, other=0.0).to(tl.float32)
    b_y = b_centered * rstd * b_w + b_b
    tl.store(Y + row * stride_ym + cols, b_y, mask=mask)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@autodiff(inputs_require_grad=("x", "weight", "bias"), nondiff_outputs=(1, 2))
def layernorm(x, weight, bias, eps=1e-5):
    """`y = (x - mean) * rstd * weight + bias` for x (..., N), weight (N,) and bias (N,).

    Returns y like x, and mean and rstd in float32, one per row of x flattened to two dimensions.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    M, N = rows.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    mean = torch.empty(M, dtype=torch.float32, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    layernorm_fwd_kernel[(M,)](
        rows,
        weight,
        bias,
        y,
        mean,
        rstd,
        rows.stride(0),
        y.stride(0),
        N,
        eps,
        BLOCK_N=BLOCK_N,
        num_warps=min(max(BLOCK_N // 256, 1), 8),
    )
    return y.view(x.shape), mean, rstd


SWEEP = [
    dict(M=4096, N=1024),
    dict(M=1151, N=8192),
    dict(M=4096, N=1024, dtype="bfloat16"),
    dict(M=31, N=100),
    dict(M=16384, N=12288, required=False),
]


def make_args(M, N, dtype="float32", device="cuda"):
    x = torch.randn(M, N, device=device) * 2 + 0.5
    weight = torch.rand(N, device=device) + 0.5
    bias = torch.randn(N, device=device)
    return tuple(t.to(getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(dim=-1)
    rstd = torch.rsqrt(rows.var(dim=-1, unbiased=False) + eps)
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, mean, rstd
