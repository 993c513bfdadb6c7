"""EmbeddingBag, sum mode: the owner of a bag holds its cotangent in registers and adds it to every row of the bag.

y[b] = sum of weight[ids[l]] over l from offsets[b] to offsets[b + 1]. The cotangent of a bag is read once however many
ids it has; only the adds into the table go through memory, as atomics since bags share rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_bag_sum",
    "family": "gather_scatter",
    "op": "embedding_bag",
    "schema": 1,
    "techniques": ("atomics", "broadcast-adjoint", "varlen", "strided-cotangent"),
    "saves": (),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bag_sum_fwd(Weight, Ids, Offsets, Y, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(Offsets + bag + 1)
    total = tl.zeros((BLOCK_D,), tl.float32)
    # BLOCK_L rows are in flight together: the reads are random, so latency counts.
    for start in range(tl.load(Offsets + bag), end, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        row = tl.load(Ids + place, mask=place < end, other=0).to(tl.int64)
        ok = (place[:, None] < end) & (d[None, :] < D)
        total += tl.sum(tl.load(Weight + row[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32), 0)
    tl.store(Y + bag * D + d, total, mask=d < D)


def forward(weight, ids, offsets):
    weight, ids = weight.contiguous(), ids.contiguous()
    bags, D = offsets.numel() - 1, weight.shape[1]
    y = torch.empty(bags, D, device=weight.device, dtype=weight.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    _bag_sum_fwd[(bags, triton.cdiv(D, BLOCK_D))](
        weight, ids, offsets, y, D, BLOCK_L=8, BLOCK_D=BLOCK_D, num_warps=max(1, BLOCK_D // 128)
    )
    return y, (weight, ids, offsets)


# --- backward ---
@triton.jit
def _bag_scatter_bwd(DY, Ids, Offsets, DW, D, dy_b, dy_d, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    dy = tl.load(DY + bag * dy_b + d * dy_d, mask=d < D, other=0.0).to(tl.float32)
    spread = tl.broadcast_to(dy[None, :], (BLOCK_L, BLOCK_D))
    end = tl.load(Offsets + bag + 1)
    for start in range(tl.load(Offsets + bag), end, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        row = tl.load(Ids + place, mask=place < end, other=0).to(tl.int64)
        ok = (place[:, None] < end) & (d[None, :] < D)
        tl.atomic_add(DW + row[:, None] * D + d[None, :], spread, mask=ok, sem="relaxed")


def backward(saved, grad_y, needs=None):
    weight, ids, offsets = saved
    bags, D = offsets.numel() - 1, weight.shape[1]
    # fp32 sums for every table: a popular row takes part in many bags.
    dw = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    _bag_scatter_bwd[(bags, triton.cdiv(D, BLOCK_D))](
        grad_y, ids, offsets, dw, D, *grad_y.stride(), BLOCK_L=32, BLOCK_D=BLOCK_D, num_warps=max(1, BLOCK_D // 128)
    )
    return dw.to(weight.dtype)


# --- check ---
SWEEP = (
    {"V": 12, "L": 64, "bags": 5, "D": 64},
    {"V": 7, "L": 53, "bags": 9, "D": 37},
    {"V": 16, "L": 40, "bags": 4, "D": 48, "dtype": "bfloat16"},
)
BENCH = ({"V": 100000, "L": 655360, "bags": 16384, "D": 128, "dtype": "float32"},)


def make_args(V, L, bags, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    ids = torch.randint(0, V, (L,), generator=g)
    # Random cuts; the second bag is empty.
    cuts = torch.randint(0, L + 1, (bags - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    return weight, ids.to(device), offsets.to(device)


def reference(weight, ids, offsets):
    bags = offsets.numel() - 1
    bag = torch.repeat_interleave(torch.arange(bags, device=ids.device), offsets.diff(), output_size=ids.numel())
    y = torch.zeros(bags, weight.shape[1], device=weight.device)
    return y.index_add(0, bag, weight.float()[ids]).to(weight.dtype)
