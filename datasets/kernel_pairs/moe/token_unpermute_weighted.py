"""Weighted combine of the k expert rows of each token: drow is the scaled cotangent, dweight is a row dot product."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "token_unpermute_weighted",
    "family": "moe",
    "op": "moe_combine",
    "schema": 1,
    "techniques": ("inverse-map", "one-launch", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("rows", "weights"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _combine_fwd(Rows, Weights, Slots, Y, TOPK, D, BLOCK_D: tl.constexpr):
    # slots[t, j] says where the j-th copy of token t stands among the expert-sorted rows.
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for j in range(TOPK):
        slot = tl.load(Slots + token * TOPK + j).to(tl.int64)
        weight = tl.load(Weights + token * TOPK + j).to(tl.float32)
        acc += weight * tl.load(Rows + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(Y + token * D + d, acc, mask=d < D)


def forward(rows, weights, slots):
    rows, weights, slots = rows.contiguous(), weights.contiguous(), slots.contiguous()
    (T, TOPK), D = weights.shape, rows.shape[1]
    y = torch.empty(T, D, device=rows.device, dtype=rows.dtype)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _combine_fwd[(T, triton.cdiv(D, BLOCK_D))](rows, weights, slots, y, TOPK, D, BLOCK_D=BLOCK_D)
    return y, (rows, weights, slots)


# --- backward ---
@triton.jit
def _combine_bwd(DY, Rows, Weights, Slots, DRows, DWeights, D, dy_row, dy_col, TOPK, BLOCK_D: tl.constexpr):
    # One program for each copy: slots is a permutation, so each row of drows has exactly one writer.
    copy = tl.program_id(0).to(tl.int64)
    token = copy // TOPK
    slot = tl.load(Slots + copy).to(tl.int64)
    weight = tl.load(Weights + copy).to(tl.float32)
    dot = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        dy = tl.load(DY + token * dy_row + d * dy_col, mask=d < D, other=0.0).to(tl.float32)
        dot += dy * tl.load(Rows + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(DRows + slot * D + d, weight * dy, mask=d < D)
    tl.store(DWeights + copy, tl.sum(dot, 0))


def backward(saved, grad_y, needs=None):
    rows, weights, slots = saved
    (T, TOPK), D = weights.shape, rows.shape[1]
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    _combine_bwd[(T * TOPK,)](
        grad_y, rows, weights, slots, drows, dweights, D, grad_y.stride(0), grad_y.stride(1), TOPK,
        BLOCK_D=max(32, min(1024, triton.next_power_of_2(D))),
    )  # fmt: skip
    return drows, dweights


# --- check ---
SWEEP = (
    {"T": 10, "TOPK": 2, "D": 64},
    {"T": 13, "TOPK": 3, "D": 45, "dtype": "float16"},
    {"T": 6, "TOPK": 4, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"T": 8192, "TOPK": 8, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, TOPK, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(T * TOPK, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    weights = torch.softmax(torch.randn(T, TOPK, generator=g), -1).to(device)
    return rows, weights, torch.randperm(T * TOPK, generator=g).view(T, TOPK).to(device)


def reference(rows, weights, slots):
    return (rows.float()[slots] * weights.float()[..., None]).sum(1).to(rows.dtype)
