"""Partial RMSNorm: the first P of N features define the rms, all are divided by it.

Every feature pulls on the statistic through y, so the row sum of dy * w * x runs over the whole row; only the prefix
moves it, so its correction is subtracted from the first P gradients alone and the rest are plain products.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_partial_p",
    "family": "norm_row",
    "op": "partial_rms_norm",
    "schema": 1,
    "techniques": ("row-local", "masking", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _prefix_norm_fwd(X, W, Y, InvRms, N, P, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    prefix = tl.where(n < P, x, 0.0)
    inv = tl.rsqrt(tl.sum(prefix * prefix, 0) / P + eps)
    tl.store(InvRms + row, inv)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, x * inv * w, mask=n < N)


def forward(x, weight, share=0.25, eps=1e-6):
    x = x.contiguous()
    M, N = x.shape
    P = max(1, int(N * share))
    y = torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _prefix_norm_fwd[(M,)](x, weight, y, inv_rms, N, P, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, inv_rms, P)


# --- backward ---
@triton.jit
def _prefix_norm_bwd(DY, X, W, InvRms, DX, Parts, M, N, P, dy_m, dy_n, each, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    # A band of neighbouring rows: their statistics share a line of cache, the rows themselves are copied ahead.
    for row in tl.range(pid * each, tl.minimum((pid + 1) * each, M), num_stages=STAGES):
        inv = tl.load(InvRms + row)
        unit = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) * inv
        dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
        dw += dy * unit
        dunit = dy * w
        pull = tl.sum(dunit * unit, 0) / P
        tl.store(DX + row * N + n, inv * (dunit - tl.where(n < P, unit * pull, 0.0)), mask=n < N)
    tl.store(Parts + pid * N + n, dw, mask=n < N)


def backward(saved, grad_y, needs=None):
    x, weight, inv_rms, P = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(2, min(16, BLOCK // 512))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    each = max(2, triton.cdiv(M, 132 * max(1, 16 // warps)))
    programs = triton.cdiv(M, each)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    _prefix_norm_bwd[(programs,)](
        grad_y, x, weight, inv_rms, dx, parts, M, N, P, grad_y.stride(0), grad_y.stride(1), each,
        STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"M": 6, "N": 64},
    {"M": 11, "N": 93, "dtype": "float16"},
    {"M": 7, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight, share=0.25, eps=1e-6):
    xf = x.float()
    P = max(1, int(x.shape[1] * share))
    inv = torch.rsqrt(xf[:, :P].pow(2).mean(-1, keepdim=True) + eps)
    return (xf * inv * weight.float()).to(x.dtype)
