"""Rows selected by indices promised to be unique: no two programs meet, so the gradient is stored, not added.

That saves the atomics, and with them the fp32 buffer and the pass that casts it: the zeros and the rows are written
straight in the table's dtype. A repeated index would break the promise, and lose all but one of its cotangents.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "index_select_unique",
    "family": "gather_scatter",
    "op": "index_select",
    "schema": 1,
    "techniques": ("inverse-map", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pick_rows(X, Index, Y, D, x_row, x_col, BLOCK_D: tl.constexpr):
    # One row a program: the index is a scalar, the row one contiguous stretch.
    t = tl.program_id(0).to(tl.int64)
    row = X + tl.load(Index + t).to(tl.int64) * x_row
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)
        tl.store(Y + t * D + d, tl.load(row + d * x_col, mask=d < D), mask=d < D)


def forward(x, index):
    index = index.contiguous()
    T, D = index.numel(), x.shape[1]
    y = torch.empty(T, D, device=x.device, dtype=x.dtype)
    BLOCK_D = min(2048, triton.next_power_of_2(D))
    _pick_rows[(T,)](x, index, y, D, *x.stride(), BLOCK_D=BLOCK_D, num_warps=max(1, min(8, BLOCK_D // 256)))
    return y, (index, x.shape[0])


# --- backward ---
@triton.jit
def _place_rows(DY, Index, DX, T, D, dy_t, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    row = tl.load(Index + t, mask=t < T, other=0).to(tl.int64)
    ok = (t[:, None] < T) & (d[None, :] < D)
    dy = tl.load(DY + t[:, None] * dy_t + d[None, :] * dy_d, mask=ok)
    tl.store(DX + row[:, None] * D + d[None, :], dy, mask=ok)


def backward(saved, grad_y, needs=None):
    index, rows = saved
    T, D = grad_y.shape
    dx = torch.zeros(rows, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_T = max(1, 2048 // BLOCK_D)
    _place_rows[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        grad_y, index, dx, T, D, *grad_y.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"V": 40, "T": 24, "D": 64}, {"V": 61, "T": 29, "D": 50}, {"V": 16, "T": 16, "D": 32, "dtype": "bfloat16"})
BENCH = ({"V": 131072, "T": 65536, "D": 1024, "dtype": "bfloat16"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    if T > V:
        raise ValueError("more unique indices than rows")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.randperm(V, generator=g)[:T].to(device)


def reference(x, index):
    return x[index]
