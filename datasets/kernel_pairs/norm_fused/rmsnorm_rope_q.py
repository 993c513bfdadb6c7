"""RMSNorm of every head of q, then rotary embedding, in one pass: back through the rotation, then through the norm.

A rotation's adjoint is the rotation by the opposite angle, so the gradient is turned back and the rest is a plain norm.
A program holds one token's heads as two tiles of half heads: pairs (i, i + D/2) stand in the same place of both, the
angles are fetched once for all heads, and the shared weight's sums stay in registers from token to token.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_rope_q",
    "family": "norm_fused",
    "op": "rms_norm_rope",
    "schema": 1,
    "techniques": (
        "orthogonal-adjoint", "recompute", "head-reduction", "persistent-grid", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": (),
    "grads": ("q", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _norm_rope_fwd(Q, W, Cos, Sin, Y, S, H, HALF, q_t, eps, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok = (h < H) & (d < HALF)
    col = h * 2 * HALF + d
    lo = tl.load(Q + token * q_t + col, mask=ok, other=0.0).to(tl.float32)
    hi = tl.load(Q + token * q_t + col + HALF, mask=ok, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(lo * lo + hi * hi, 1, keep_dims=True) / (2 * HALF) + eps)
    lo *= inv * tl.load(W + d, mask=d < HALF, other=0.0).to(tl.float32)
    hi *= inv * tl.load(W + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    angle = token % S * HALF + d
    cos = tl.load(Cos + angle, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(Sin + angle, mask=d < HALF, other=0.0).to(tl.float32)
    out = Y + token * H * 2 * HALF + col
    tl.store(out, lo * cos - hi * sin, mask=ok)
    tl.store(out + HALF, hi * cos + lo * sin, mask=ok)


def _tile(H, HALF):
    block_h, block_d = triton.next_power_of_2(H), triton.next_power_of_2(HALF)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": max(1, min(16, block_h * block_d // 256))}


def forward(q, weight, cos, sin, eps=1e-6):
    B, S, H, D = q.shape
    # Tokens may lie apart, as in a packed projection of q, k and v; the heads of a token are one piece.
    if q.stride(3) != 1 or q.stride(2) != D or q.stride(0) != S * q.stride(1):
        q = q.contiguous()
    y = torch.empty(B, S, H, D, device=q.device, dtype=q.dtype)
    _norm_rope_fwd[(B * S,)](q, weight, cos, sin, y, S, H, D // 2, q.stride(1), eps, **_tile(H, D // 2))
    return y, (q, weight, cos, sin, eps)


# --- backward ---
@triton.jit
def _norm_rope_bwd(
    DY, Q, W, Cos, Sin, DQ, Parts, tokens, S, H, HALF, q_t, dy_b, dy_s, dy_h, dy_d, eps,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok = (h < H) & (d < HALF)
    col = h * 2 * HALF + d
    w_lo = tl.load(W + d, mask=d < HALF, other=0.0).to(tl.float32)
    w_hi = tl.load(W + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    dw_lo = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    dw_hi = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for token in range(pid, tokens, tl.num_programs(0)):
        angle = token % S * HALF + d
        cos = tl.load(Cos + angle, mask=d < HALF, other=0.0).to(tl.float32)
        sin = tl.load(Sin + angle, mask=d < HALF, other=0.0).to(tl.float32)
        dy_at = DY + token // S * dy_b + token % S * dy_s + h.to(tl.int64) * dy_h + d.to(tl.int64) * dy_d
        dy_lo = tl.load(dy_at, mask=ok, other=0.0).to(tl.float32)
        dy_hi = tl.load(dy_at + tl.cast(HALF, tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
        # Turned back by the same angle: the gradient of the normed, weighted heads.
        g_lo = dy_lo * cos + dy_hi * sin
        g_hi = dy_hi * cos - dy_lo * sin
        lo = tl.load(Q + token * q_t + col, mask=ok, other=0.0).to(tl.float32)
        hi = tl.load(Q + token * q_t + col + HALF, mask=ok, other=0.0).to(tl.float32)
        inv = tl.rsqrt(tl.sum(lo * lo + hi * hi, 1, keep_dims=True) / (2 * HALF) + eps)
        lo *= inv
        hi *= inv
        dw_lo += g_lo * lo
        dw_hi += g_hi * hi
        g_lo *= w_lo
        g_hi *= w_hi
        radial = tl.sum(g_lo * lo + g_hi * hi, 1, keep_dims=True) / (2 * HALF)
        out = DQ + token * H * 2 * HALF + col
        tl.store(out, inv * (g_lo - lo * radial), mask=ok)
        tl.store(out + HALF, inv * (g_hi - hi * radial), mask=ok)
    part = Parts + pid * 2 * HALF + d
    tl.store(part, tl.sum(dw_lo, 0, keep_dims=True), mask=d < HALF)
    tl.store(part + HALF, tl.sum(dw_hi, 0, keep_dims=True), mask=d < HALF)


def backward(saved, grad_y, needs=None):
    q, weight, cos, sin, eps = saved
    B, S, H, D = q.shape
    tile = _tile(H, D // 2)
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    programs = min(132 * 16 // tile["num_warps"], triton.cdiv(B * S, 2))
    dq = torch.empty(B, S, H, D, device=q.device, dtype=q.dtype)
    parts = torch.empty(programs, D, device=q.device, dtype=torch.float32)
    _norm_rope_bwd[(programs,)](
        grad_y, q, weight, cos, sin, dq, parts, B * S, S, H, D // 2, q.stride(1), *grad_y.stride(), eps, **tile
    )
    return dq, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "H": 2, "HALF": 16},
    {"B": 1, "S": 7, "H": 3, "HALF": 11, "dtype": "float16"},
    {"B": 2, "S": 3, "H": 4, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "H": 32, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    # q is the first part of a packed projection.
    q = torch.randn(B, S, 3 * H, 2 * HALF, generator=g).to(**to)[:, :, :H]
    weight = (torch.rand(2 * HALF, generator=g) + 0.5).to(**to)
    rates = 10000.0 ** (-torch.arange(HALF) / HALF)
    angles = torch.arange(S)[:, None] * rates
    return q, weight, angles.cos().to(device), angles.sin().to(device)


def reference(q, weight, cos, sin, eps=1e-6):
    normed = torch.nn.functional.rms_norm(q.float(), (q.shape[-1],), weight.float(), eps)
    lo, hi = normed.chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1).to(q.dtype)
