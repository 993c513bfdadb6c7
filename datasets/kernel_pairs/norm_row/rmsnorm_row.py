"""RMSNorm, one row per program: only 1/rms is saved, dx needs one row sum, dweight comes from partial rows."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_row",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rmsnorm_fwd(X, W, Y, InvRms, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    x = tl.load(X + row * N + col, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(InvRms + row, inv_rms)
    tl.store(Y + row * N + col, x * inv_rms * w, mask=ok)


def forward(x, weight, eps=1e-6):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _rmsnorm_fwd[(M,)](x, weight, y, inv_rms, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, inv_rms)


# --- backward ---
@triton.jit
def _rmsnorm_bwd(DY, X, W, InvRms, DX, DWP, M, N, dy_row, dy_col, rows_each, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    first = pid * rows_each
    last = tl.minimum(first + rows_each, M)
    # Two rows ahead are on their way to shared memory while this one is reduced.
    for row in tl.range(first, last, num_stages=STAGES):
        x = tl.load(X + row * N + col, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_row + col * dy_col, mask=ok, other=0.0).to(tl.float32)
        inv_rms = tl.load(InvRms + row)
        unit = x * inv_rms
        dunit = dy * w
        # y depends on x directly and through the norm: remove the part of dunit along the unit vector.
        radial = tl.sum(dunit * unit, 0) / N
        tl.store(DX + row * N + col, (dunit - unit * radial) * inv_rms, mask=ok)
        dw += dy * unit
    tl.store(DWP + pid * N + col, dw, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, inv_rms = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(2, min(16, BLOCK // 512))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    rows_each = max(2, triton.cdiv(M, 132 * max(1, 16 // warps)))
    parts = triton.cdiv(M, rows_each)
    dx = torch.empty_like(x)
    dw_parts = torch.empty(parts, N, device=x.device, dtype=torch.float32)
    _rmsnorm_bwd[(parts,)](
        grad_y, x, weight, inv_rms, dx, dw_parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each,
        STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return dx, dw_parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = ({"M": 4, "N": 64}, {"M": 13, "N": 90, "dtype": "float16"}, {"M": 6, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, w))


def reference(x, weight, eps=1e-6):
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
