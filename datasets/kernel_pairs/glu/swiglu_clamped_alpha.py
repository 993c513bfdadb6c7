"""Clamped SwiGLU, (up + 1) * gate * sigmoid(alpha * gate) with both branches limited: clamps are masks of the gradient.

The gate is cut from above alone, up on both sides. What the clamp removed gets an exact zero; a value that equals the
limit counts as free, as in torch.clamp. Columns alternate gate and up, and a tile holds several rows of pairs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_clamped_alpha",
    "family": "glu",
    "op": "swiglu",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pairs(X, m, lane, M, D, x_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of rows m (ROWS, 1), from lanes (1, 2 * BLOCK) of alternating columns."""
    x = tl.load(X + m * x_row + lane, mask=(m < M) & (lane < 2 * D), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (ROWS, BLOCK, 2)))


@triton.jit
def _limited(gate, up, limit):
    # Comparisons instead of minimum and maximum: at the limit itself there is one derivative, and it is one.
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _clamped_fwd(X, Y, M, D, limit, alpha, x_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = (2 * BLOCK * tl.program_id(1) + tl.arange(0, 2 * BLOCK))[None, :]
    gate, up = _pairs(X, m, lane, M, D, x_row, ROWS, BLOCK)
    gate, up = _limited(gate, up, limit)
    d = (BLOCK * tl.program_id(1) + tl.arange(0, BLOCK))[None, :]
    tl.store(Y + m * D + d, (up + 1.0) * gate * tl.sigmoid(alpha * gate), mask=(m < M) & (d < D))


def _tile(M, D):
    """A tile of 1024 pairs at most."""
    BLOCK = max(16, min(512, triton.next_power_of_2(D)))
    return max(1, min(triton.next_power_of_2(M), 1024 // BLOCK)), BLOCK


def forward(x, limit=7.0, alpha=1.702):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, D = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, D, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(M, D)
    _clamped_fwd[(triton.cdiv(M, ROWS), triton.cdiv(D, BLOCK))](
        x, y, M, D, limit, alpha, x.stride(0), ROWS=ROWS, BLOCK=BLOCK
    )
    return y, (x, limit, alpha)


# --- backward ---
@triton.jit
def _clamped_bwd(DY, X, DX, M, D, limit, alpha, x_row, dy_row, dy_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = (2 * BLOCK * tl.program_id(1) + tl.arange(0, 2 * BLOCK))[None, :]
    d = (BLOCK * tl.program_id(1) + tl.arange(0, BLOCK))[None, :]
    dy = tl.load(DY + m * dy_row + d.to(tl.int64) * dy_col, mask=(m < M) & (d < D), other=0.0).to(tl.float32)
    raw_gate, raw_up = _pairs(X, m, lane, M, D, x_row, ROWS, BLOCK)
    gate, up = _limited(raw_gate, raw_up, limit)
    s = tl.sigmoid(alpha * gate)
    act = gate * s
    d_gate = tl.where(raw_gate > limit, 0.0, dy * (up + 1.0) * (s + alpha * act * (1.0 - s)))
    d_up = tl.where(tl.abs(raw_up) > limit, 0.0, dy * act)
    dx = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * BLOCK))
    tl.store(DX + m * (2 * D) + lane, dx, mask=(m < M) & (lane < 2 * D))


def backward(saved, grad_y, needs=None):
    x, limit, alpha = saved
    M, D = x.shape[0], x.shape[1] // 2
    dx = torch.empty(M, 2 * D, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(M, D)
    _clamped_bwd[(triton.cdiv(M, ROWS), triton.cdiv(D, BLOCK))](
        grad_y, x, dx, M, D, limit, alpha, x.stride(0), *grad_y.stride(), ROWS=ROWS, BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 8, "D": 64, "limit": 2.0, "dtype": "float16"},
    {"M": 5, "D": 77, "limit": 1.5, "alpha": 1.0},
    {"M": 4, "D": 96, "limit": 2.0, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "D": 2880, "limit": 7.0, "dtype": "bfloat16"},)


def make_args(M, D, limit=7.0, alpha=1.702, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Every fifth value or so lies beyond the limits of SWEEP.
    x = (1.6 * torch.randn(M, 2 * D, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return x, limit, alpha


def reference(x, limit=7.0, alpha=1.702):
    gate, up = x.float()[:, 0::2], x.float()[:, 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1.0) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)
