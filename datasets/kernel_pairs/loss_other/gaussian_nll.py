"""Gaussian negative log-likelihood with a predicted variance: two gradients, and a clamp that cuts one of them off.

With v = max(var, eps), d = mean - target:    L = mean of (log v + d^2 / v) / 2,
dmean = d / v,    dvar = (1 - d^2 / v) / (2 v) where var > eps and 0 below,    each times g / count.
A variance under the clamp no longer moves the loss, so it gets no gradient; its mean is still pulled, by d / eps.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gaussian_nll",
    "family": "loss_other",
    "op": "gaussian_nll_loss",
    "schema": 1,
    "techniques": ("elementwise", "broadcast-adjoint", "recompute", "partial-gradient", "one-launch"),
    "saves": (),
    "grads": ("mean", "var"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gaussian_terms(Mean, Var, Target, Parts, numel, eps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < numel
        d = tl.load(Mean + at, mask=live, other=0.0).to(tl.float32)
        d -= tl.load(Target + at, mask=live, other=0.0).to(tl.float32)
        # Lanes past the end have d = 0 and v = 1, whose term is zero.
        var = tl.load(Var + at, mask=live, other=1.0).to(tl.float32)
        v = tl.where(var > eps, var, eps)
        total += tl.where(live, 0.5 * (tl.log(v) + d * d / v), 0.0)
    tl.store(Parts + program, tl.sum(total, 0))


@triton.jit
def _gaussian_mean(Parts, Loss, programs, numel, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(Loss, tl.sum(tl.load(Parts + lane, mask=lane < programs, other=0.0), 0) / numel)


def forward(mean, var, target, eps=1e-6):
    mean, var, target = mean.contiguous(), var.contiguous(), target.contiguous()
    numel = mean.numel()
    programs = min(triton.cdiv(numel, 1024), 1024)
    parts = torch.empty(programs, device=mean.device, dtype=torch.float32)
    loss = torch.empty((), device=mean.device, dtype=torch.float32)
    _gaussian_terms[(programs,)](mean, var, target, parts, numel, eps, BLOCK=1024, num_warps=4)
    _gaussian_mean[(1,)](parts, loss, programs, float(numel), BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, (mean, var, target, eps)


# --- backward ---
@triton.jit
def _gaussian_bwd(
    DLoss, Mean, Var, Target, DMean, DVar, numel, count, eps,
    NEED_MEAN: tl.constexpr, NEED_VAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < numel
    g = tl.load(DLoss) / count
    d = tl.load(Mean + at, mask=live, other=0.0).to(tl.float32)
    d -= tl.load(Target + at, mask=live, other=0.0).to(tl.float32)
    var = tl.load(Var + at, mask=live, other=1.0).to(tl.float32)
    # One division serves both gradients.
    precision = 1.0 / tl.where(var > eps, var, eps)
    if NEED_MEAN:
        tl.store(DMean + at, g * d * precision, mask=live)
    if NEED_VAR:
        dvar = 0.5 * g * precision * (1.0 - d * d * precision)
        tl.store(DVar + at, tl.where(var > eps, dvar, 0.0), mask=live)


def backward(saved, grad_loss, needs=(True, True)):
    mean, var, target, eps = saved
    numel = mean.numel()
    dmean = torch.empty_like(mean) if needs[0] else None
    dvar = torch.empty_like(var) if needs[1] else None
    _gaussian_bwd[(triton.cdiv(numel, 2048),)](
        grad_loss, mean, var, target, dmean, dvar, numel, float(numel), eps,
        NEED_MEAN=needs[0], NEED_VAR=needs[1], BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return dmean, dvar


# --- check ---
SWEEP = (
    {"M": 8, "N": 512},
    {"M": 37, "N": 75},
    {"M": 12, "N": 130, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(M, N, generator=g), torch.randn(M, N, generator=g)
    # A tenth of the variances lies below the clamp.
    var = torch.rand(M, N, generator=g) * 1.5 + 0.15
    var[:, ::10] = 0.05
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (mean, var, target)), 0.1)


def reference(mean, var, target, eps=1e-6):
    v = var.float().clamp(min=eps)
    return (0.5 * (v.log() + (mean.float() - target.float()).square() / v)).mean()
