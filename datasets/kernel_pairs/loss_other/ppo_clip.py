"""PPO's clipped surrogate with the dual clip, averaged over kept tokens: which branch won says who gets a gradient.

With r = exp(new - old):    s = min(r A, clip(r, 1 - eps, 1 + eps) A),  and for A < 0 also s = max(s, dual A),
    L = -mean of s,    dL/dnew = -g r A / count where r decided s, else 0.
Order matters: for A > 0 the minimum stops r above 1 + eps, for A < 0 below 1 - eps, and there the maximum stops it
again above `dual`. Old log-probabilities and advantages are data. Ratio and branch are formed again, not saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ppo_clip",
    "family": "loss_other",
    "op": "ppo_clip_loss",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "masking", "partial-gradient", "broadcast-adjoint"),
    "saves": ("count: fp32 ()",),
    "grads": ("new",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ppo_sums(New, Old, Advantage, Mask, Sums, numel, eps, dual, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(program.to(tl.int64) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        kept = tl.load(Mask + i, mask=i < numel, other=0) != 0
        new = tl.load(New + i, mask=kept, other=0.0).to(tl.float32)
        old = tl.load(Old + i, mask=kept, other=0.0).to(tl.float32)
        a = tl.load(Advantage + i, mask=kept, other=0.0).to(tl.float32)
        r = tl.exp(new - old)
        clipped = tl.where(r > 1.0 + eps, 1.0 + eps, tl.where(r < 1.0 - eps, 1.0 - eps, r))
        s = tl.where(r * a < clipped * a, r * a, clipped * a)
        s = tl.where((a < 0.0) & (s < dual * a), dual * a, s)
        total += s
        count += kept.to(tl.int32)
    tl.store(Sums + 2 * program, tl.sum(total, 0))
    tl.store(Sums + 2 * program + 1, tl.sum(count, 0).to(tl.float32))


@triton.jit
def _ppo_mean(Sums, Loss, Count, programs, BLOCK: tl.constexpr):
    p = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(Sums + 2 * p, mask=p < programs, other=0.0), 0)
    count = tl.maximum(tl.sum(tl.load(Sums + 2 * p + 1, mask=p < programs, other=0.0), 0), 1.0)
    tl.store(Loss, -total / count)
    tl.store(Count, count)


def forward(new, old, advantage, mask, eps=0.2, dual=3.0):
    if not dual > 1.0 + eps:
        raise ValueError("the dual clip must lie above the clip, dual > 1 + eps")
    new, old, advantage, mask = (x.contiguous() for x in (new, old, advantage, mask))
    numel = new.numel()
    programs = min(triton.cdiv(numel, 1024), 1024)
    sums = torch.empty(programs, 2, device=new.device, dtype=torch.float32)
    loss, count = (torch.empty((), device=new.device, dtype=torch.float32) for _ in range(2))
    _ppo_sums[(programs,)](new, old, advantage, mask, sums, numel, eps, dual, BLOCK=1024, num_warps=4)
    _ppo_mean[(1,)](sums, loss, count, programs, BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, (new, old, advantage, mask, count, eps, dual)


# --- backward ---
@triton.jit
def _ppo_bwd(DLoss, New, Old, Advantage, Mask, Count, DNew, numel, eps, dual, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(Mask + i, mask=i < numel, other=0) != 0
    new = tl.load(New + i, mask=kept, other=0.0).to(tl.float32)
    old = tl.load(Old + i, mask=kept, other=0.0).to(tl.float32)
    a = tl.load(Advantage + i, mask=kept, other=0.0).to(tl.float32)
    r = tl.exp(new - old)
    # Two comparisons hold all of min, clip and max: gains stop above, losses below and far above.
    gains = (a >= 0.0) & (r <= 1.0 + eps)
    losses = (a < 0.0) & (r >= 1.0 - eps) & (r <= dual)
    slope = tl.where(gains | losses, -r * a, 0.0)
    tl.store(DNew + i, tl.load(DLoss) / tl.load(Count) * slope, mask=i < numel)


def backward(saved, grad_loss, needs=None):
    new, old, advantage, mask, count, eps, dual = saved
    dnew = torch.empty_like(new)
    _ppo_bwd[(triton.cdiv(new.numel(), 512),)](
        grad_loss, new, old, advantage, mask, count, dnew, new.numel(), eps, dual, BLOCK=512, num_warps=4
    )
    return dnew


# --- check ---
SWEEP = ({"B": 8, "T": 256}, {"B": 7, "T": 301}, {"B": 4, "T": 130, "dtype": "bfloat16"})
BENCH = ({"B": 2048, "T": 8192, "dtype": "float32"},)


def make_args(B, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -2.0 * torch.rand(B, T, generator=g)
    # Ratios up to about seven: every branch is met.
    new = old + 0.6 * torch.randn(B, T, generator=g)
    advantage = torch.randn(B, T, generator=g)
    mask = (torch.rand(B, T, generator=g) < 0.8).to(device)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (new, old, advantage)), mask)


def reference(new, old, advantage, mask, eps=0.2, dual=3.0):
    a = advantage.float()
    r = torch.exp(new.float() - old.float())
    s = torch.minimum(r * a, r.clamp(1.0 - eps, 1.0 + eps) * a)
    s = torch.where(a < 0, torch.maximum(s, dual * a), s)
    return -torch.where(mask, s, 0.0).sum() / mask.sum().clamp(min=1)
