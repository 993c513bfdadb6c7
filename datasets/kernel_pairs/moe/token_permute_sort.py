"""Permutation of tokens into expert order: the backward gathers a token's k copies by the inverse map and adds them.

The forward sorts the T K assignments by expert and copies rows: out[s] = x[order[s] // K]. While it copies, each
program notes where its assignment went, slot[order[s]] = s: the inverse permutation without a pass of its own.
    dx[t] = sum over j of dout[slot[t K + j]],
so that a token's owner reads K rows and writes one, where a scatter would need atomics or a zeroed fp32 buffer.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "token_permute_sort",
    "family": "moe",
    "op": "token_permute",
    "schema": 1,
    "techniques": ("inverse-map", "gather-form", "row-local", "strided-cotangent"),
    "saves": ("slot: int32 (T * K,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _permute_rows(X, Order, OUT, Slot, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(0)
    assignment = tl.load(Order + s)
    token = (assignment // K).to(tl.int64)
    tl.store(Slot + assignment, s)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        row = tl.load(X + token * D + d, mask=d < D, other=0.0)
        tl.store(OUT + s.to(tl.int64) * D + d, row, mask=d < D)


def forward(x, expert, experts):
    x = x.contiguous()
    (T, D), K = x.shape, expert.shape[1]
    # Stable, so that tokens of one expert keep their order and runs are reproducible.
    by_expert, order = torch.sort(expert.reshape(-1), stable=True)
    # The end of each expert's rows, without asking the host.
    bounds = torch.searchsorted(by_expert, torch.arange(experts, device=x.device), right=True).to(torch.int32)
    out = torch.empty(T * K, D, device=x.device, dtype=x.dtype)
    slot = torch.empty(T * K, device=x.device, dtype=torch.int32)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _permute_rows[(T * K,)](x, order, out, slot, D, K=K, BLOCK_D=BLOCK_D, num_warps=max(1, min(4, BLOCK_D // 256)))
    return (out, bounds), (slot, x.shape, K)


# --- backward ---
@triton.jit
def _unpermute_add(DOut, Slot, DX, D, do_row, do_col, K: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    # Unrolled: the K loads are in flight together.
    for j in tl.static_range(K):
        slot = tl.load(Slot + token * K + j).to(tl.int64)
        total += tl.load(DOut + slot * do_row + d * do_col, mask=d < D, other=0.0).to(tl.float32)
    tl.store(DX + token * D + d, total, mask=d < D)


def backward(saved, grad_out, grad_bounds=None, needs=None):
    slot, (T, D), K = saved
    dx = torch.empty(T, D, device=grad_out.device, dtype=grad_out.dtype)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _unpermute_add[(T, triton.cdiv(D, BLOCK_D))](
        grad_out, slot, dx, D, grad_out.stride(0), grad_out.stride(1),
        K=K, BLOCK_D=BLOCK_D, num_warps=max(1, min(4, BLOCK_D // 256)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"T": 24, "E": 4, "K": 2, "D": 64},
    {"T": 37, "E": 8, "K": 3, "D": 75},
    {"T": 16, "E": 16, "K": 8, "D": 40, "dtype": "bfloat16"},
    {"T": 20, "E": 2, "K": 1, "D": 130, "dtype": "float16"},
)
BENCH = ({"T": 16384, "E": 64, "K": 8, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, D, dtype="float32", device="cpu", seed=0):
    if K > E:
        raise ValueError("a token cannot go to more experts than there are")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.rand(T, E, generator=g).topk(K).indices.to(device), E


def reference(x, expert, experts):
    order = torch.sort(expert.reshape(-1), stable=True).indices
    bounds = torch.bincount(expert.reshape(-1), minlength=experts).cumsum(0).to(torch.int32)
    return x[order // expert.shape[1]], bounds
