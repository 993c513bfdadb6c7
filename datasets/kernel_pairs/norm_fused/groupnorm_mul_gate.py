"""Normalisation of each head inside a wide row, times a gate: y = gate * (w * xhat + b), as after linear attention.

A program holds whole rows as (head, feature) tiles, so the statistics of all heads are one reduction along the feature
axis, and w, b and the sums of their gradients stay in registers from row to row. dgate reads off the rebuilt norm.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_mul_gate",
    "family": "norm_fused",
    "op": "group_norm_gate",
    "schema": 1,
    "techniques": ("row-local", "recompute", "persistent-grid", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "gate", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _head_norm(x, ok, D, eps):
    """xhat and 1/std of every head (row) of a tile that is zero outside `ok`."""
    centred = tl.where(ok, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    return centred * rstd[:, None], rstd


@triton.jit
def _head_norm_gate_fwd(X, Gate, W, B, Y, H, D, eps, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    ok = (h[:, None] < H) & (d[None, :] < D)
    col = h[:, None] * D + d[None, :]
    x = tl.load(X + token * H * D + col, mask=ok, other=0.0).to(tl.float32)
    xhat, _ = _head_norm(x, ok, D, eps)
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(B + col, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(Gate + token * H * D + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + token * H * D + col, gate * (xhat * w + b), mask=ok)


def _tile(H, D):
    block_h, block_d = triton.next_power_of_2(H), triton.next_power_of_2(D)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": max(1, min(16, block_h * block_d // 256))}


def forward(x, gate, weight, bias, heads, eps=1e-5):
    x, gate = x.contiguous(), gate.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    _head_norm_gate_fwd[(M,)](x, gate, weight, bias, y, heads, N // heads, eps, **_tile(heads, N // heads))
    return y, (x, gate, weight, bias, heads, eps)


# --- backward ---
@triton.jit
def _head_norm_gate_bwd(
    DY, X, Gate, W, B, DX, DGate, DWParts, DBParts, M, H, D, dy_row, dy_col, eps,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    ok = (h[:, None] < H) & (d[None, :] < D)
    col = h[:, None] * D + d[None, :]
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(B + col, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    db = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for token in tl.range(pid, M, tl.num_programs(0), num_stages=3):
        at = token * H * D + col
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + token * dy_row + col.to(tl.int64) * dy_col, mask=ok, other=0.0).to(tl.float32)
        xhat, rstd = _head_norm(x, ok, D, eps)
        tl.store(DGate + at, dy * (xhat * w + b), mask=ok)
        dnormed = dy * tl.load(Gate + at, mask=ok, other=0.0).to(tl.float32)
        dw += dnormed * xhat
        db += dnormed
        dxhat = dnormed * w
        c1 = tl.sum(dxhat * xhat, 1) / D
        c2 = tl.sum(dxhat, 1) / D
        tl.store(DX + at, rstd[:, None] * (dxhat - c2[:, None] - xhat * c1[:, None]), mask=ok)
    tl.store(DWParts + pid * H * D + col, dw, mask=ok)
    tl.store(DBParts + pid * H * D + col, db, mask=ok)


def backward(saved, grad_y, needs=None):
    x, gate, weight, bias, heads, eps = saved
    M, N = x.shape
    tile = _tile(heads, N // heads)
    # One wave: 768 threads for each of 132 processors, as the registers allow.
    programs = min(132 * max(1, 24 // tile["num_warps"]), triton.cdiv(M, 2))
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    dw_parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    db_parts = torch.empty_like(dw_parts)
    _head_norm_gate_bwd[(programs,)](
        grad_y, x, gate, weight, bias, dx, dgate, dw_parts, db_parts, M, heads, N // heads,
        grad_y.stride(0), grad_y.stride(1), eps, **tile,
    )  # fmt: skip
    return dx, dgate, dw_parts.sum(0).to(weight.dtype), db_parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = (
    {"M": 6, "H": 4, "D": 16},
    {"M": 7, "H": 3, "D": 21, "dtype": "float16"},
    {"M": 5, "H": 2, "D": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "H": 32, "D": 64, "dtype": "bfloat16"},)


def make_args(M, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    N = H * D
    # The gate comes in activated.
    x, gate = torch.randn(M, N, generator=g), torch.sigmoid(torch.randn(M, N, generator=g))
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, gate, weight, bias)), H)


def reference(x, gate, weight, bias, heads, eps=1e-5):
    normed = torch.nn.functional.group_norm(x.float(), heads, weight.float(), bias.float(), eps)
    return (gate.float() * normed).to(x.dtype)
