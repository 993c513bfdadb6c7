"""Rows repeated a number of times each: the backward sums many short stretches side by side in one tile.

A tile owns several rows and takes one copy of each per step, up to the largest count among them. Stretches of a few
copies, as after upsampling by durations, fill the tile where one program per row would be mostly start-up.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "repeat_interleave_counts",
    "family": "gather_scatter",
    "op": "repeat_interleave",
    "schema": 1,
    "techniques": ("varlen", "multi-row-tile", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _repeat_fwd(X, Offsets, Y, S, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    begin = tl.load(Offsets + s, mask=s < S, other=0).to(tl.int64)
    count = tl.load(Offsets + s + 1, mask=s < S, other=0).to(tl.int64) - begin
    # Rows stay in registers while their copies are written.
    x = tl.load(X + s[:, None] * D + d, mask=(s[:, None] < S) & (d < D), other=0.0)
    for copy in range(tl.max(tl.where(s < S, count, 0), 0)):
        ok = (s < S) & (copy < count)
        tl.store(Y + (begin + copy)[:, None] * D + d, x, mask=ok[:, None] & (d < D))


def _tile(D):
    BLOCK_D = min(128, triton.next_power_of_2(D))
    return 1024 // BLOCK_D, BLOCK_D


def forward(x, offsets, rows):
    """x (S, D); row s is copied to rows offsets[s] to offsets[s + 1] of the `rows` of the result."""
    x = x.contiguous()
    S, D = x.shape
    y = torch.empty(rows, D, device=x.device, dtype=x.dtype)
    BLOCK_S, BLOCK_D = _tile(D)
    _repeat_fwd[(triton.cdiv(S, BLOCK_S), triton.cdiv(D, BLOCK_D))](
        x, offsets, y, S, D, BLOCK_S=BLOCK_S, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (x, offsets)


# --- backward ---
@triton.jit
def _repeat_bwd(DY, Offsets, DX, S, D, dy_r, dy_d, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    begin = tl.load(Offsets + s, mask=s < S, other=0).to(tl.int64)
    end = tl.load(Offsets + s + 1, mask=s < S, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    at = DY + begin[:, None] * dy_r + d.to(tl.int64) * dy_d
    row = begin
    for _ in range(tl.max(end - begin, 0)):
        total += tl.load(at, mask=(row < end)[:, None] & (d < D), other=0.0).to(tl.float32)
        at += dy_r
        row += 1
    tl.store(DX + s[:, None] * D + d, total, mask=(s[:, None] < S) & (d < D))


def backward(saved, grad_y, needs=None):
    x, offsets = saved
    S, D = x.shape
    dx = torch.empty_like(x)
    BLOCK_S, BLOCK_D = _tile(D)
    _repeat_bwd[(triton.cdiv(S, BLOCK_S), triton.cdiv(D, BLOCK_D))](
        grad_y, offsets, dx, S, D, *grad_y.stride(), BLOCK_S=BLOCK_S, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"S": 16, "D": 64, "most": 4},
    {"S": 29, "D": 37, "most": 6},
    {"S": 9, "D": 140, "most": 3, "dtype": "bfloat16"},
)
BENCH = ({"S": 65536, "D": 384, "most": 8, "dtype": "bfloat16"},)


def make_args(S, D, most, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(S, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Some rows are dropped altogether, the first is kept.
    counts = torch.randint(0, most + 1, (S,), generator=g)
    counts[0] = max(1, most)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return x, offsets.to(device), int(offsets[-1])


def reference(x, offsets, rows):
    return torch.repeat_interleave(x, offsets.diff(), 0, output_size=rows)
