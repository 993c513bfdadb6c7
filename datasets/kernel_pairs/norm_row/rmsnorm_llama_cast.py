"""RMSNorm that rounds xhat to the storage dtype before the weight multiplies it (the order that Llama uses).

y = weight * round(x / rms), so dweight is the sum of dy times the rounded xhat. It is rounded again from x and the
saved 1/rms, by the same operations, hence bit for bit. dx passes the rounding unchanged and uses xhat itself. dx and
dweight are separate launches, each in the grid of what it writes; dweight splits the rows over programs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_llama_cast",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("owner-grid", "row-local", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _llama_norm_fwd(X, W, Y, InvRms, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0)
    xf = x.to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(xf * xf, 0) / N + eps)
    tl.store(InvRms + row, inv_rms)
    rounded = (xf * inv_rms).to(x.dtype)
    w = tl.load(W + n, mask=n < N, other=0.0)
    tl.store(Y + row * N + n, w.to(tl.float32) * rounded.to(tl.float32), mask=n < N)


def forward(x, weight, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _llama_norm_fwd[(M,)](x, weight, y, inv_rms, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, inv_rms)


# --- backward ---
@triton.jit
def _llama_norm_dx(DY, X, W, InvRms, DX, N, dy_m, dy_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inv_rms = tl.load(InvRms + row)
    xhat = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) * inv_rms
    dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
    dxhat = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    radial = tl.sum(dxhat * xhat, 0) / N
    tl.store(DX + row * N + n, (dxhat - xhat * radial) * inv_rms, mask=n < N)


@triton.jit
def _llama_norm_dw(
    DY, X, InvRms, Parts, M, N, dy_m, dy_n, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    last = tl.minimum((split + 1) * rows_each, M)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < last) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0)
        dy_at = m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        inv_rms = tl.load(InvRms + m, mask=m < last, other=0.0)
        # What the weight met in the forward: the rounded value.
        rounded = (x.to(tl.float32) * inv_rms[:, None]).to(x.dtype)
        dw += dy * rounded.to(tl.float32)
    tl.store(Parts + split * N + n, tl.sum(dw, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, weight, inv_rms = saved
    M, N = x.shape
    need_x, need_w = needs or (True, True)
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK = triton.next_power_of_2(N)
        _llama_norm_dx[(M,)](
            grad_y, x, weight, inv_rms, dx, N, grad_y.stride(0), grad_y.stride(1),
            BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)),
        )  # fmt: skip
    if need_w:
        # 128 columns are whole cache lines; the rows are split until there are some eight programs for a processor.
        tiles = triton.cdiv(N, 128)
        rows_each = triton.cdiv(triton.cdiv(M, max(1, 1056 // tiles)), 16) * 16
        splits = triton.cdiv(M, rows_each)
        parts = torch.empty(splits, N, device=x.device, dtype=torch.float32)
        _llama_norm_dw[(tiles, splits)](
            grad_y, x, inv_rms, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each, BLOCK_M=16, BLOCK_N=128
        )
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"M": 12, "N": 128},
    {"M": 21, "N": 151, "dtype": "float16"},
    {"M": 18, "N": 96, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, N, generator=g) * 0.9, torch.rand(N, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight, eps=1e-5):
    xf = x.float()
    xhat = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return weight * xhat.to(x.dtype)
