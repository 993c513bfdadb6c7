"""Rows selected from a small table by many indices: the scatter-add of the gradient is a product with one-hot rows.

When a table of a hundred rows is read a hundred thousand times, atomic adds queue on few addresses. Here a program owns
a (table row, feature) tile and multiplies dy by a one-hot matrix built from the indices in registers: duplicates
meet in the product's accumulator, exactly and in a fixed order. The long axis is split, partial tiles are added up.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "index_select_rows",
    "family": "gather_scatter",
    "op": "index_select",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "loop-swap", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _select_fwd(X, Index, Y, T, D, x_row, x_col, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    chosen = tl.load(Index + t, mask=t < T, other=0).to(tl.int64)
    ok = (t[:, None] < T) & (d[None, :] < D)
    picked = tl.load(X + chosen[:, None] * x_row + d[None, :] * x_col, mask=ok)
    tl.store(Y + t[:, None] * D + d[None, :], picked, mask=ok)


def forward(x, index):
    index = index.contiguous()
    T, D = index.numel(), x.shape[1]
    y = torch.empty(T, D, device=x.device, dtype=x.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_T = 4096 // BLOCK_D
    _select_fwd[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        x, index, y, T, D, *x.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (index, x.shape[0])


# --- backward ---
@triton.jit
def _one_hot_product(
    DY, Index, Parts, V, T, D, tokens_each, dy_t, dy_d,
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    last = tl.minimum((split + 1) * tokens_each, T)
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    for start in range(split * tokens_each, last, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        index = tl.load(Index + t, mask=t < last, other=-1)
        ok = (t[:, None] < last) & (d[None, :] < D)
        dy = tl.load(DY + t[:, None] * dy_t + d[None, :] * dy_d, mask=ok, other=0.0)
        hit = (v[:, None] == index[None, :]).to(dy.dtype)
        # Zeros and ones are exact in every format; three tf32 products keep fp32 cotangents whole, too.
        acc = tl.dot(hit, dy, acc, input_precision="tf32x3")
    at = (split * V + v[:, None]) * D + d[None, :]
    tl.store(Parts + at, acc, mask=(v[:, None] < V) & (d[None, :] < D))


def backward(saved, grad_y, needs=None):
    index, V = saved
    T, D = grad_y.shape
    BLOCK_V = max(16, min(128, triton.next_power_of_2(V)))
    BLOCK_D = max(16, min(256, triton.next_power_of_2(D)))
    BLOCK_T = 128 // grad_y.element_size()
    tiles = triton.cdiv(V, BLOCK_V) * triton.cdiv(D, BLOCK_D)
    # One program for each of 132 processors, whose registers the tile fills; at least four tiles of tokens for each.
    splits = max(1, min(132 // tiles, triton.cdiv(T, 4 * BLOCK_T)))
    tokens_each = triton.cdiv(triton.cdiv(T, splits), BLOCK_T) * BLOCK_T
    splits = triton.cdiv(T, tokens_each)
    parts = torch.empty(splits, V, D, device=grad_y.device, dtype=torch.float32)
    _one_hot_product[(triton.cdiv(V, BLOCK_V), triton.cdiv(D, BLOCK_D), splits)](
        grad_y, index, parts, V, T, D, tokens_each, *grad_y.stride(),
        BLOCK_V=BLOCK_V, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=8, num_stages=4,
    )  # fmt: skip
    return parts.sum(0).to(grad_y.dtype)


# --- check ---
SWEEP = ({"V": 10, "T": 192, "D": 64}, {"V": 7, "T": 203, "D": 50}, {"V": 20, "T": 300, "D": 32, "dtype": "bfloat16"})
BENCH = ({"V": 128, "T": 524288, "D": 512, "dtype": "bfloat16"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.randint(0, V, (T,), generator=g).to(device)


def reference(x, index):
    return x.index_select(0, index)
