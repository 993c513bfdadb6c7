"""Rotary embedding of q and k in one launch, unequal head counts, halves rotated: the backward turns by minus theta."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_gqa_joint",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "one-launch", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rotate_heads(X, Y, token, cos, sin, heads, HALF, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    for start in range(0, heads, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        mask = (h[:, None] < heads) & (d[None, :] < HALF)
        at = (token * heads + h[:, None]) * (2 * HALF) + d[None, :]
        a = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(X + at + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + at, a * cos[None, :] - b * sin[None, :], mask=mask)
        tl.store(Y + at + HALF, b * cos[None, :] + a * sin[None, :], mask=mask)


@triton.jit
def _rope_fwd(Q, K, Cos, Sin, QOut, KOut, S, QH, KH, HALF, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    # One program for each token: cosines and sines are fetched once for all heads of q and k.
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    cos = tl.load(Cos + (token % S) * HALF + d, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + (token % S) * HALF + d, mask=d < HALF, other=0.0)
    _rotate_heads(Q, QOut, token, cos, sin, QH, HALF, BLOCK_H, BLOCK_D)
    _rotate_heads(K, KOut, token, cos, sin, KH, HALF, BLOCK_H, BLOCK_D)


def _heads(BLOCK_D):
    """Heads of a step: 1024 pairs of numbers, eight for each thread."""
    return max(1, min(16, 1024 // BLOCK_D))


def forward(q, k, cos, sin):
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    B, S, QH, D = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    BLOCK_D = triton.next_power_of_2(D // 2)
    _rope_fwd[(B * S,)](
        q, k, cos, sin, q_out, k_out, S, QH, k.shape[2], D // 2, BLOCK_H=_heads(BLOCK_D), BLOCK_D=BLOCK_D
    )
    return (q_out, k_out), (cos, sin, B, QH, k.shape[2], q.dtype)


# --- backward ---
@triton.jit
def _unrotate_heads(
    DY, DX, token, b, s, cos, sin, heads, HALF, sb, ss, sh, sd, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.arange(0, BLOCK_D)
    for start in range(0, heads, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        mask = (h[:, None] < heads) & (d[None, :] < HALF)
        source = DY + b * sb + s * ss + h[:, None] * sh + d[None, :] * sd
        g_a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        g_b = tl.load(source + HALF * sd, mask=mask, other=0.0).to(tl.float32)
        at = (token * heads + h[:, None]) * (2 * HALF) + d[None, :]
        tl.store(DX + at, g_a * cos[None, :] + g_b * sin[None, :], mask=mask)
        tl.store(DX + at + HALF, g_b * cos[None, :] - g_a * sin[None, :], mask=mask)


@triton.jit
def _rope_bwd(
    DQOut, DKOut, Cos, Sin, DQ, DK, S, QH, KH, HALF, qb, qs, qh, qd, kb, ks, kh, kd,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b = token // S
    s = token % S
    d = tl.arange(0, BLOCK_D)
    cos = tl.load(Cos + s * HALF + d, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + s * HALF + d, mask=d < HALF, other=0.0)
    if HAS_Q:
        _unrotate_heads(DQOut, DQ, token, b, s, cos, sin, QH, HALF, qb, qs, qh, qd, BLOCK_H, BLOCK_D)
    if HAS_K:
        _unrotate_heads(DKOut, DK, token, b, s, cos, sin, KH, HALF, kb, ks, kh, kd, BLOCK_H, BLOCK_D)


def backward(saved, grad_q, grad_k, needs=None):
    cos, sin, B, QH, KH, dtype = saved
    S, HALF = cos.shape
    has_q, has_k = grad_q is not None, grad_k is not None
    dq = (torch.empty if has_q else torch.zeros)(B, S, QH, 2 * HALF, device=cos.device, dtype=dtype)
    dk = (torch.empty if has_k else torch.zeros)(B, S, KH, 2 * HALF, device=cos.device, dtype=dtype)
    gq, gk = grad_q if has_q else dq, grad_k if has_k else dk
    BLOCK_D = triton.next_power_of_2(HALF)
    _rope_bwd[(B * S,)](
        gq, gk, cos, sin, dq, dk, S, QH, KH, HALF, *gq.stride(), *gk.stride(),
        HAS_Q=has_q, HAS_K=has_k, BLOCK_H=_heads(BLOCK_D), BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return dq, dk


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "KH": 2, "GROUP": 2, "HALF": 16},
    {"B": 1, "S": 7, "KH": 3, "GROUP": 3, "HALF": 20, "dtype": "float16"},
    {"B": 1, "S": 4, "KH": 1, "GROUP": 4, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 2048, "KH": 8, "GROUP": 4, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, KH, GROUP, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    q, k = torch.randn(B, S, KH * GROUP, 2 * HALF, generator=g), torch.randn(B, S, KH, 2 * HALF, generator=g)
    theta = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    return q.to(device, dt), k.to(device, dt), theta.cos().to(device), theta.sin().to(device)


def reference(q, k, cos, sin):
    def turn(x):
        a, b = x.float().chunk(2, -1)
        c, s = cos[None, :, None, :], sin[None, :, None, :]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return turn(q), turn(k)
