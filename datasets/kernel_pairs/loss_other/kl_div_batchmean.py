"""Kullback-Leibler divergence, batch mean, linear or logarithmic targets: one scalar cotangent, two local gradients."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "kl_div_batchmean",
    "family": "loss_other",
    "op": "kl_div",
    "schema": 1,
    "techniques": ("elementwise", "one-launch", "broadcast-adjoint"),
    "saves": (),
    "grads": ("log_input", "target"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _kl_fwd(LogQ, Target, Parts, numel, LOG_TARGET: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < numel
    q = tl.load(LogQ + i, mask=live, other=0.0).to(tl.float32)
    t = tl.load(Target + i, mask=live, other=0.0).to(tl.float32)
    if LOG_TARGET:
        term = tl.where(live, tl.exp(t) * (t - q), 0.0)
    else:
        # 0 * log(0) is 0 by continuity.
        positive = t > 0.0
        term = tl.where(positive, t * (tl.log(tl.where(positive, t, 1.0)) - q), 0.0)
    tl.store(Parts + pid, tl.sum(term, 0))


@triton.jit
def _kl_finish(Parts, Loss, count, batch, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(Parts + i, mask=i < count, other=0.0)
    tl.store(Loss, tl.sum(total, 0) / batch)


def forward(log_input, target, log_target=False):
    log_input, target = log_input.contiguous(), target.contiguous()
    numel = log_input.numel()
    count = triton.cdiv(numel, 2048)
    parts = torch.empty(count, device=log_input.device, dtype=torch.float32)
    loss = torch.empty((), device=log_input.device, dtype=torch.float32)
    _kl_fwd[(count,)](log_input, target, parts, numel, LOG_TARGET=log_target, BLOCK=2048)
    _kl_finish[(1,)](parts, loss, count, log_input.shape[0], BLOCK=min(1024, triton.next_power_of_2(count)))
    return loss, (log_input, target, log_target)


# --- backward ---
@triton.jit
def _kl_bwd(
    DLoss, LogQ, Target, DLogQ, DTarget, numel, batch,
    LOG_TARGET: tl.constexpr, NEED_Q: tl.constexpr, NEED_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < numel
    g = tl.load(DLoss) / batch
    t = tl.load(Target + i, mask=live, other=0.0).to(tl.float32)
    p = t
    if LOG_TARGET:
        p = tl.exp(t)
    if NEED_Q:
        tl.store(DLogQ + i, -g * p, mask=live)
    if NEED_T:
        q = tl.load(LogQ + i, mask=live, other=0.0).to(tl.float32)
        if LOG_TARGET:
            dt = g * p * (t - q + 1.0)
        else:
            positive = t > 0.0
            dt = tl.where(positive, g * (tl.log(tl.where(positive, t, 1.0)) - q + 1.0), 0.0)
        tl.store(DTarget + i, dt, mask=live)


def backward(saved, grad_loss, needs=(True, True)):
    log_input, target, log_target = saved
    dq = torch.empty_like(log_input) if needs[0] else None
    dt = torch.empty_like(target) if needs[1] else None
    _kl_bwd[(triton.cdiv(log_input.numel(), 1024),)](
        grad_loss, log_input, target, dq, dt, log_input.numel(), log_input.shape[0],
        LOG_TARGET=log_target, NEED_Q=needs[0], NEED_T=needs[1], BLOCK=1024,
    )  # fmt: skip
    return dq, dt


# --- check ---
SWEEP = (
    {"M": 8, "N": 300, "log_target": False},
    {"M": 13, "N": 101, "log_target": True},
    {"M": 4, "N": 128, "log_target": False, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 32000, "log_target": False, "dtype": "float32"},)


def make_args(M, N, log_target, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, t = (torch.log_softmax(torch.randn(M, N, generator=g), -1) for _ in range(2))
    dt = getattr(torch, dtype)
    return q.to(device, dt), (t if log_target else t.exp()).to(device, dt), log_target


def reference(log_input, target, log_target=False):
    q, t = log_input.float(), target.float()
    return torch.nn.functional.kl_div(q, t, reduction="batchmean", log_target=log_target)
