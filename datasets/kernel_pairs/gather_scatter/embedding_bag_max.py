"""EmbeddingBag, max mode: the row that won each (bag, feature) is saved, and it alone gets the gradient."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_bag_max",
    "family": "gather_scatter",
    "op": "embedding_bag",
    "schema": 1,
    "techniques": ("argmax-routing", "atomics", "varlen", "strided-cotangent"),
    "saves": ("winner: i32 (bags, D)",),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bag_max_fwd(Weight, Ids, Offsets, Y, Winner, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(Offsets + bag)
    end = tl.load(Offsets + bag + 1)
    best = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    place = tl.full((BLOCK_D,), 0, tl.int32)
    # BLOCK_L rows a step: their ids and their rows are on the way together. The first of equals wins.
    for start in range(begin, end, BLOCK_L):
        here = start + tl.arange(0, BLOCK_L)
        row = tl.load(Ids + here, mask=here < end, other=0).to(tl.int64)
        ok = (here[:, None] < end) & (d[None, :] < D)
        rows = tl.load(Weight + row[:, None] * D + d[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        value, slot = tl.max(rows, 0, return_indices=True)
        place = tl.where(value > best, (start - begin).to(tl.int32) + slot, place)
        best = tl.maximum(best, value)
    # An empty bag is zero and has no winner. Otherwise the winner's row number is looked up once, after the loop.
    filled = (d < D) & (end > begin)
    winner = tl.load(Ids + begin + place, mask=filled, other=-1)
    tl.store(Y + bag * D + d, tl.where(filled, best, 0.0), mask=d < D)
    tl.store(Winner + bag * D + d, winner.to(tl.int32), mask=d < D)


def forward(weight, ids, offsets):
    weight, ids = weight.contiguous(), ids.contiguous()
    bags, D = offsets.numel() - 1, weight.shape[1]
    y = torch.empty(bags, D, device=weight.device, dtype=weight.dtype)
    winner = torch.empty(bags, D, device=weight.device, dtype=torch.int32)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    _bag_max_fwd[(bags, triton.cdiv(D, BLOCK_D))](
        weight, ids, offsets, y, winner, D, BLOCK_L=8, BLOCK_D=BLOCK_D, num_warps=max(1, BLOCK_D // 64)
    )
    return y, (weight, winner)


# --- backward ---
@triton.jit
def _bag_max_bwd(DY, Winner, DW, bags, D, dy_b, dy_d, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr):
    # Bags' lengths no longer matter: the work is one add for every output, in tiles of many bags.
    bag = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    ok = (bag[:, None] < bags) & (d[None, :] < D)
    winner = tl.load(Winner + bag[:, None] * D + d[None, :], mask=ok, other=-1).to(tl.int64)
    routed = ok & (winner >= 0)
    dy = tl.load(DY + bag[:, None] * dy_b + d[None, :] * dy_d, mask=routed, other=0.0).to(tl.float32)
    tl.atomic_add(DW + winner * D + d[None, :], dy, mask=routed, sem="relaxed")


def backward(saved, grad_y, needs=None):
    weight, winner = saved
    bags, D = winner.shape
    dw = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
    BLOCK_D = min(64, triton.next_power_of_2(D))
    BLOCK_B = 128 // BLOCK_D
    _bag_max_bwd[(triton.cdiv(bags, BLOCK_B), triton.cdiv(D, BLOCK_D))](
        grad_y, winner, dw, bags, D, *grad_y.stride(), BLOCK_B=BLOCK_B, BLOCK_D=BLOCK_D, num_warps=8
    )
    return dw.to(weight.dtype)


# --- check ---
SWEEP = (
    {"V": 12, "L": 64, "bags": 5, "D": 64},
    {"V": 9, "L": 53, "bags": 9, "D": 37},
    {"V": 16, "L": 40, "bags": 4, "D": 48, "dtype": "bfloat16"},
)
BENCH = ({"V": 100000, "L": 655360, "bags": 32768, "D": 256, "dtype": "float32"},)


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
    return torch.nn.functional.embedding_bag(ids, weight, offsets[:-1], mode="max")
