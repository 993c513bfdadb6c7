"""Residual add and RMSNorm in one pass: sum and norm are both outputs, so two cotangents meet in one row pass."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "add_rmsnorm",
    "family": "norm_fused",
    "op": "add_rms_norm",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "two-stage-partials", "optional-cotangent", "shared-gradient"),
    "saves": ("h: fp32 or bf16 or fp16 (M, N)", "inv_rms: fp32 (M,)"),
    "grads": ("x", "residual", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_rmsnorm_fwd(X, Res, W, Y, H, InvRms, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    m = c < N
    at = row * N + c
    h = tl.load(X + at, mask=m, other=0.0).to(tl.float32) + tl.load(Res + at, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    # The norm sees the sum as the next layer will: rounded to its storage dtype.
    h = h.to(H.dtype.element_ty)
    tl.store(H + at, h, mask=m)
    h = h.to(tl.float32)
    inv = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(InvRms + row, inv)
    tl.store(Y + at, h * inv * w, mask=m)


def forward(x, residual, weight, eps=1e-6):
    x, residual = x.contiguous(), residual.contiguous()
    M, N = x.shape
    y, h = torch.empty_like(x), torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _add_rmsnorm_fwd[(M,)](
        x, residual, weight, y, h, inv_rms, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return (y, h), (h, weight, inv_rms)


# --- backward ---
@triton.jit
def _add_rmsnorm_bwd(
    DY, DH, H, W, InvRms, DX, DWP, M, N, dy_row, dy_col, dh_row, dh_col, rows_each,
    HAS_DY: tl.constexpr, HAS_DH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    m = c < N
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(pid * rows_each, tl.minimum(pid * rows_each + rows_each, M)):
        total = tl.zeros((BLOCK,), tl.float32)
        if HAS_DY:
            dy = tl.load(DY + row * dy_row + c * dy_col, mask=m, other=0.0).to(tl.float32)
            inv = tl.load(InvRms + row)
            unit = tl.load(H + row * N + c, mask=m, other=0.0).to(tl.float32) * inv
            dunit = dy * w
            total = (dunit - unit * (tl.sum(dunit * unit, 0) / N)) * inv
            dw += dy * unit
        if HAS_DH:
            total += tl.load(DH + row * dh_row + c * dh_col, mask=m, other=0.0).to(tl.float32)
        tl.store(DX + row * N + c, total, mask=m)
    tl.store(DWP + pid * N + c, dw, mask=m)


def backward(saved, grad_y, grad_h, needs=None):
    h, weight, inv_rms = saved
    M, N = h.shape
    # One wave: three programs of eight warps for each of 132 processors, as the registers allow.
    rows_each = max(2, triton.cdiv(M, 396))
    parts = triton.cdiv(M, rows_each)
    dx = torch.empty_like(h)
    dw_parts = torch.empty(parts, N, device=h.device, dtype=torch.float32)
    dy = h if grad_y is None else grad_y
    dh = h if grad_h is None else grad_h
    BLOCK = triton.next_power_of_2(N)
    _add_rmsnorm_bwd[(parts,)](
        dy, dh, h, weight, inv_rms, dx, dw_parts, M, N, dy.stride(0), dy.stride(1), dh.stride(0), dh.stride(1),
        rows_each, HAS_DY=grad_y is not None, HAS_DH=grad_h is not None,
        BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)),
    )  # fmt: skip
    # The sum has the same gradient on both branches: one tensor serves x and residual.
    return dx, dx, dw_parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = ({"M": 5, "N": 64}, {"M": 11, "N": 100, "dtype": "float16"}, {"M": 6, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, residual, weight, eps=1e-6):
    h = x + residual
    hf = h.float()
    return (hf * torch.rsqrt(hf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), h
