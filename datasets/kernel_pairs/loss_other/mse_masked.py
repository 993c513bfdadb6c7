"""Squared error averaged over the elements that a mask keeps: sum and count meet in two stages and stay on the device.

L = sum of mask (pred - target)^2 / count. The count is data, so it is a sum of its own that runs beside the loss's; the
backward divides by the saved count without asking the host. An empty mask counts as one: loss and gradients are zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mse_masked",
    "family": "loss_other",
    "op": "masked_mse",
    "schema": 1,
    "techniques": ("masking", "elementwise", "broadcast-adjoint", "shared-gradient", "one-launch"),
    "saves": ("count: fp32 ()",),
    "grads": ("pred", "target"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _masked_sums(Pred, Target, Mask, Sums, numel, BLOCK: tl.constexpr):
    # Programs stride over the tensor, so that their number, and the second stage, stay small for any size.
    pid = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(pid.to(tl.int64) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        kept = tl.load(Mask + i, mask=i < numel, other=0) != 0
        # What the mask drops is not even read: it may hold NaN.
        p = tl.load(Pred + i, mask=kept, other=0.0).to(tl.float32)
        t = tl.load(Target + i, mask=kept, other=0.0).to(tl.float32)
        total += (p - t) * (p - t)
        count += kept.to(tl.int32)
    tl.store(Sums + 2 * pid, tl.sum(total, 0))
    # A program of 2^31 elements or less counts exactly in integers; the count of all is rounded once.
    tl.store(Sums + 2 * pid + 1, tl.sum(count, 0).to(tl.float32))


@triton.jit
def _masked_mean(Sums, Loss, Count, programs, BLOCK: tl.constexpr):
    p = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(Sums + 2 * p, mask=p < programs, other=0.0), 0)
    count = tl.maximum(tl.sum(tl.load(Sums + 2 * p + 1, mask=p < programs, other=0.0), 0), 1.0)
    tl.store(Loss, total / count)
    tl.store(Count, count)


def forward(pred, target, mask):
    pred, target, mask = pred.contiguous(), target.contiguous(), mask.contiguous()
    numel = pred.numel()
    programs = min(triton.cdiv(numel, 1024), 1024)
    sums = torch.empty(programs, 2, device=pred.device, dtype=torch.float32)
    loss = torch.empty((), device=pred.device, dtype=torch.float32)
    count = torch.empty_like(loss)
    _masked_sums[(programs,)](pred, target, mask, sums, numel, BLOCK=1024, num_warps=4)
    _masked_mean[(1,)](sums, loss, count, programs, BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, (pred, target, mask, count)


# --- backward ---
@triton.jit
def _masked_mse_bwd(
    DLoss, Pred, Target, Mask, Count, DPred, DTarget, numel,
    NEED_P: tl.constexpr, NEED_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = 2.0 * tl.load(DLoss) / tl.load(Count)
    kept = tl.load(Mask + i, mask=i < numel, other=0) != 0
    p = tl.load(Pred + i, mask=kept, other=0.0).to(tl.float32)
    t = tl.load(Target + i, mask=kept, other=0.0).to(tl.float32)
    slope = factor * (p - t)
    if NEED_P:
        tl.store(DPred + i, slope, mask=i < numel)
    if NEED_T:
        tl.store(DTarget + i, -slope, mask=i < numel)


def backward(saved, grad_loss, needs=(True, True)):
    pred, target, mask, count = saved
    dp = torch.empty_like(pred) if needs[0] else None
    dt = torch.empty_like(target) if needs[1] else None
    _masked_mse_bwd[(triton.cdiv(pred.numel(), 2048),)](
        grad_loss, pred, target, mask, count, dp, dt, pred.numel(),
        NEED_P=needs[0], NEED_T=needs[1], BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return dp, dt


# --- check ---
SWEEP = (
    {"M": 8, "N": 512, "keep": 0.5},
    {"M": 37, "N": 75, "keep": 0.9},
    {"M": 16, "N": 130, "keep": 0.3, "dtype": "bfloat16"},
    {"M": 9, "N": 64, "keep": 0.0, "dtype": "float16"},
)
BENCH = ({"M": 16384, "N": 4096, "keep": 0.7, "dtype": "bfloat16"},)


def make_args(M, N, keep, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    pred, target = (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return pred, target, (torch.rand(M, N, generator=g) < keep).to(device)


def reference(pred, target, mask):
    squared = (pred.float() - target.float()).square()
    return torch.where(mask, squared, 0.0).sum() / mask.sum().clamp(min=1)
