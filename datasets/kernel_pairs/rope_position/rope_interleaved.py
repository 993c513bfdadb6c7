"""Rotary embedding of neighbouring pairs: even and odd lanes part in registers, so that every access stays dense."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_interleaved",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "multi-row-tile"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _turn_pairs(X, Cos, Sin, Y, S, PAIRS, R, SIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    # Rows are (batch, head, position); SIGN=-1 turns the other way, which is the inverse and the transpose.
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, 2 * BLOCK_P)
    p = tl.arange(0, BLOCK_P)
    wide = (r[:, None] < R) & (lane[None, :] < 2 * PAIRS)
    narrow = (r[:, None] < R) & (p[None, :] < PAIRS)
    at = r[:, None] * (2 * PAIRS) + lane[None, :]
    x = tl.load(X + at, mask=wide, other=0.0).to(tl.float32)
    table = (r % S)[:, None] * PAIRS + p[None, :]
    cos = tl.load(Cos + table, mask=narrow, other=0.0)
    sin = tl.load(Sin + table, mask=narrow, other=0.0) * SIGN
    even, odd = tl.split(tl.reshape(x, (BLOCK_R, BLOCK_P, 2)))
    y = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    tl.store(Y + at, tl.reshape(y, (BLOCK_R, 2 * BLOCK_P)), mask=wide)


def _launch(x, cos, sin, sign):
    B, H, S, D = x.shape
    R = B * H * S
    y = torch.empty_like(x)
    BLOCK_P = triton.next_power_of_2(D // 2)
    BLOCK_R = max(1, 1024 // BLOCK_P)
    _turn_pairs[(triton.cdiv(R, BLOCK_R),)](x, cos, sin, y, S, D // 2, R, SIGN=sign, BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P)
    return y


def forward(x, cos, sin):
    cos, sin = cos.contiguous(), sin.contiguous()
    return _launch(x.contiguous(), cos, sin, 1), (cos, sin)


# --- backward ---
def backward(saved, grad_y, needs=None):
    cos, sin = saved
    return _launch(grad_y.contiguous(), cos, sin, -1)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "S": 9, "PAIRS": 16},
    {"B": 2, "H": 3, "S": 11, "PAIRS": 20, "dtype": "float16"},
    {"B": 1, "H": 2, "S": 4, "PAIRS": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "S": 2048, "PAIRS": 64, "dtype": "bfloat16"},)


def make_args(B, H, S, PAIRS, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, S, 2 * PAIRS, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(PAIRS) / PAIRS)
    return x, theta.cos().to(device), theta.sin().to(device)


def reference(x, cos, sin):
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
