"""Rotary embedding with learned inverse frequencies: the angle's gradient is the cross product of x and dx.

Turning keeps cross products, so that for a pair (a, b) with gradient (da, db) the angle gets a * db - b * da, and the
frequency the position times that. A program owns a few tokens and walks their heads: sines and cosines are computed
once, angle gradients add up in registers, and one row of partial frequency gradients leaves each program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_learned_freq",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "two-stage-partials", "head-reduction", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "inv_freq"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _learned_fwd(X, Freq, Y, S, H, HALF, x_b, x_s, x_h, x_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    s = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (s < S) & (d < HALF)
    theta = s.to(tl.float32) * tl.load(Freq + d, mask=d < HALF, other=0.0)
    cos, sin = tl.cos(theta), tl.sin(theta)
    source = X + b * x_b + s.to(tl.int64) * x_s + d * x_d
    target = Y + (b * S + s) * H * (2 * HALF) + d
    for h in range(H):
        p = tl.load(source + h * x_h, mask=mask, other=0.0).to(tl.float32)
        q = tl.load(source + h * x_h + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + h * (2 * HALF), p * cos - q * sin, mask=mask)
        tl.store(target + h * (2 * HALF) + HALF, q * cos + p * sin, mask=mask)


def _rows(HALF):
    """Tokens for each program: 512 pairs at a time, eight tokens at most, so that there are programs enough."""
    return max(1, min(8, 512 // triton.next_power_of_2(HALF)))


def forward(x, inv_freq):
    inv_freq = inv_freq.contiguous()
    B, S, H, D = x.shape
    y = torch.empty(B, S, H, D, device=x.device, dtype=x.dtype)
    ROWS = _rows(D // 2)
    _learned_fwd[(triton.cdiv(S, ROWS), B)](
        x, inv_freq, y, S, H, D // 2, *x.stride(), ROWS=ROWS, BLOCK_D=triton.next_power_of_2(D // 2), num_warps=2
    )
    return y, (x, inv_freq)


# --- backward ---
@triton.jit
def _learned_bwd(
    DY, X, Freq, DX, Parts, S, H, HALF, dy_b, dy_s, dy_h, dy_d, x_b, x_s, x_h, x_d,
    NEED_FREQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    s = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, BLOCK_D)
    mask = (s < S) & (d[None, :] < HALF)
    theta = s.to(tl.float32) * tl.load(Freq + d, mask=d < HALF, other=0.0)[None, :]
    cos, sin = tl.cos(theta), tl.sin(theta)
    grad = DY + b * dy_b + s.to(tl.int64) * dy_s + d[None, :] * dy_d
    source = X + b * x_b + s.to(tl.int64) * x_s + d[None, :] * x_d
    target = DX + (b * S + s) * H * (2 * HALF) + d[None, :]
    dtheta = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for h in tl.range(H, num_stages=2):
        g_p = tl.load(grad + h * dy_h, mask=mask, other=0.0).to(tl.float32)
        g_q = tl.load(grad + h * dy_h + HALF * dy_d, mask=mask, other=0.0).to(tl.float32)
        d_p = g_p * cos + g_q * sin
        d_q = g_q * cos - g_p * sin
        tl.store(target + h * (2 * HALF), d_p, mask=mask)
        tl.store(target + h * (2 * HALF) + HALF, d_q, mask=mask)
        if NEED_FREQ:
            p = tl.load(source + h * x_h, mask=mask, other=0.0).to(tl.float32)
            q = tl.load(source + h * x_h + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
            dtheta += p * d_q - q * d_p
    if NEED_FREQ:
        part = b * tl.num_programs(0) + tl.program_id(0)
        tl.store(Parts + part * HALF + d, tl.sum(dtheta * s.to(tl.float32), 0), mask=d < HALF)


def backward(saved, grad_y, needs=None):
    x, inv_freq = saved
    _, need_freq = needs or (True, True)
    B, S, H, D = x.shape
    ROWS = _rows(D // 2)
    tiles = triton.cdiv(S, ROWS)
    dx = torch.empty(B, S, H, D, device=x.device, dtype=x.dtype)
    parts = torch.empty(B * tiles, D // 2, device=x.device, dtype=torch.float32) if need_freq else None
    _learned_bwd[(tiles, B)](
        grad_y, x, inv_freq, dx, parts, S, H, D // 2, *grad_y.stride(), *x.stride(),
        NEED_FREQ=need_freq, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(D // 2), num_warps=2,
    )  # fmt: skip
    return dx, parts.sum(0).to(inv_freq.dtype) if need_freq else None


# --- check ---
SWEEP = (
    {"B": 2, "S": 16, "H": 3, "HALF": 16, "dtype": "float16"},
    {"B": 1, "S": 21, "H": 2, "HALF": 20},
    {"B": 1, "S": 12, "H": 4, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "H": 32, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, H, 2 * HALF, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, (10000.0 ** (-torch.arange(HALF) / HALF)).to(device)


def reference(x, inv_freq):
    theta = torch.arange(x.shape[1], device=x.device)[:, None, None] * inv_freq
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * theta.cos() - b * theta.sin(), b * theta.cos() + a * theta.sin()), -1).to(x.dtype)
