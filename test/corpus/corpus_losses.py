"""Losses: pointwise, over distributions, by dynamic programming, and fused with the last linear layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _huber(X, Y, OUT, n, delta, REDUCE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(X + o, mask=o < n, other=0.0) - tl.load(Y + o, mask=o < n, other=0.0)
    size = tl.abs(d)
    loss = tl.where(size < delta, 0.5 * d * d, delta * (size - 0.5 * delta))
    if REDUCE:
        tl.atomic_add(OUT, tl.sum(loss, 0) / n)
    else:
        tl.store(OUT + o, loss, mask=o < n)


def huber(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    each, mean = torch.empty_like(x), torch.zeros((), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(x.numel(), 16),)
    _huber[grid](x, y, each, x.numel(), 0.7, REDUCE=False, BLOCK=16)
    _huber[grid](x, y, mean, x.numel(), 0.7, REDUCE=True, BLOCK=16)
    return each, mean


@triton.jit
def _kl_jsd(P, Q, KL, JSD, N, beta, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    kl = 0.0
    jsd = 0.0
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        log_p = tl.load(P + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        log_q = tl.load(Q + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        p, q = tl.exp(log_p), tl.exp(log_q)
        middle = beta * p + (1 - beta) * q
        log_m = tl.log(middle)
        kl += tl.sum(tl.where(c < N, p * (log_p - log_q), 0.0), 0)
        jsd += tl.sum(tl.where(c < N, beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m), 0.0), 0)
    tl.store(KL + row, kl)
    tl.store(JSD + row, jsd)


def kl_and_jsd(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    kl, jsd = (torch.empty(log_p.shape[0], dtype=torch.float32, device=log_p.device) for _ in range(2))
    _kl_jsd[(log_p.shape[0],)](log_p, log_q, kl, jsd, log_p.shape[1], 0.3, BLOCK=16)
    return kl, jsd


def _kl_jsd_reference(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    log_m = (0.3 * p + 0.7 * q).log()
    jsd = 0.3 * p * (log_p - log_m) + 0.7 * q * (log_q - log_m)
    return (p * (log_p - log_q)).sum(1), jsd.sum(1)


@triton.jit
def _focal(X, TARGET, LOSS, n, alpha, gamma, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0).to(tl.float32)
    positive = tl.load(TARGET + o, mask=o < n, other=0) != 0
    signed = tl.where(positive, x, -x)
    # log sigmoid without overflow
    log_p = tl.minimum(signed, 0.0) - libdevice.log1p(tl.exp(-tl.abs(signed)))
    weight = tl.where(positive, alpha, 1 - alpha) * libdevice.pow(1.0 - tl.exp(log_p), gamma)
    tl.store(LOSS + o, -weight * log_p, mask=o < n)


def focal(x: Tensor, target: Tensor) -> Tensor:
    loss = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _focal[(triton.cdiv(x.numel(), 32),)](x, target, loss, x.numel(), 0.25, 2.5, BLOCK=32)
    return loss


def _focal_reference(x: Tensor, target: Tensor) -> Tensor:
    log_p = F.logsigmoid(torch.where(target, x, -x))
    return -torch.where(target, 0.25, 0.75) * (1 - log_p.exp()) ** 2.5 * log_p


@triton.jit
def _log_add3(a, b, c):
    top = tl.maximum(tl.maximum(a, b), c)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(a - safe) + tl.exp(b - safe) + tl.exp(c - safe)
    return tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _ctc(LOGP, LABELS, ALPHA, LOSS, T, C, L, BLOCK: tl.constexpr):
    # states: blank, label, blank, label, ..., blank
    batch = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    states = 2 * L + 1
    live = s < states
    label = tl.load(LABELS + batch * L + s // 2, mask=live & (s % 2 == 1), other=0)
    before = tl.load(LABELS + batch * L + s // 2 - 1, mask=live & (s % 2 == 1) & (s > 1), other=0)
    skips = (s % 2 == 1) & (s > 1) & (label != before)
    alpha = ALPHA + batch * T * BLOCK
    first = tl.load(LOGP + batch * T * C + label, mask=live, other=float("-inf"))
    tl.store(alpha + s, tl.where(s < 2, first, float("-inf")))
    for t in range(1, T):
        tl.debug_barrier()
        row = alpha + (t - 1) * BLOCK
        stay = tl.load(row + s)
        step = tl.load(row + s - 1, mask=s >= 1, other=float("-inf"))
        skip = tl.load(row + s - 2, mask=skips, other=float("-inf"))
        emit = tl.load(LOGP + (batch * T + t) * C + label, mask=live, other=float("-inf"))
        tl.store(alpha + t * BLOCK + s, tl.where(live, _log_add3(stay, step, skip) + emit, float("-inf")))
    tl.debug_barrier()
    last = alpha + (T - 1) * BLOCK + states
    a, b = tl.load(last - 1), tl.load(last - 2)
    tl.store(LOSS + batch, -(tl.maximum(a, b) + libdevice.log1p(tl.exp(-tl.abs(a - b)))))


def ctc(logits: Tensor, labels: Tensor) -> Tensor:
    """The forward variables of one sequence pass through memory, a row per step."""
    B, T, C = logits.shape
    log_probabilities = logits.log_softmax(-1)  # torch's own gradient is right only together with this
    alpha = torch.empty((B, T, 16), dtype=torch.float32, device=labels.device)
    loss = torch.empty(B, dtype=torch.float32, device=labels.device)
    _ctc[(B,)](log_probabilities, labels, alpha, loss, T, C, labels.shape[1], BLOCK=16)
    return loss


def _ctc_reference(logits: Tensor, labels: Tensor) -> Tensor:
    B, T, _ = logits.shape
    lengths = torch.full((B,), T), torch.full((B,), labels.shape[1])
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, *lengths, blank=0, reduction="none")


@triton.jit
def _linear_cross_entropy(X, W, TARGET, LSE, PICKED, N, D, V, BN: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    # logits are never stored: one tile of them at a time
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    target = tl.load(TARGET + n, mask=n < N, other=-1)
    top = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    picked = tl.zeros((BN,), tl.float32)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        logits = tl.zeros((BN, BV), tl.float32)
        for inner in range(0, D, BD):
            d = inner + tl.arange(0, BD)
            x = tl.load(X + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
            w = tl.load(W + v[None, :] * D + d[:, None], mask=(v < V)[None, :] & (d < D)[:, None], other=0.0)
            logits = tl.dot(x, w, logits)
        picked += tl.sum(tl.where(v[None, :] == target[:, None], logits, 0.0), 1)
        logits = tl.where((v < V)[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(logits - new_top[:, None]), 1)
        top = new_top
    tl.store(LSE + n, top + tl.log(total), mask=n < N)
    tl.store(PICKED + n, picked, mask=n < N)


def linear_cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    rows, D = x.shape
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    chunk = 16
    for start in range(0, rows, chunk):
        part = x[start : start + chunk]
        n = part.shape[0]
        lse, picked = (torch.empty(n, dtype=torch.float32, device=x.device) for _ in range(2))
        grid = (triton.cdiv(n, 16),)
        _linear_cross_entropy[grid](
            part, w, target[start : start + chunk], lse, picked, n, D, w.shape[0], BN=16, BV=16, BD=16
        )
        loss += (lse - picked).sum()
    return loss / rows


@triton.jit
def _contrastive(A, B, LOSS, N, D, scale, BD: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0)
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    a = tl.load(A + row * D + d, mask=d < D, other=0.0)
    b = tl.load(B + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
    a = a * tl.rsqrt(tl.sum(a * a, 0))
    norms = tl.where(n < N, tl.sum(b * b, 1), 1.0)
    cosine = tl.sum(b * a[None, :], 1) * tl.rsqrt(norms) * scale
    logits = tl.where(n < N, cosine, float("-inf"))
    top = tl.max(logits, 0)
    lse = top + tl.log(tl.sum(tl.exp(logits - top), 0))
    tl.store(LOSS + row, lse - tl.sum(tl.where(n == row, cosine, 0.0), 0))


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    loss = torch.empty(a.shape[0], device=a.device)
    _contrastive[(a.shape[0],)](a, b, loss, *a.shape, 5.0, BD=16, BN=8)
    return loss.mean()


def _contrastive_reference(a: Tensor, b: Tensor) -> Tensor:
    logits = 5 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).t()
    return F.cross_entropy(logits, torch.arange(a.shape[0]))


@triton.jit
def _gaussian_nll(X, MEAN, LOG_VAR, OUT, N, half_log_2pi, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    live = c < N
    at = row * N + c
    log_var = tl.clamp(tl.load(LOG_VAR + at, mask=live, other=0.0), -4.0, 4.0)
    d = tl.load(X + at, mask=live, other=0.0) - tl.load(MEAN + at, mask=live, other=0.0)
    nll = 0.5 * (log_var + d * d * tl.exp(-log_var)) + half_log_2pi
    tl.store(OUT + row, tl.sum(tl.where(live, nll, 0.0), 0))


def gaussian_nll(x: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _gaussian_nll[(x.shape[0],)](x, mean, log_var, out, x.shape[1], 0.5 * math.log(2 * math.pi), BLOCK=16)
    return out


def _gaussian_reference(x: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    log_var = log_var.clamp(-4, 4)
    return (0.5 * (log_var + (x - mean) ** 2 * (-log_var).exp() + math.log(2 * math.pi))).sum(1)


def _log_probabilities() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 37).log_softmax(1), torch.randn(4, 37).log_softmax(1)


CASES = [
    *in_dtypes(
        Case(
            "huber",
            huber,
            lambda: (torch.randn(37), torch.randn(37)),
            lambda x, y: (F.huber_loss(x, y, reduction="none", delta=0.7), F.huber_loss(x, y, delta=0.7)),
        ),
        HALF,
    ),
    *in_dtypes(Case("kl_and_jsd", kl_and_jsd, _log_probabilities, _kl_jsd_reference), BF16),
    *in_dtypes(
        Case("focal", focal, lambda: (torch.randn(41) * 4, torch.rand(41) < 0.3), _focal_reference),
        HALF,
    ),
    Case(
        "ctc_forward_variables",
        ctc,
        lambda: (torch.randn(2, 9, 6), torch.tensor([[1, 3, 3], [5, 2, 4]])),
        _ctc_reference,
    ),
    *in_dtypes(
        Case(
            "linear_cross_entropy_chunks",
            linear_cross_entropy,
            lambda: (torch.randn(23, 20), torch.randn(37, 20), torch.randint(0, 37, (23,))),
            lambda x, w, target: F.cross_entropy(x @ w.t(), target),
        ),
        BF16,
    ),
    Case("contrastive", contrastive, lambda: (torch.randn(6, 12), torch.randn(6, 12)), _contrastive_reference),
    Case(
        "gaussian_nll_clamped",
        gaussian_nll,
        lambda: (torch.randn(4, 13), torch.randn(4, 13), torch.randn(4, 13) * 3),
        _gaussian_reference,
    ),
]
