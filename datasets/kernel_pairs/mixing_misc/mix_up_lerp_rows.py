"""Mixture of row pairs with a learned weight per row: two scaled cotangents and a dot product in one pass."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mix_up_lerp_rows",
    "family": "mixing_misc",
    "op": "lerp",
    "schema": 1,
    "techniques": ("row-local", "one-launch", "broadcast-reduction", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y", "ratio"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lerp_fwd(X, Y, Ratio, Out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    ratio = tl.load(Ratio + m, mask=m < M, other=0.0).to(tl.float32)
    x = tl.load(X + m * N + n, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(Y + m * N + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(Out + m * N + n, y + ratio * (x - y), mask=ok)


def forward(x, y, ratio):
    """ratio x + (1 - ratio) y for x, y (M, N) and ratio (M)."""
    x, y, ratio = x.contiguous(), y.contiguous(), ratio.contiguous()
    M, N = x.shape
    out = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _lerp_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, y, ratio, out, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return out, (x, y, ratio)


# --- backward ---
@triton.jit
def _lerp_bwd(
    DOut, X, Y, Ratio, DX, DY, DRatio, M, N, d_m, d_n,
    NEED_XY: tl.constexpr, NEED_RATIO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ratio = tl.load(Ratio + m, mask=m < M, other=0.0).to(tl.float32)
    dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = m[:, None] * N + n[None, :]
        ok = (m[:, None] < M) & (n[None, :] < N)
        dout_at = m[:, None] * d_m + n[None, :].to(tl.int64) * d_n
        dout = tl.load(DOut + dout_at, mask=ok, other=0.0).to(tl.float32)
        if NEED_XY:
            dx = ratio[:, None] * dout
            tl.store(DX + at, dx, mask=ok)
            tl.store(DY + at, dout - dx, mask=ok)
        # The operands are read for the ratio's sake alone.
        if NEED_RATIO:
            x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
            dots += dout * (x - tl.load(Y + at, mask=ok, other=0.0).to(tl.float32))
    if NEED_RATIO:
        tl.store(DRatio + m, tl.sum(dots, 1), mask=m < M)


def backward(saved, grad_out, needs=(True, True, True)):
    x, y, ratio = saved
    M, N = x.shape
    need_xy, need_ratio = needs[0] or needs[1], needs[2]
    dx, dy = (torch.empty_like(x), torch.empty_like(y)) if need_xy else (None, None)
    dratio = torch.empty_like(ratio) if need_ratio else None
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _lerp_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_out, x, y, ratio, dx if need_xy else x, dy if need_xy else y, dratio if need_ratio else ratio,
        M, N, *grad_out.stride(), NEED_XY=need_xy, NEED_RATIO=need_ratio,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return dx, dy, dratio


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 1037}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(M, N, generator=g), torch.rand(M, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, y, ratio):
    return torch.lerp(y.float(), x.float(), ratio.float()[:, None]).to(x.dtype)
