"""Two tensors divided by the shared rms of their concatenated rows: one statistic couples the gradients of both.

With u = a / rms and v = b / rms, the gradients lose the same multiple of u and v: c = (<du, u> + <dv, v>) / (NA + NB)
runs over both cotangents. A program owns one row of either tensor, so the concatenation is never made; a missing
cotangent drops out of c, yet its tensor still has a gradient through the other.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "crossnorm_pair",
    "family": "norm_row",
    "op": "rms_norm_pair",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "optional-cotangent", "one-launch", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pair_norm_fwd(A, B, U, V, InvRms, NA, NB, eps, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_A)
    j = tl.arange(0, BLOCK_B)
    a = tl.load(A + row * NA + i, mask=i < NA, other=0.0).to(tl.float32)
    b = tl.load(B + row * NB + j, mask=j < NB, other=0.0).to(tl.float32)
    inv = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (NA + NB) + eps)
    tl.store(InvRms + row, inv)
    tl.store(U + row * NA + i, a * inv, mask=i < NA)
    tl.store(V + row * NB + j, b * inv, mask=j < NB)


def _launch(NA, NB):
    block_a, block_b = triton.next_power_of_2(NA), triton.next_power_of_2(NB)
    return {"BLOCK_A": block_a, "BLOCK_B": block_b, "num_warps": max(1, min(16, max(block_a, block_b) // 256))}


def forward(a, b, eps=1e-6):
    a, b = a.contiguous(), b.contiguous()
    (M, NA), NB = a.shape, b.shape[1]
    u, v = torch.empty_like(a), torch.empty_like(b)
    inv_rms = torch.empty(M, device=a.device, dtype=torch.float32)
    _pair_norm_fwd[(M,)](a, b, u, v, inv_rms, NA, NB, eps, **_launch(NA, NB))
    return (u, v), (a, b, inv_rms)


# --- backward ---
@triton.jit
def _pair_norm_bwd(
    DU, DV, A, B, InvRms, DA, DB, NA, NB, du_m, du_n, dv_m, dv_n,
    HAS_DU: tl.constexpr, HAS_DV: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_A)
    j = tl.arange(0, BLOCK_B)
    inv = tl.load(InvRms + row)
    u = tl.load(A + row * NA + i, mask=i < NA, other=0.0).to(tl.float32) * inv
    v = tl.load(B + row * NB + j, mask=j < NB, other=0.0).to(tl.float32) * inv
    du = tl.zeros((BLOCK_A,), tl.float32)
    dv = tl.zeros((BLOCK_B,), tl.float32)
    if HAS_DU:
        du = tl.load(DU + row * du_m + i * du_n, mask=i < NA, other=0.0).to(tl.float32)
    if HAS_DV:
        dv = tl.load(DV + row * dv_m + j * dv_n, mask=j < NB, other=0.0).to(tl.float32)
    c = (tl.sum(du * u, 0) + tl.sum(dv * v, 0)) / (NA + NB)
    tl.store(DA + row * NA + i, inv * (du - u * c), mask=i < NA)
    tl.store(DB + row * NB + j, inv * (dv - v * c), mask=j < NB)


def backward(saved, grad_u, grad_v, needs=None):
    a, b, inv_rms = saved
    (M, NA), NB = a.shape, b.shape[1]
    da, db = torch.empty_like(a), torch.empty_like(b)
    has_du, has_dv = grad_u is not None, grad_v is not None
    _pair_norm_bwd[(M,)](
        grad_u, grad_v, a, b, inv_rms, da, db, NA, NB,
        *(grad_u.stride() if has_du else (0, 0)), *(grad_v.stride() if has_dv else (0, 0)),
        HAS_DU=has_du, HAS_DV=has_dv, **_launch(NA, NB),
    )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"M": 6, "NA": 64, "NB": 32},
    {"M": 11, "NA": 45, "NB": 93, "dtype": "float16"},
    {"M": 7, "NA": 128, "NB": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "NA": 2048, "NB": 1024, "dtype": "bfloat16"},)


def make_args(M, NA, NB, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Unlike sizes: the larger one governs the statistic.
    a, b = torch.randn(M, NA, generator=g) * 2.0, torch.randn(M, NB, generator=g) * 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))


def reference(a, b, eps=1e-6):
    joined = torch.cat((a.float(), b.float()), 1)
    normed = torch.nn.functional.rms_norm(joined, (joined.shape[1],), eps=eps)
    u, v = normed.split((a.shape[1], b.shape[1]), 1)
    return u.to(a.dtype).contiguous(), v.to(b.dtype).contiguous()
