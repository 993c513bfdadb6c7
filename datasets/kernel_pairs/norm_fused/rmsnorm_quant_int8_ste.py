"""RMSNorm and per-token int8 fake quantisation: the rounding passes the gradient, the scale counts as constant.

The quantised row is scale * round(n / scale) with scale = max |n| / 127, so nothing is clipped and the intended
gradient is the norm's alone. The backward never forms the scale; it rebuilds xhat from x and the saved 1/rms.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "rmsnorm_quant_int8_ste",
    "family": "norm_fused",
    "op": "rms_norm_fake_quant",
    "schema": 1,
    "techniques": ("straight-through", "row-local", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "weight"),
    "gradient": "custom",
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _rms_quant_fwd(X, W, Y, InvRms, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    ok = n < N
    x = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(InvRms + row, inv)
    normed = x * inv * tl.load(W + n, mask=ok, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(normed), 0)
    # A row of zeros has scale 1 and stays zero.
    scale = tl.where(top > 0.0, top / 127.0, 1.0)
    tl.store(Y + row * N + n, scale * libdevice.rint(normed / scale), mask=ok)


def forward(x, weight, eps=1e-6):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _rms_quant_fwd[(M,)](x, weight, y, inv_rms, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, inv_rms)


# --- backward ---
@triton.jit
def _rms_ste_bwd(DY, X, W, InvRms, DX, Parts, M, N, dy_m, dy_n, band, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    ok = n < N
    w = tl.load(W + n, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    # Copies of the next two rows run while the sum of this one waits for its warps.
    for row in tl.range(pid * band, tl.minimum((pid + 1) * band, M), num_stages=STAGES):
        inv = tl.load(InvRms + row)
        xhat = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32) * inv
        # Straight through: the gradient of the quantised row is the gradient of the normed row.
        dnormed = tl.load(DY + row * dy_m + n * dy_n, mask=ok, other=0.0).to(tl.float32)
        dw += dnormed * xhat
        dxhat = dnormed * w
        tl.store(DX + row * N + n, inv * (dxhat - xhat * (tl.sum(dxhat * xhat, 0) / N)), mask=ok)
    tl.store(Parts + pid * N + n, dw, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, inv_rms = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(2, min(16, BLOCK // 512))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    band = max(2, triton.cdiv(M, 132 * max(1, 16 // warps)))
    programs = triton.cdiv(M, band)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    _rms_ste_bwd[(programs,)](
        grad_y, x, weight, inv_rms, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), band,
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


def _normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight.float(), eps)


def reference(x, weight, eps=1e-6):
    normed = _normed(x, weight, eps)
    top = normed.abs().amax(-1, keepdim=True)
    scale = torch.where(top > 0.0, top / 127.0, 1.0)
    return (scale * torch.round(normed / scale)).to(x.dtype)


def surrogate(x, weight, eps=1e-6):
    xf = x if x.dtype == torch.float64 else x.float()
    normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * weight.to(xf.dtype)
    return normed.to(x.dtype)
