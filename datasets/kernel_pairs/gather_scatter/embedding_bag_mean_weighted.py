"""EmbeddingBag with per-sample weights, mean over the bag: each table row is dotted with dy where dy is scattered.

y[b] = 1/n[b] sum of scale[l] weight[ids[l]] over the n[b] places l of bag b. The owner of a bag visits its rows once:
reading them gives dscale[l] = <dy, row> / n, and scale[l] dy / n goes back to the same addresses as atomic adds.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_bag_mean_weighted",
    "family": "gather_scatter",
    "op": "embedding_bag",
    "schema": 1,
    "techniques": ("atomics", "one-launch", "varlen", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("weight", "scale"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bag_mean_fwd(Weight, Scale, Ids, Offsets, Y, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(Offsets + bag)
    end = tl.load(Offsets + bag + 1)
    acc = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        row = tl.load(Ids + place, mask=place < end, other=0).to(tl.int64)
        scale = tl.load(Scale + place, mask=place < end, other=0.0).to(tl.float32)
        ok = (place[:, None] < end) & (d[None, :] < D)
        acc += scale[:, None] * tl.load(Weight + row[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    # An empty bag is zero, not 0/0.
    tl.store(Y + bag * D + d, tl.sum(acc, 0) / tl.maximum(end - begin, 1).to(tl.float32), mask=d < D)


def forward(weight, scale, ids, offsets):
    weight, scale, ids = weight.contiguous(), scale.contiguous(), ids.contiguous()
    bags, D = offsets.numel() - 1, weight.shape[1]
    y = torch.empty(bags, D, device=weight.device, dtype=weight.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    _bag_mean_fwd[(bags, triton.cdiv(D, BLOCK_D))](
        weight, scale, ids, offsets, y, D, BLOCK_L=4, BLOCK_D=BLOCK_D, num_warps=max(1, BLOCK_D // 128)
    )
    return y, (weight, scale, ids, offsets)


# --- backward ---
@triton.jit
def _bag_mean_bwd(
    DY, Weight, Scale, Ids, Offsets, DW, DScale, D, dy_b, dy_d,
    NEED_WEIGHT: tl.constexpr, NEED_SCALE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    begin = tl.load(Offsets + bag)
    end = tl.load(Offsets + bag + 1)
    share = 1.0 / tl.maximum(end - begin, 1).to(tl.float32)
    for start in range(begin, end, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        inside = place < end
        row = tl.load(Ids + place, mask=inside, other=0).to(tl.int64)
        scale = tl.load(Scale + place, mask=inside, other=0.0).to(tl.float32) * share
        dots = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
        # dy is read again for each group of rows: after the first it comes from L1.
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D).to(tl.int64)
            dy = tl.load(DY + bag * dy_b + d * dy_d, mask=d < D, other=0.0).to(tl.float32)
            at = row[:, None] * D + d[None, :]
            ok = inside[:, None] & (d[None, :] < D)
            if NEED_SCALE:
                dots += dy[None, :] * tl.load(Weight + at, mask=ok, other=0.0).to(tl.float32)
            if NEED_WEIGHT:
                tl.atomic_add(DW + at, scale[:, None] * dy[None, :], mask=ok, sem="relaxed")
        if NEED_SCALE:
            tl.store(DScale + place, tl.sum(dots, 1) * share, mask=inside)


def backward(saved, grad_y, needs=(True, True)):
    weight, scale, ids, offsets = saved
    need_weight, need_scale = needs
    bags, D = offsets.numel() - 1, weight.shape[1]
    # Bags share rows: fp32 sums for any table. An unneeded gradient is never touched, the input stands in for it.
    dw = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32) if need_weight else weight
    dscale = torch.empty_like(scale) if need_scale else scale
    BLOCK_D = min(256, triton.next_power_of_2(D))
    _bag_mean_bwd[(bags,)](
        grad_y, weight, scale, ids, offsets, dw, dscale, D, *grad_y.stride(),
        NEED_WEIGHT=need_weight, NEED_SCALE=need_scale,
        BLOCK_L=8, BLOCK_D=BLOCK_D, num_warps=max(1, BLOCK_D // 128),
    )  # fmt: skip
    return dw.to(weight.dtype) if need_weight else None, dscale if need_scale else None


# --- check ---
SWEEP = (
    {"V": 12, "L": 64, "bags": 5, "D": 64},
    {"V": 7, "L": 53, "bags": 9, "D": 301},
    {"V": 16, "L": 40, "bags": 4, "D": 48, "dtype": "bfloat16"},
)
BENCH = ({"V": 100000, "L": 655360, "bags": 16384, "D": 128, "dtype": "bfloat16"},)


def make_args(V, L, bags, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight, scale = torch.randn(V, D, generator=g), torch.rand(L, generator=g) + 0.5
    ids = torch.randint(0, V, (L,), generator=g)
    # Random cuts; the second bag is empty.
    cuts = torch.randint(0, L + 1, (bags - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (weight, scale))
    return *floats, ids.to(device), offsets.to(device)


def reference(weight, scale, ids, offsets):
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=ids.device), lengths, output_size=ids.numel())
    rows = scale.float()[:, None] * weight.float()[ids]
    total = torch.zeros(lengths.numel(), weight.shape[1], device=weight.device).index_add(0, bag, rows)
    return (total / lengths.clamp(min=1)[:, None]).to(weight.dtype)
