"""RMSNorm over the last dimension: `y = x / sqrt(mean(x**2) + eps) * weight`, several short rows per program."""

import torch
import triton
import triton.language as tl

from kernel_agent.autodiff import autodiff


@triton.jit
def rmsnorm_fwd_kernel(
    X,
    W,
    Y,
    M,
    N,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]

    b_x = tl.load(X + offsets, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
    rrms = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / N + eps)
    tl.store(Y + offsets, b_x * rrms[:, None] * b_w[None, :], mask=mask)


@autodiff
def rmsnorm(x, weight, eps=1e-6):
    """RMSNorm of x (..., N) with weight (N,); the result is like x."""
    x = x.contiguous()
    N = x.shape[-1]
    M = x.numel() // N
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    rmsnorm_fwd_kernel[(triton.cdiv(M, BLOCK_M),)](
        x, weight, y, M, N, eps, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=8
    )
    return y


SWEEP = [
    dict(batch=8, seq=512, hidden=4096),
    dict(batch=2, seq=2048, hidden=128),
    dict(batch=8, seq=512, hidden=4096, dtype="bfloat16"),
    dict(batch=3, seq=7, hidden=60),
]


def make_args(dims, device="cuda", seed=0):
    dtype = getattr(torch, dims.get("dtype", "float32"))
    torch.manual_seed(seed)
    x = torch.randn(dims["batch"], dims["seq"], dims["hidden"], device=device, dtype=dtype)
    weight = torch.rand(dims["hidden"], device=device).to(dtype) + 0.5
    return x, weight


def reference(x, weight, eps=1e-6):
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight
    return y.to(x.dtype)
