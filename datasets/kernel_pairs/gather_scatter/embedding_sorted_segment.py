"""Embedding whose weight gradient needs no atomics: ids are sorted once, then one program sums all rows of one id."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_sorted_segment",
    "family": "gather_scatter",
    "op": "embedding",
    "schema": 1,
    "techniques": ("sorted-segments", "inverse-map", "strided-cotangent"),
    "saves": ("sorted_ids: i64 (T)", "order: i64 (T)"),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lookup_fwd(W, Ids, Y, D, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(Ids + token).to(tl.int64)
    tl.store(Y + token * D + d, tl.load(W + row * D + d, mask=d < D), mask=d < D)


def forward(weight, ids):
    weight = weight.contiguous()
    T, D = ids.numel(), weight.shape[1]
    y = torch.empty(T, D, device=weight.device, dtype=weight.dtype)
    BLOCK_D = max(32, min(512, triton.next_power_of_2(D)))
    _lookup_fwd[(T, triton.cdiv(D, BLOCK_D))](weight, ids.contiguous(), y, D, BLOCK_D=BLOCK_D)
    # Sorting here rather than in the backward lets it overlap the rest of the forward.
    sorted_ids, order = torch.sort(ids, stable=True)
    return y, (weight, sorted_ids, order)


# --- backward ---
@triton.jit
def _segment_sum_bwd(DY, SortedIds, Order, DW, T, D, dy_row, dy_col, BLOCK_D: tl.constexpr):
    i = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mine = tl.load(SortedIds + i).to(tl.int64)
    before = tl.load(SortedIds + i - 1, mask=i > 0, other=-1).to(tl.int64)
    # Only the first position of a run works; the programs of the others leave at once.
    if mine != before:
        total = tl.zeros((BLOCK_D,), tl.float32)
        j = i
        current = mine
        while current == mine:
            token = tl.load(Order + j).to(tl.int64)
            total += tl.load(DY + token * dy_row + d * dy_col, mask=d < D, other=0.0).to(tl.float32)
            j += 1
            current = tl.load(SortedIds + j, mask=j < T, other=-1).to(tl.int64)
        tl.store(DW + mine * D + d, total, mask=d < D)


def backward(saved, grad_y, needs=None):
    weight, sorted_ids, order = saved
    T, D = sorted_ids.numel(), weight.shape[1]
    # Ids that never occur keep the zero; every other row is written once, straight in the table's dtype.
    dw = torch.zeros_like(weight)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _segment_sum_bwd[(T, triton.cdiv(D, BLOCK_D))](
        grad_y, sorted_ids, order, dw, T, D, grad_y.stride(0), grad_y.stride(1), BLOCK_D=BLOCK_D
    )
    return dw


# --- check ---
SWEEP = (
    {"V": 9, "T": 20, "D": 64},
    {"V": 5, "T": 23, "D": 37, "dtype": "float16"},
    {"V": 12, "T": 10, "D": 64, "dtype": "bfloat16"},
)
BENCH = ({"V": 32000, "T": 8192, "D": 1024, "dtype": "float32"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return weight, torch.randint(0, V, (T,), generator=g).to(device)


def reference(weight, ids):
    return weight[ids]
