"""Generalised Jensen-Shannon divergence of two log-probability tables: both gradients from one mixture per element.

With m = beta p + (1 - beta) q,    L = sum of beta p log(p / m) + (1 - beta) q log(q / m)    per row.
What m contributes cancels: dL/dlog p = beta p log(p / m) and dL/dlog q = (1 - beta) q log(q / m). The backward is
therefore elementwise, with a grid over rows and column tiles, and forms the logarithm of m again rather than keep it.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "js_divergence_beta",
    "family": "loss_other",
    "op": "js_divergence",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "one-launch"),
    "saves": (),
    "grads": ("log_p", "log_q"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _log_ratios(lp, lq, beta):
    """log p - log m and log q - log m of a tile, by their difference alone: exact zeros where p equals q."""
    absent = (lp == -float("inf")) & (lq == -float("inf"))
    d = tl.where(absent, 0.0, lq - lp)
    falls = d > 0.0
    # The larger of the two is taken out of m, so that the exponent never is positive.
    e = tl.exp(tl.where(falls, -d, d))
    log_rest = tl.log(tl.where(falls, (1.0 - beta) + beta * e, beta + (1.0 - beta) * e))
    p_ratio = tl.where(lp == -float("inf"), 0.0, tl.where(falls, -d, 0.0) - log_rest)
    q_ratio = tl.where(lq == -float("inf"), 0.0, tl.where(falls, 0.0, d) - log_rest)
    return p_ratio, q_ratio


@triton.jit
def _jsd_fwd(LogP, LogQ, Loss, V, beta, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        lp = tl.load(LogP + row * V + c, mask=c < V, other=0.0).to(tl.float32)
        lq = tl.load(LogQ + row * V + c, mask=c < V, other=0.0).to(tl.float32)
        p_ratio, q_ratio = _log_ratios(lp, lq, beta)
        term = beta * tl.exp(lp) * p_ratio + (1.0 - beta) * tl.exp(lq) * q_ratio
        total += tl.where(c < V, term, 0.0)
    tl.store(Loss + row, tl.sum(total, 0))


def forward(log_p, log_q, beta=0.5):
    if not 0.0 < beta < 1.0:
        raise ValueError("beta must lie strictly between 0 and 1: at the ends the divergence is zero")
    log_p, log_q = log_p.contiguous(), log_q.contiguous()
    M, V = log_p.shape
    loss = torch.empty(M, device=log_p.device, dtype=torch.float32)
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    _jsd_fwd[(M,)](log_p, log_q, loss, V, beta, BLOCK=BLOCK, num_warps=4)
    return loss, (log_p, log_q, beta)


# --- backward ---
@triton.jit
def _log2_ratios(lp, lq, beta):
    """Both ratios to base two, from base-two logarithms: their exponential and logarithm are single instructions."""
    absent = (lp == -float("inf")) & (lq == -float("inf"))
    d = tl.where(absent, 0.0, lq - lp)
    falls = d > 0.0
    e = tl.exp2(-tl.abs(d))
    # One product and one sum serve both cases: the smaller of the two is what is scaled by e.
    small = tl.where(falls, beta, 1.0 - beta)
    log_rest = libdevice.fast_log2f((1.0 - small) + small * e)
    p_ratio = tl.where(lp == -float("inf"), 0.0, -tl.maximum(d, 0.0) - log_rest)
    q_ratio = tl.where(lq == -float("inf"), 0.0, tl.minimum(d, 0.0) - log_rest)
    return p_ratio, q_ratio


@triton.jit
def _jsd_bwd(
    DLoss, LogP, LogQ, DLogP, DLogQ, V, stride_g, beta,
    NEED_P: tl.constexpr, NEED_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(DLoss + row * stride_g) * 0.6931471805599453
    lp = tl.load(LogP + row * V + c, mask=c < V, other=0.0).to(tl.float32) * 1.4426950408889634
    lq = tl.load(LogQ + row * V + c, mask=c < V, other=0.0).to(tl.float32) * 1.4426950408889634
    p_ratio, q_ratio = _log2_ratios(lp, lq, beta)
    if NEED_P:
        tl.store(DLogP + row * V + c, g * beta * tl.exp2(lp) * p_ratio, mask=c < V)
    if NEED_Q:
        tl.store(DLogQ + row * V + c, g * (1.0 - beta) * tl.exp2(lq) * q_ratio, mask=c < V)


def backward(saved, grad_loss, needs=(True, True)):
    log_p, log_q, beta = saved
    M, V = log_p.shape
    dp = torch.empty_like(log_p) if needs[0] else None
    dq = torch.empty_like(log_q) if needs[1] else None
    BLOCK = max(64, min(1024, triton.next_power_of_2(V)))
    _jsd_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_loss, log_p, log_q, dp, dq, V, grad_loss.stride(0), beta,
        NEED_P=needs[0], NEED_Q=needs[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dp, dq


# --- check ---
SWEEP = (
    {"M": 6, "V": 128, "beta": 0.5},
    {"M": 9, "V": 201, "beta": 0.1},
    {"M": 4, "V": 96, "beta": 0.8, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "V": 32000, "beta": 0.5, "dtype": "bfloat16"},)


def make_args(M, V, beta, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logs = (torch.log_softmax(2 * torch.randn(M, V, generator=g), -1) for _ in range(2))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in logs), beta)


def reference(log_p, log_q, beta=0.5):
    lp, lq = log_p.float(), log_q.float()
    log_m = torch.logaddexp(lp + math.log(beta), lq + math.log1p(-beta))
    return (beta * lp.exp() * (lp - log_m) + (1.0 - beta) * lq.exp() * (lq - log_m)).sum(-1)
