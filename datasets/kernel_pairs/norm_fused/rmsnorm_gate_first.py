"""A SiLU gate, then RMSNorm: y = w * h / rms(h) with h = x * silu(z), the product rule inside the normalised quantity.

The projection that the norm takes off its gradient is along h, not along x: dh is complete first, and only then split
into dx = dh * silu(z) and dz = dh * x * silu'(z). h is never stored; 1/rms is, so dh needs one row sum.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_gate_first",
    "family": "norm_fused",
    "op": "gated_rms_norm",
    "schema": 1,
    "techniques": ("row-local", "recompute", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "z", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gate_then_norm_fwd(X, Z, W, Y, InvRms, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    z = tl.load(Z + row * N + n, mask=live, other=0.0).to(tl.float32)
    h = tl.load(X + row * N + n, mask=live, other=0.0).to(tl.float32) * z * tl.sigmoid(z)
    inv_rms = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(InvRms + row, inv_rms)
    h *= inv_rms * tl.load(W + n, mask=live, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, h, mask=live)


def forward(x, z, weight, eps=1e-5):
    x, z = x.contiguous(), z.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _gate_then_norm_fwd[(M,)](x, z, weight, y, inv_rms, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, z, weight, inv_rms)


# --- backward ---
@triton.jit
def _gate_then_norm_bwd(
    DY, X, Z, W, InvRms, DX, DZ, Parts, M, N, dy_row, dy_col, rows_each, BLOCK: tl.constexpr
):  # fmt: skip
    band = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    w = tl.load(W + n, mask=live, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(band * rows_each, tl.minimum((band + 1) * rows_each, M)):
        x = tl.load(X + row * N + n, mask=live, other=0.0).to(tl.float32)
        z = tl.load(Z + row * N + n, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_row + n * dy_col, mask=live, other=0.0).to(tl.float32)
        inv_rms = tl.load(InvRms + row)
        s = tl.sigmoid(z)
        silu = z * s
        unit = x * silu * inv_rms
        dw += dy * unit
        dunit = dy * w
        dh = (dunit - unit * (tl.sum(dunit * unit, 0) / N)) * inv_rms
        tl.store(DX + row * N + n, dh * silu, mask=live)
        # silu'(z) = s + z s (1 - s)
        tl.store(DZ + row * N + n, dh * x * (s + silu * (1.0 - s)), mask=live)
    tl.store(Parts + band * N + n, dw, mask=live)


@triton.jit
def _add_bands(Parts, DW, bands, N, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in range(0, bands, BLOCK_B):
        band = (start + tl.arange(0, BLOCK_B))[:, None]
        dw += tl.load(Parts + band * N + n[None, :], mask=(band < bands) & (n[None, :] < N), other=0.0)
    tl.store(DW + n, tl.sum(dw, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, z, weight, inv_rms = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(1, min(16, BLOCK // 256))
    # One wave of 768 threads for each of 132 processors, as the registers allow. Neighbouring rows stay together.
    rows_each = max(2, triton.cdiv(M, 132 * max(1, 24 // warps)))
    bands = triton.cdiv(M, rows_each)
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    parts = torch.empty(bands, N, device=x.device, dtype=torch.float32)
    _gate_then_norm_bwd[(bands,)](
        grad_y, x, z, weight, inv_rms, dx, dz, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each,
        BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    if needs is not None and not needs[2]:
        return dx, dz, None
    dweight = torch.empty_like(weight)
    _add_bands[(triton.cdiv(N, 32),)](parts, dweight, bands, N, BLOCK_B=64, BLOCK_N=32)
    return dx, dz, dweight


# --- check ---
SWEEP = ({"M": 5, "N": 64}, {"M": 13, "N": 81, "dtype": "float16"}, {"M": 6, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, z, weight, eps=1e-5):
    h = x.float() * torch.nn.functional.silu(z.float())
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
