"""Triplet margin loss on Euclidean distances: the hinge decides a whole row, and three gradients share two directions.

L = max(0, |a - p| - |a - n| + margin). On an active row, with u = (a - p) / |a - p| and w = (a - n) / |a - n|:
    da = g (u - w),    dp = -g u,    dn = g w.
The forward saves both distances: they tell the hinge before anything is loaded, and normalise the directions. So the
backward is one elementwise pass without a row sum, and may cut rows into column tiles, which a reduction could not.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "triplet_margin",
    "family": "loss_other",
    "op": "triplet_margin_loss",
    "schema": 1,
    "techniques": ("saved-statistics", "elementwise", "masking", "shared-gradient", "one-launch"),
    "saves": ("distance: fp32 (2, M)",),
    "grads": ("anchor", "positive", "negative"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _triplet_fwd(
    Anchor, Positive, Negative, Loss, Distance, M, D, margin, eps, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    to_p = tl.zeros((BLOCK_M,), tl.float32)
    to_n = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        at = m[:, None] * D + d[None, :]
        inside = (m[:, None] < M) & (d[None, :] < D)
        a = tl.load(Anchor + at, mask=inside, other=0.0).to(tl.float32)
        p = a - tl.load(Positive + at, mask=inside, other=0.0).to(tl.float32)
        n = a - tl.load(Negative + at, mask=inside, other=0.0).to(tl.float32)
        to_p += tl.sum(p * p, 1)
        to_n += tl.sum(n * n, 1)
    # eps keeps the distance of equal points differentiable.
    to_p = tl.sqrt(to_p + eps)
    to_n = tl.sqrt(to_n + eps)
    gap = to_p - to_n + margin
    tl.store(Loss + m, tl.where(gap > 0.0, gap, 0.0), mask=m < M)
    tl.store(Distance + m, to_p, mask=m < M)
    tl.store(Distance + M + m, to_n, mask=m < M)


def forward(anchor, positive, negative, margin=1.0, eps=1e-12):
    anchor, positive, negative = anchor.contiguous(), positive.contiguous(), negative.contiguous()
    M, D = anchor.shape
    loss = torch.empty(M, device=anchor.device, dtype=torch.float32)
    distance = torch.empty(2, M, device=anchor.device, dtype=torch.float32)
    BLOCK_D = max(32, min(512, triton.next_power_of_2(D)))
    BLOCK_M = max(1, 1024 // BLOCK_D)
    _triplet_fwd[(triton.cdiv(M, BLOCK_M),)](
        anchor, positive, negative, loss, distance, M, D, margin, eps, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=4
    )
    return loss, (anchor, positive, negative, distance, margin)


# --- backward ---
@triton.jit
def _triplet_bwd(
    DLoss, Anchor, Positive, Negative, Distance, DA, DP, DN, M, D, margin, stride_g,
    NEED_A: tl.constexpr, NEED_P: tl.constexpr, NEED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = m[:, None] * D + d[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    to_p = tl.load(Distance + m, mask=m < M, other=1.0)
    to_n = tl.load(Distance + M + m, mask=m < M, other=1.0)
    active = (m < M) & (to_p - to_n + margin > 0.0)
    # Rows that the hinge holds at zero load nothing: the masks of their loads are false throughout.
    read = inside & active[:, None]
    g = tl.load(DLoss + m * stride_g, mask=active, other=0.0)
    a = tl.load(Anchor + at, mask=read, other=0.0).to(tl.float32)
    p = tl.load(Positive + at, mask=read, other=0.0).to(tl.float32)
    n = tl.load(Negative + at, mask=read, other=0.0).to(tl.float32)
    pull = (g / to_p)[:, None] * (a - p)
    push = (g / to_n)[:, None] * (a - n)
    if NEED_A:
        tl.store(DA + at, pull - push, mask=inside)
    if NEED_P:
        tl.store(DP + at, -pull, mask=inside)
    if NEED_N:
        tl.store(DN + at, push, mask=inside)


def backward(saved, grad_loss, needs=(True, True, True)):
    anchor, positive, negative, distance, margin = saved
    M, D = anchor.shape
    da, dp, dn = (torch.empty_like(anchor) if need else None for need in needs)
    BLOCK_D = max(32, min(512, triton.next_power_of_2(D)))
    BLOCK_M = max(1, 1024 // BLOCK_D)
    _triplet_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(D, BLOCK_D))](
        grad_loss, anchor, positive, negative, distance, da, dp, dn, M, D, margin, grad_loss.stride(0),
        NEED_A=needs[0], NEED_P=needs[1], NEED_N=needs[2], BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return da, dp, dn


# --- check ---
SWEEP = (
    {"M": 16, "D": 128},
    {"M": 37, "D": 75},
    {"M": 12, "D": 600, "dtype": "bfloat16"},
    {"M": 20, "D": 32, "dtype": "float16"},
)
BENCH = ({"M": 65536, "D": 768, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    anchor, positive, negative = (torch.randn(M, D, generator=g) for _ in range(3))
    # Every other negative is far away, beyond the margin.
    negative[::2] *= 3.0
    dt = getattr(torch, dtype)
    return (*(t.to(device=device, dtype=dt) for t in (anchor, positive, negative)), 1.0)


def reference(anchor, positive, negative, margin=1.0, eps=1e-12):
    a, p, n = anchor.float(), positive.float(), negative.float()
    to_p = ((a - p).square().sum(-1) + eps).sqrt()
    to_n = ((a - n).square().sum(-1) + eps).sqrt()
    return torch.relu(to_p - to_n + margin)
