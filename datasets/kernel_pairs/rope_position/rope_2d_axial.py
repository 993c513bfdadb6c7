"""Axial rotary embedding of image patches: half of each head turns by the patch's row, the other half by its column.

Dims come in quarters: the first two are a pair by row, the last two a pair by column. A program owns patches of one
image row, so that the row's angle is one vector for the whole tile and only column angles are loaded per patch. Both
halves are rotations; the backward is the same kernel with both angles negated.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_2d_axial",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _turn_quarters(Source, Target, cos, sin, q, Q, mask, x_d):
    """Turn the pair of quarters that starts at the pointers, `Q` apart."""
    a = tl.load(Source + q * x_d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(Source + (q + Q) * x_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(Target + q, a * cos - b * sin, mask=mask)
    tl.store(Target + q + Q, b * cos + a * sin, mask=mask)


@triton.jit
def _axial_turn(
    X, Cos, Sin, Y, HEADS, GH, GW, Q, tiles, x_b, x_h, x_s, x_d,
    SIGN: tl.constexpr, COLS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // tiles
    column = ((tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS))[:, None]
    head = tl.program_id(1)
    q = tl.arange(0, BLOCK_Q)[None, :]
    mask = (column < GW) & (q < Q)
    patch = (row * GW + column).to(tl.int64)
    source = X + (head // HEADS).to(tl.int64) * x_b + (head % HEADS).to(tl.int64) * x_h + patch * x_s
    target = Y + (head.to(tl.int64) * GH * GW + patch) * (4 * Q)
    cos = tl.load(Cos + row * Q + q, mask=q < Q, other=0.0)
    sin = tl.load(Sin + row * Q + q, mask=q < Q, other=0.0) * SIGN
    _turn_quarters(source, target, cos, sin, q, Q, mask, x_d)
    cos = tl.load(Cos + column * Q + q, mask=mask, other=0.0)
    sin = tl.load(Sin + column * Q + q, mask=mask, other=0.0) * SIGN
    _turn_quarters(source + 2 * Q * x_d, target + 2 * Q, cos, sin, q, Q, mask, x_d)


def _launch(x, cos, sin, width, sign):
    B, H, S, D = x.shape
    y = torch.empty(B, H, S, D, device=x.device, dtype=x.dtype)
    BLOCK_Q = triton.next_power_of_2(D // 4)
    COLS = max(1, min(triton.next_power_of_2(width), 1024 // BLOCK_Q))
    tiles = triton.cdiv(width, COLS)
    _axial_turn[(S // width * tiles, B * H)](
        x, cos, sin, y, H, S // width, width, D // 4, tiles, *x.stride(), SIGN=sign, COLS=COLS, BLOCK_Q=BLOCK_Q
    )
    return y


def forward(x, cos, sin, width):
    cos, sin = cos.contiguous(), sin.contiguous()
    return _launch(x, cos, sin, width, 1), (cos, sin, width)


# --- backward ---
def backward(saved, grad_y, needs=None):
    cos, sin, width = saved
    return _launch(grad_y, cos, sin, width, -1)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "GH": 4, "GW": 8, "Q": 8, "dtype": "float16"},
    {"B": 2, "H": 3, "GH": 3, "GW": 11, "Q": 5},
    {"B": 1, "H": 2, "GH": 2, "GW": 5, "Q": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "H": 16, "GH": 64, "GW": 64, "Q": 16, "dtype": "bfloat16"},)


def make_args(B, H, GH, GW, Q, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, GH * GW, 4 * Q, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(max(GH, GW))[:, None] * 100.0 ** (-torch.arange(Q) / Q)
    return x, theta.cos().to(device), theta.sin().to(device), GW


def reference(x, cos, sin, width):
    patch = torch.arange(x.shape[2], device=x.device)
    quarters = x.float().chunk(4, -1)
    turned = []
    for (a, b), at in ((quarters[:2], patch // width), (quarters[2:], patch % width)):
        turned += [a * cos[at] - b * sin[at], b * cos[at] + a * sin[at]]
    return torch.cat(turned, -1).to(x.dtype)
