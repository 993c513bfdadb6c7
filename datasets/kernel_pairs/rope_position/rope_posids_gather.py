"""Rotary embedding with explicit position ids into a cached table of cosines and sines, as of a paged serving stack.

A row of the table holds HALF cosines, then HALF sines. The ids are the only index of the table, in the forward and in
the backward: what is gathered is a constant, so that nothing has to be scattered and the gradient is the inverse turn.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_posids_gather",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gather_turn(
    X, Ids, Table, Y, S, H, HALF, x_b, x_s, x_h, x_d, id_b, id_s, entry,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    batch = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    position = tl.load(Ids + batch * id_b + s * id_s).to(tl.int64)
    cos = tl.load(Table + position * entry + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(Table + position * entry + HALF + d, mask=d < HALF, other=0.0).to(tl.float32) * SIGN
    mask = (h < H) & (d < HALF)
    low = X + batch * x_b + s * x_s + h * x_h + d * x_d
    a = tl.load(low, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(low + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
    out = Y + (token.to(tl.int64) * H + h) * (2 * HALF) + d
    tl.store(out, a * cos - b * sin, mask=mask)
    tl.store(out + HALF, b * cos + a * sin, mask=mask)


def _turned(x, ids, table, sign):
    B, S, H, D = x.shape
    y = torch.empty(B, S, H, D, device=x.device, dtype=x.dtype)
    BLOCK_D = triton.next_power_of_2(D // 2)
    BLOCK_H = max(1, min(triton.next_power_of_2(H), 2048 // BLOCK_D))
    _gather_turn[(B * S, triton.cdiv(H, BLOCK_H))](
        x, ids, table, y, S, H, D // 2, *x.stride(), *ids.stride(), table.stride(0),
        SIGN=sign, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return y


def forward(x, ids, table):
    if table.stride(1) != 1:
        table = table.contiguous()
    return _turned(x, ids, table, 1), (ids, table)


# --- backward ---
def backward(saved, grad_y, needs=None):
    ids, table = saved
    return _turned(grad_y, ids, table, -1)


# --- check ---
SWEEP = (
    {"B": 2, "S": 9, "H": 4, "HALF": 16, "dtype": "float16"},
    {"B": 1, "S": 13, "H": 3, "HALF": 20},
    {"B": 2, "S": 5, "H": 2, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "S": 2048, "H": 32, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, H, 2 * HALF, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(2 * S)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    # Every sequence starts somewhere else in the table, and leaves positions out.
    ids = torch.randint(2 * S, (B, S), generator=g).sort(1).values
    return x, ids.to(device), torch.cat((theta.cos(), theta.sin()), 1).to(device)


def reference(x, ids, table):
    cos, sin = table[ids][:, :, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
