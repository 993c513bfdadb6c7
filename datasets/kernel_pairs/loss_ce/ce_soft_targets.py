"""Cross-entropy against target probabilities: the target's gradient is -log p, formed only if somebody wants it.

L = -sum of q (x - lse),    dx = g (p sum(q) - q),    dq = -g (x - lse).
Targets need not sum to one (mixing and masking break that), so their row sum is saved beside the log-sum-exp. Frozen
targets, the common case, cost no store; wanted ones ride on the same pass over the logits.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_soft_targets",
    "family": "loss_ce",
    "op": "soft_target_cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "saved-statistics", "one-launch", "recompute", "strided-cotangent"),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("logits", "target"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _soft_ce_fwd(Logits, Target, Loss, Stats, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = -float("inf")
    norm = 0.0
    mass = tl.zeros((BLOCK,), tl.float32)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        live = lane < V - start
        x = tl.load(Logits + row * V + start + lane, mask=live, other=0.0).to(tl.float32)
        q = tl.load(Target + row * V + start + lane, mask=live, other=0.0).to(tl.float32)
        mass += q
        cross += q * x
        x = tl.where(live, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(norm)
    total = tl.sum(mass, 0)
    tl.store(Loss + row, lse * total - tl.sum(cross, 0))
    tl.store(Stats + 2 * row, lse)
    tl.store(Stats + 2 * row + 1, total)


def forward(logits, target):
    logits, target = logits.contiguous(), target.contiguous()
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    stats = torch.empty(M, 2, device=logits.device, dtype=torch.float32)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _soft_ce_fwd[(M,)](logits, target, loss, stats, V, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)))
    return loss, (logits, target, stats)


# --- backward ---
@triton.jit
def _soft_ce_bwd(
    DLoss, Logits, Target, Stats, DLogits, DTarget, V, stride_g,
    NEED_X: tl.constexpr, NEED_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * V + v
    g = tl.load(DLoss + row * stride_g)
    log_p = tl.load(Logits + at, mask=v < V, other=0.0).to(tl.float32) - tl.load(Stats + 2 * row)
    if NEED_X:
        q = tl.load(Target + at, mask=v < V, other=0.0).to(tl.float32)
        tl.store(DLogits + at, g * (tl.exp(log_p) * tl.load(Stats + 2 * row + 1) - q), mask=v < V)
    if NEED_Q:
        tl.store(DTarget + at, -g * log_p, mask=v < V)


def backward(saved, grad_loss, needs=(True, True)):
    logits, target, stats = saved
    M, V = logits.shape
    dx = torch.empty_like(logits) if needs[0] else None
    dq = torch.empty_like(target) if needs[1] else None
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    _soft_ce_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_loss, logits, target, stats, dx, dq, V, grad_loss.stride(0),
        NEED_X=needs[0], NEED_Q=needs[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dx, dq


# --- check ---
SWEEP = (
    {"M": 6, "V": 128},
    {"M": 9, "V": 217},
    {"M": 4, "V": 96, "dtype": "bfloat16"},
    {"M": 5, "V": 70, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 32000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(M, V, generator=g)
    # Rows with sums below one.
    target = torch.softmax(torch.randn(M, V, generator=g), -1) * (0.5 + 0.5 * torch.rand(M, 1, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (logits, target))


def reference(logits, target):
    return -(target.float() * torch.log_softmax(logits.float(), -1)).sum(-1)
