"""xPos rotary embedding: q grows with its position and k shrinks by the same factor, turned and scaled in one pass.

Scale and rotation commute, and the adjoint keeps the scale: dq = decay * turn(-theta) dq_out, dk = turn(-theta) dk_out
over decay. The products of both factors with cosine and sine are formed once for each token, before the heads are
walked, so that a pair costs the four multiplications of a plain rotation.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_xpos",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("one-launch", "optional-cotangent", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _spiral_heads(X, Y, token, cos, sin, H, HALF, x_b, x_s, x_h, x_d, S, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    source = X + (token // S).to(tl.int64) * x_b + (token % S).to(tl.int64) * x_s + d * x_d
    target = Y + token.to(tl.int64) * H * (2 * HALF) + d
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H))[:, None]
        mask = (h < H) & (d < HALF)
        a = tl.load(source + h * x_h, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + h * x_h + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + h * (2 * HALF), a * cos - b * sin, mask=mask)
        tl.store(target + h * (2 * HALF) + HALF, b * cos + a * sin, mask=mask)


@triton.jit
def _xpos(
    Q, K, Cos, Sin, Decay, QOut, KOut, S, QH, KH, HALF, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    SIGN: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)[None, :]
    at = (token % S) * HALF + d
    cos = tl.load(Cos + at, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + at, mask=d < HALF, other=0.0) * SIGN
    decay = tl.load(Decay + at, mask=d < HALF, other=1.0)
    if HAS_Q:
        _spiral_heads(Q, QOut, token, cos * decay, sin * decay, QH, HALF, q_b, q_s, q_h, q_d, S, BLOCK_H, BLOCK_D)
    if HAS_K:
        _spiral_heads(K, KOut, token, cos / decay, sin / decay, KH, HALF, k_b, k_s, k_h, k_d, S, BLOCK_H, BLOCK_D)


def _launch(q, k, q_out, k_out, cos, sin, decay, sign):
    """Write q_out and k_out; a missing q or k is skipped."""
    B, S, QH, D = q_out.shape
    BLOCK_D = triton.next_power_of_2(D // 2)
    has_q, has_k = q is not None, k is not None
    q, k = q if has_q else q_out, k if has_k else k_out
    _xpos[(B * S,)](
        q, k, cos, sin, decay, q_out, k_out, S, QH, k_out.shape[2], D // 2, *q.stride(), *k.stride(),
        SIGN=sign, HAS_Q=has_q, HAS_K=has_k, BLOCK_H=max(1, min(16, 1024 // BLOCK_D)), BLOCK_D=BLOCK_D,
    )  # fmt: skip


def forward(q, k, cos, sin, decay):
    tables = cos.contiguous(), sin.contiguous(), decay.contiguous()
    q_out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    k_out = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    _launch(q, k, q_out, k_out, *tables, 1)
    return (q_out, k_out), (*tables, q.shape, k.shape, q.dtype)


# --- backward ---
def backward(saved, grad_q, grad_k, needs=None):
    *tables, q_shape, k_shape, dtype = saved
    device = tables[0].device
    dq = (torch.zeros if grad_q is None else torch.empty)(q_shape, device=device, dtype=dtype)
    dk = (torch.zeros if grad_k is None else torch.empty)(k_shape, device=device, dtype=dtype)
    _launch(grad_q, grad_k, dq, dk, *tables, -1)
    return dq, dk


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "QH": 4, "KH": 2, "HALF": 16, "dtype": "float16"},
    {"B": 1, "S": 7, "QH": 3, "KH": 3, "HALF": 20},
    {"B": 1, "S": 6, "QH": 2, "KH": 1, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "QH": 32, "KH": 8, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, QH, KH, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    q, k = torch.randn(B, S, QH, 2 * HALF, generator=g), torch.randn(B, S, KH, 2 * HALF, generator=g)
    position, pair = torch.arange(S)[:, None], torch.arange(HALF) / HALF
    theta = position * 10000.0**-pair
    # Sun et al., 2022: slow pairs keep their size longest. Positions count from the middle, in units of 512.
    decay = ((pair + 0.4) / 1.4) ** ((position - S // 2) / 512)
    return q.to(device, dt), k.to(device, dt), theta.cos().to(device), theta.sin().to(device), decay.to(device)


def reference(q, k, cos, sin, decay):
    def spiral(x, scale):
        a, b = x.float().chunk(2, -1)
        c, s = (cos * scale)[:, None], (sin * scale)[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return spiral(q, decay), spiral(k, 1.0 / decay)
