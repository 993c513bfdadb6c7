"""Mean cross-entropy with class weights over few classes and many rows, as in segmentation: the divisor is data too.

L = sum of w[y] (lse - x[y]) / sum of w[y],    dx = w[y] (p - onehot) g / sum of w[y].
A row of classes fits one tile, so a persistent grid walks over tiles of rows and keeps two sums, weighted loss and
weight, in registers; one program joins them in a second stage. The backward takes the divisor from the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_class_weights",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "techniques": ("multi-row-tile", "row-local", "persistent-grid", "saved-lse", "broadcast-adjoint"),
    "saves": ("lse: fp32 (M,)", "total: fp32 ()"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _weighted_ce_fwd(Logits, Target, Weight, Lse, Sums, M, V, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    v = tl.arange(0, BLOCK_V)
    loss = tl.zeros((BLOCK_M,), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < M) & (v[None, :] < V)
        x = tl.load(Logits + m[:, None] * V + v[None, :], mask=inside, other=0.0).to(tl.float32)
        target = tl.load(Target + m, mask=m < M, other=0)
        # Rows past the end have no weight.
        w = tl.load(Weight + target, mask=m < M, other=0.0)
        picked = tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        x = tl.where(v[None, :] < V, x, -float("inf"))
        top = tl.max(x, 1)
        lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
        tl.store(Lse + m, lse, mask=m < M)
        loss += w * (lse - picked)
        weight += w
    tl.store(Sums + 2 * tl.program_id(0), tl.sum(loss, 0))
    tl.store(Sums + 2 * tl.program_id(0) + 1, tl.sum(weight, 0))


@triton.jit
def _weighted_mean(Sums, Loss, Total, programs, BLOCK: tl.constexpr):
    p = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(Sums + 2 * p + 1, mask=p < programs, other=0.0), 0)
    tl.store(Loss, tl.sum(tl.load(Sums + 2 * p, mask=p < programs, other=0.0), 0) / total)
    tl.store(Total, total)


def _tile(V):
    if V > 8192:
        raise ValueError("all classes must fit one tile: at most 8192")
    BLOCK_V = max(8, triton.next_power_of_2(V))
    return max(1, 2048 // BLOCK_V), BLOCK_V


def forward(logits, target, weight):
    logits, target, weight = logits.contiguous(), target.contiguous(), weight.contiguous()
    M, V = logits.shape
    BLOCK_M, BLOCK_V = _tile(V)
    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 2
    programs = min(triton.cdiv(M, BLOCK_M), 8 * processors)
    lse = torch.empty(M, device=logits.device, dtype=torch.float32)
    sums = torch.empty(programs, 2, device=logits.device, dtype=torch.float32)
    loss, total = (torch.empty((), device=logits.device, dtype=torch.float32) for _ in range(2))
    _weighted_ce_fwd[(programs,)](
        logits, target, weight, lse, sums, M, V, BLOCK_M=BLOCK_M, BLOCK_V=BLOCK_V, num_warps=4
    )
    _weighted_mean[(1,)](sums, loss, total, programs, BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, (logits, target, weight, lse, total)


# --- backward ---
@triton.jit
def _weighted_ce_bwd(
    DLoss, Logits, Target, Weight, Lse, Total, DLogits, M, groups,
    LANES: tl.constexpr, STRIPES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Classes come in groups of LANES that exist as a whole: rows begin at words of that many logits, no mask cuts one.
    V = groups * LANES
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(Target + m, mask=m < M, other=0)
    w = tl.load(Weight + target, mask=m < M, other=0.0) * (tl.load(DLoss) / tl.load(Total))
    lse = tl.load(Lse + m, mask=m < M, other=0.0) * 1.4426950408889634
    # Nothing is summed over the classes: they come in stripes of 32, of which the last wastes less than a power of two.
    # All are read before the first is written, since no load passes a store.
    stripes = ()
    for stripe in tl.static_range(STRIPES):
        v = stripe * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (m[:, None] < M) & (v // LANES < groups)[None, :]
        stripes += (tl.load(Logits + m[:, None] * V + v[None, :], mask=inside, other=0.0),)
    for stripe in tl.static_range(STRIPES):
        v = stripe * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (m[:, None] < M) & (v // LANES < groups)[None, :]
        p = tl.exp2(stripes[stripe].to(tl.float32) * 1.4426950408889634 - lse[:, None])
        p = tl.where(v[None, :] == target[:, None], p - 1.0, p)
        tl.store(DLogits + m[:, None] * V + v[None, :], w[:, None] * p, mask=inside)


def backward(saved, grad_loss, needs=None):
    logits, target, weight, lse, total = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK_V = 32 if V <= 512 else triton.next_power_of_2(V)
    BLOCK_M = max(1, 512 // BLOCK_V)
    LANES = next(lanes for lanes in (8, 4, 2, 1) if V % lanes == 0)
    _weighted_ce_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_loss, logits, target, weight, lse, total, dlogits, M, V // LANES,
        LANES=LANES, STRIPES=triton.cdiv(V, BLOCK_V), BLOCK_M=BLOCK_M, BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 64, "V": 32},
    {"M": 301, "V": 19},
    {"M": 30, "V": 150, "dtype": "bfloat16"},
    {"M": 100, "V": 4, "dtype": "float16"},
)
BENCH = ({"M": 524288, "V": 150, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    # Class weights are a property of the data set, kept in fp32.
    weight = 0.2 + torch.rand(V, generator=g)
    return logits, torch.randint(0, V, (M,), generator=g).to(device), weight.to(device)


def reference(logits, target, weight):
    return torch.nn.functional.cross_entropy(logits.float(), target, weight=weight)
