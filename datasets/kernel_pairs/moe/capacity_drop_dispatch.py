"""Dispatch into experts of fixed capacity: what does not fit is dropped, and its gradient is exactly zero.

Assignments are served in order; the rank within its expert decides the slot, and ranks from the capacity on get none.
The forward copies rows into a zeroed (E, C, D) buffer. It saves one slot per assignment, -1 for a dropped one, so that
a token's owner in the backward gathers the cotangents of the copies that were kept and adds them: no atomics, and a
token whose copies all were dropped stores zeros. Empty slots have cotangents too; nobody reads them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "capacity_drop_dispatch",
    "family": "moe",
    "op": "capacity_dispatch",
    "schema": 1,
    "techniques": ("inverse-map", "masking", "gather-form", "row-local", "strided-cotangent"),
    "saves": ("slot: int32 (T * K,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _dispatch_rows(X, Order, ByExpert, First, Slot, OUT, C, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    # Position in the sorted list minus the first of its expert is the rank.
    place = tl.program_id(0)
    expert = tl.load(ByExpert + place)
    rank = place - tl.load(First + expert)
    assignment = tl.load(Order + place)
    slot = tl.where(rank < C, expert * C + rank, -1)
    tl.store(Slot + assignment, slot)
    if rank < C:
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            row = tl.load(X + (assignment // K).to(tl.int64) * D + d, mask=d < D, other=0.0)
            tl.store(OUT + slot.to(tl.int64) * D + d, row, mask=d < D)


def forward(x, expert, experts, capacity):
    x = x.contiguous()
    (T, D), K = x.shape, expert.shape[1]
    # Stable: the first tokens are served first.
    by_expert, order = torch.sort(expert.reshape(-1), stable=True)
    first = torch.searchsorted(by_expert, torch.arange(experts, device=x.device))
    out = torch.zeros(experts, capacity, D, device=x.device, dtype=x.dtype)
    slot = torch.empty(T * K, device=x.device, dtype=torch.int32)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _dispatch_rows[(T * K,)](
        x, order, by_expert, first, slot, out, capacity, D,
        K=K, BLOCK_D=BLOCK_D, num_warps=max(1, min(4, BLOCK_D // 256)),
    )  # fmt: skip
    return out, (slot, x.shape, K, capacity)


# --- backward ---
@triton.jit
def _collect_rows(
    DOut, Slot, DX, T, D, C, do_e, do_c, do_d, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.static_range(K):
        slot = tl.load(Slot + t * K + j, mask=t < T, other=-1)
        expert = slot // C
        row = DOut + expert.to(tl.int64) * do_e + (slot - expert * C).to(tl.int64) * do_c
        kept = (slot[:, None] >= 0) & (d[None, :] < D)
        total += tl.load(row[:, None] + d[None, :] * do_d, mask=kept, other=0.0).to(tl.float32)
    tl.store(DX + t[:, None] * D + d[None, :], total, mask=(t[:, None] < T) & (d[None, :] < D))


def backward(saved, grad_out, needs=None):
    slot, (T, D), K, capacity = saved
    dx = torch.empty(T, D, device=grad_out.device, dtype=grad_out.dtype)
    # Long pieces of few rows: what lies together in memory moves at about the same time.
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _collect_rows[(triton.cdiv(T, 2), triton.cdiv(D, BLOCK_D))](
        grad_out, slot, dx, T, D, capacity, *grad_out.stride(), K=K, BLOCK_T=2, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"T": 24, "E": 4, "K": 2, "C": 9, "D": 64},
    {"T": 37, "E": 5, "K": 3, "C": 17, "D": 75},
    {"T": 16, "E": 8, "K": 2, "C": 3, "D": 40, "dtype": "bfloat16"},
    {"T": 20, "E": 2, "K": 1, "C": 30, "D": 130, "dtype": "float16"},
)
BENCH = ({"T": 32768, "E": 64, "K": 2, "C": 1280, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, C, D, dtype="float32", device="cpu", seed=0):
    if K > E:
        raise ValueError("a token cannot go to more experts than there are")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Low experts are liked more and overflow.
    score = torch.rand(T, E, generator=g) + torch.linspace(0.5, 0.0, E)
    return x, score.topk(K).indices.to(device), E, C


def reference(x, expert, experts, capacity):
    K = expert.shape[1]
    by_expert, order = torch.sort(expert.reshape(-1), stable=True)
    first = torch.searchsorted(by_expert, torch.arange(experts, device=x.device))
    rank = torch.arange(order.numel(), device=x.device) - first[by_expert]
    # Dropped rows go to one slot beyond the end, which is cut off.
    slot = torch.where(rank < capacity, by_expert * capacity + rank, experts * capacity)
    out = x.new_zeros(experts * capacity + 1, x.shape[1]).index_copy(0, slot, x[order // K])
    return out[:-1].view(experts, capacity, -1)
