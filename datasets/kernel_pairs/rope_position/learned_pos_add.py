"""Learned positions, y = x + table[offset + s]: dx is the cotangent itself, dtable its sum over the batch.

A program owns one position and some columns and walks the batch: sums stay in registers and in one order, where atomics
would give bits that change from run to run. Positions that no token had are written as zeros by their own programs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "learned_pos_add",
    "family": "rope_position",
    "op": "position_embedding",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "broadcast-reduction", "column-owner", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "table"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_positions(X, Table, Y, S, D, offset, x_b, x_s, x_d, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), token % S
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + b * x_b + s.to(tl.int64) * x_s + d * x_d, mask=d < D, other=0.0).to(tl.float32)
    position = tl.load(Table + (offset + s).to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(Y + token.to(tl.int64) * D + d, x + position, mask=d < D)


def _block(D):
    return max(32, min(1024, triton.next_power_of_2(D)))


def forward(x, table, offset):
    table = table.contiguous()
    B, S, D = x.shape
    if offset + S > table.shape[0]:
        raise ValueError(f"positions {offset} to {offset + S - 1} do not fit a table of {table.shape[0]}")
    y = torch.empty(B, S, D, device=x.device, dtype=x.dtype)
    BLOCK = _block(D)
    _add_positions[(B * S, triton.cdiv(D, BLOCK))](x, table, y, S, D, offset, *x.stride(), BLOCK=BLOCK)
    return y, (offset, table.shape[0], table.dtype)


# --- backward ---
@triton.jit
def _sum_batch(DY, DTable, B, S, D, offset, dy_b, dy_s, dy_d, BLOCK: tl.constexpr):
    position = tl.program_id(0)
    s = position - offset
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if (s >= 0) & (s < S):
        source = DY + s.to(tl.int64) * dy_s + d.to(tl.int64) * dy_d
        for b in range(B):
            total += tl.load(source + b.to(tl.int64) * dy_b, mask=d < D, other=0.0).to(tl.float32)
    tl.store(DTable + position.to(tl.int64) * D + d, total, mask=d < D)


def backward(saved, grad_y, needs=None):
    offset, positions, dtype = saved
    _, need_table = needs or (True, True)
    if not need_table:
        return grad_y, None
    B, S, D = grad_y.shape
    dtable = torch.empty(positions, D, device=grad_y.device, dtype=dtype)
    # Narrow tiles: there are only as many programs as the table has positions and tiles.
    BLOCK = min(256, _block(D))
    _sum_batch[(positions, triton.cdiv(D, BLOCK))](
        grad_y, dtable, B, S, D, offset, *grad_y.stride(), BLOCK=BLOCK, num_warps=max(1, BLOCK // 128)
    )
    return grad_y, dtable


# --- check ---
SWEEP = (
    {"B": 3, "S": 8, "P": 12, "D": 64, "offset": 2, "dtype": "float16"},
    {"B": 5, "S": 7, "P": 7, "D": 45, "offset": 0},
    {"B": 2, "S": 9, "P": 16, "D": 32, "offset": 5, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "S": 2048, "P": 2048, "D": 1024, "offset": 0, "dtype": "bfloat16"},)


def make_args(B, S, P, D, offset, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, table = torch.randn(B, S, D, generator=g), torch.randn(max(P, offset + S), D, generator=g)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, table)), offset


def reference(x, table, offset):
    return (x.float() + table[offset : offset + x.shape[1]].float()).to(x.dtype)
