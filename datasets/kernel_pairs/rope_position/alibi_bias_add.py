"""Scores plus slope * distance with a learned slope for each head: d_scores is the cotangent, the slope a weighted sum.

dslope[h] = sum of dy * (j - i) over batch, rows and columns. A program owns a band of rows of one matrix and walks its
columns; distances are made of indices, so that dy is all that is read. One number of each program is left to sum.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "alibi_bias_add",
    "family": "rope_position",
    "op": "alibi_bias",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("scores", "slopes"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _alibi_fwd(X, Slopes, Y, H, S, T, x_b, x_h, x_s, x_t, ROWS: tl.constexpr, COLS: tl.constexpr):
    matrix = tl.program_id(1)
    b, h = (matrix // H).to(tl.int64), matrix % H
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slope = tl.load(Slopes + h).to(tl.float32)
    source = X + b * x_b + h.to(tl.int64) * x_h + i.to(tl.int64) * x_s
    target = Y + (matrix.to(tl.int64) * S + i) * T
    for start in range(0, T, COLS):
        j = (start + tl.arange(0, COLS))[None, :]
        mask = (i < S) & (j < T)
        x = tl.load(source + j.to(tl.int64) * x_t, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + j, x + slope * (j - i).to(tl.float32), mask=mask)


def _tile(S, T):
    COLS = max(16, min(256, triton.next_power_of_2(T)))
    return max(1, min(triton.next_power_of_2(S), 2048 // COLS)), COLS


def forward(scores, slopes):
    slopes = slopes.contiguous()
    B, H, S, T = scores.shape
    y = torch.empty(B, H, S, T, device=scores.device, dtype=scores.dtype)
    ROWS, COLS = _tile(S, T)
    _alibi_fwd[(triton.cdiv(S, ROWS), B * H)](scores, slopes, y, H, S, T, *scores.stride(), ROWS=ROWS, COLS=COLS)
    return y, (H, slopes.dtype)


# --- backward ---
@triton.jit
def _alibi_slope(DY, Parts, H, S, T, dy_b, dy_h, dy_s, dy_t, ROWS: tl.constexpr, COLS: tl.constexpr):
    matrix = tl.program_id(1)
    b, h = (matrix // H).to(tl.int64), (matrix % H).to(tl.int64)
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    source = DY + b * dy_b + h * dy_h + i.to(tl.int64) * dy_s
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, T, COLS):
        j = (start + tl.arange(0, COLS))[None, :]
        dy = tl.load(source + j.to(tl.int64) * dy_t, mask=(i < S) & (j < T), other=0.0).to(tl.float32)
        total += dy * (j - i).to(tl.float32)
    tl.store(Parts + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def backward(saved, grad_y, needs=None):
    H, dtype = saved
    _, need_slopes = needs or (True, True)
    if not need_slopes:
        return grad_y, None
    B, _, S, T = grad_y.shape
    ROWS, COLS = _tile(S, T)
    bands = triton.cdiv(S, ROWS)
    parts = torch.empty(B, H, bands, device=grad_y.device, dtype=torch.float32)
    _alibi_slope[(bands, B * H)](grad_y, parts, H, S, T, *grad_y.stride(), ROWS=ROWS, COLS=COLS)
    return grad_y, parts.sum((0, 2)).to(dtype)


# --- check ---
SWEEP = (
    {"B": 2, "H": 3, "S": 32, "T": 64, "dtype": "float16"},
    {"B": 1, "H": 2, "S": 19, "T": 301},
    {"B": 2, "H": 2, "S": 9, "T": 48, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "S": 2048, "T": 2048, "dtype": "bfloat16"},)


def make_args(B, H, S, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, H, S, T, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return scores, (2.0 ** (-8.0 * torch.arange(1, H + 1) / H)).to(device)


def reference(scores, slopes):
    S, T = scores.shape[2:]
    distance = torch.arange(T, device=scores.device) - torch.arange(S, device=scores.device)[:, None]
    return (scores.float() + slopes[:, None, None] * distance).to(scores.dtype)
