"""Embedding lookup whose weight gradient is a row scatter: duplicate ids meet by atomic adds in an fp32 buffer."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_atomic",
    "family": "gather_scatter",
    "op": "embedding",
    "schema": 1,
    "techniques": ("atomics", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _embed_fwd(W, Ids, Y, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ids = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64)
    mask = (t[:, None] < T) & (d[None, :] < D)
    rows = tl.load(W + ids[:, None] * D + d[None, :], mask=mask)
    tl.store(Y + t[:, None] * D + d[None, :], rows, mask=mask)


def forward(weight, ids):
    weight, ids = weight.contiguous(), ids.contiguous()
    T, D = ids.numel(), weight.shape[1]
    y = torch.empty(T, D, device=weight.device, dtype=weight.dtype)
    BLOCK_D = max(32, min(256, triton.next_power_of_2(D)))
    _embed_fwd[(triton.cdiv(T, 8), triton.cdiv(D, BLOCK_D))](weight, ids, y, T, D, BLOCK_T=8, BLOCK_D=BLOCK_D)
    return y, (weight, ids)


# --- backward ---
@triton.jit
def _embed_bwd(DY, Ids, DW, T, D, dy_row, dy_col, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ids = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64)
    mask = (t[:, None] < T) & (d[None, :] < D)
    dy = tl.load(DY + t[:, None] * dy_row + d[None, :] * dy_col, mask=mask, other=0.0).to(tl.float32)
    # Order does not matter to anyone, so no fence is asked for; nothing reads the old value, so the adds do not return.
    tl.atomic_add(DW + ids[:, None] * D + d[None, :], dy, mask=mask, sem="relaxed")


def backward(saved, grad_y, needs=None):
    weight, ids = saved
    T, D = ids.numel(), weight.shape[1]
    # fp32 even for a bf16 table: hundreds of small adds to one frequent row would drown in 8 bits of mantissa.
    dw = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
    BLOCK_D = max(32, min(256, triton.next_power_of_2(D)))
    _embed_bwd[(triton.cdiv(T, 8), triton.cdiv(D, BLOCK_D))](
        grad_y, ids, dw, T, D, grad_y.stride(0), grad_y.stride(1), BLOCK_T=8, BLOCK_D=BLOCK_D
    )
    return dw.to(weight.dtype)


# --- check ---
SWEEP = (
    {"V": 10, "T": 24, "D": 64},
    {"V": 7, "T": 29, "D": 50, "dtype": "float16"},
    {"V": 16, "T": 8, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"V": 32000, "T": 8192, "D": 1024, "dtype": "float32"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return weight, torch.randint(0, V, (T,), generator=g).to(device)


def reference(weight, ids):
    return torch.nn.functional.embedding(ids, weight)
