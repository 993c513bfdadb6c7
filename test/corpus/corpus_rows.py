"""Row reductions: softmax and its kin, norms by one pass, two passes and Welford."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _softmax(X, Y, stride, n_rows, N, BLOCK: tl.constexpr):
    # persistent: each program takes every num_programs-th row
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=2):
        c = tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + c, mask=c < N, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(Y + row * N + c, e / tl.sum(e, axis=0), mask=c < N)


def softmax(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _softmax[(3,)](x, y, x.stride(0), *x.shape, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def _log_softmax(X, Y, N, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")
    total = 0.0
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + c, mask=c < N, other=-float("inf")) / temperature
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    lse = top + tl.log(total)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + c, mask=c < N, other=0.0) / temperature
        tl.store(Y + row * N + c, x - lse, mask=c < N)


def log_softmax(x: Tensor, temperature: float) -> Tensor:
    y = torch.empty_like(x)
    _log_softmax[(x.shape[0],)](x, y, x.shape[1], temperature, BLOCK=16)
    return y


@triton.jit
def _logsumexp_parts(X, TOP, TOTAL, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=-float("inf"))
    top = tl.max(x, 0)
    tl.store(TOP + row * PARTS + part, top)
    tl.store(TOTAL + row * PARTS + part, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _merge_parts(TOP, TOTAL, OUT, PARTS: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    top = tl.load(TOP + row * PARTS + p)
    highest = tl.max(top, 0)
    tl.store(OUT + row, highest + tl.log(tl.sum(tl.load(TOTAL + row * PARTS + p) * tl.exp(top - highest), 0)))


def logsumexp_in_two_launches(x: Tensor) -> Tensor:
    top, total = (torch.empty((x.shape[0], 4), device=x.device) for _ in range(2))
    out = torch.empty(x.shape[0], device=x.device)
    _logsumexp_parts[(x.shape[0], 4)](x, top, total, x.shape[1], PARTS=4, BLOCK=16)
    _merge_parts[(x.shape[0],)](top, total, out, PARTS=4)
    return out


@triton.jit
def _layernorm_one_pass(X, W, B, Y, MEAN, RSTD, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < N
    x = tl.load(X + row * N + c, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    var = tl.sum(x * x, 0) / N - mean * mean
    rstd = tl.rsqrt(var + eps)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
    y = (x - mean) * rstd * tl.load(W + c, mask=mask, other=1.0) + tl.load(B + c, mask=mask, other=0.0)
    tl.store(Y + row * N + c, y, mask=mask)


def layernorm_one_pass(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(x.shape[1])
    _layernorm_one_pass[(x.shape[0],)](x, w, b, y, mean, rstd, x.shape[1], 1e-5, BLOCK=block)
    return y, mean, rstd


def _layernorm_reference(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rstd = (x.var(-1, unbiased=False) + 1e-5).rsqrt()
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5), x.mean(-1), rstd


@triton.jit
def _merge_moments(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    share = tl.where(count == 0.0, 0.0, count_b / count)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def _layernorm_welford(X, Y, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    mean = tl.zeros((BLOCK,), tl.float32)
    m2 = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + c, mask=c < N, other=0.0)
        new_count = tl.where(c < N, count + 1.0, count)
        delta = x - mean
        new_mean = tl.where(c < N, mean + delta / new_count, mean)
        m2 = tl.where(c < N, m2 + delta * (x - new_mean), m2)
        mean = new_mean
        count = new_count
    mean, m2, count = tl.reduce((mean, m2, count), 0, _merge_moments)
    rstd = 1.0 / tl.sqrt(m2 / count + eps)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + c, mask=c < N, other=0.0)
        tl.store(Y + row * N + c, (x - mean) * rstd, mask=c < N)


def layernorm_welford(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _layernorm_welford[(x.shape[0],)](x, y, x.shape[1], 1e-6, BLOCK=16)
    return y


@triton.jit
def _add_rmsnorm(X, R, W, Y, S, N, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row * N
    R += row * N
    Y += row * N
    S += row * N
    c = tl.arange(0, BLOCK)
    mask = c < N
    s = tl.load(X + c, mask=mask, other=0).to(tl.float32) + tl.load(R + c, mask=mask, other=0).to(tl.float32)
    tl.store(S + c, s, mask=mask)
    rstd = 1 / tl.sqrt_rn(tl.sum(s * s, 0) / N + eps)
    w = tl.load(W + c, mask=mask, other=0).to(tl.float32)
    tl.store(Y + c, s * rstd * (offset + w), mask=mask)


def add_rmsnorm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, s = torch.empty_like(x), torch.empty_like(x)
    _add_rmsnorm[(x.shape[0],)](x, residual, w, y, s, x.shape[1], 1e-6, 1.0, BLOCK=64)
    return y, s


def _add_rmsnorm_reference(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return s * (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w), s


@triton.jit
def _groupnorm(X, W, B, Y, C, HW, eps, GROUP: tl.constexpr, BG: tl.constexpr, BHW: tl.constexpr):
    sample, group = tl.program_id(0), tl.program_id(1)
    c = group * GROUP + tl.arange(0, BG)
    p = tl.arange(0, BHW)
    mask = (tl.arange(0, BG) < GROUP)[:, None] & (p < HW)[None, :]
    at = (sample * C + c)[:, None] * HW + p[None, :]
    x = tl.load(X + at, mask=mask, other=0.0)
    size = GROUP * HW
    mean = tl.sum(x) / size
    d = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(d * d, axis=1, keep_dims=True)) / size + eps)
    inside = tl.arange(0, BG) < GROUP
    w = tl.load(W + c, mask=inside, other=0.0)
    b = tl.load(B + c, mask=inside, other=0.0)
    tl.store(Y + at, d * rstd * w[:, None] + b[:, None], mask=mask)


def groupnorm(x: Tensor, w: Tensor, b: Tensor, groups: int) -> Tensor:
    B, C, H, W = x.shape
    y = torch.empty_like(x)
    _groupnorm[(B, groups)](x, w, b, y, C, H * W, 1e-5, GROUP=C // groups, BG=4, BHW=32)
    return y


@triton.jit
def _instancenorm(X, Y, HW, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * HW
    mean = 0.0
    for start in range(0, HW, BLOCK):
        p = start + tl.arange(0, BLOCK)
        mean += tl.sum(tl.load(X + at + p, mask=p < HW, other=0.0), 0)
    mean /= HW
    var = 0.0
    for start in range(0, HW, BLOCK):
        p = start + tl.arange(0, BLOCK)
        d = tl.where(p < HW, tl.load(X + at + p, mask=p < HW, other=0.0) - mean, 0.0)
        var += tl.sum(d * d, 0)
    rstd = 1 / tl.sqrt(var / HW + eps)
    for start in range(0, HW, BLOCK):
        p = start + tl.arange(0, BLOCK)
        x = tl.load(X + at + p, mask=p < HW, other=0.0)
        tl.store(Y + at + p, (x - mean) * rstd, mask=p < HW)


def instancenorm(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    size = x.shape[2] * x.shape[3]
    _instancenorm[(x.shape[0] * x.shape[1],)](x, y, size, 1e-5, BLOCK=8)
    return y


@triton.jit
def _normalize(X, Y, NORM, N, floor, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(x * x, 0)), floor)
    tl.store(NORM + row, norm)
    tl.store(Y + row * N + c, x / norm, mask=c < N)


def l2_normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    y, norm = torch.empty_like(x), torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _normalize[(x.shape[0],)](x, y, norm, x.shape[1], 0.5, BLOCK=32)
    return y, norm


def _l2_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = x.norm(dim=-1).clamp(min=0.5)
    return x / norm[:, None], norm


CASES = [
    *in_dtypes(Case("softmax_persistent", softmax, lambda: (torch.randn(8, 29),), lambda x: x.softmax(-1)), BF16, HALF),
    Case(
        "log_softmax_online",
        log_softmax,
        lambda: (torch.randn(4, 53) * 5, 0.7),
        lambda x, temperature: (x / temperature).log_softmax(-1),
    ),
    Case(
        "logsumexp_two_launches",
        logsumexp_in_two_launches,
        lambda: (torch.randn(5, 51) * 20,),
        lambda x: x.logsumexp(-1),
    ),
    *in_dtypes(
        Case(
            "layernorm_one_pass",
            layernorm_one_pass,
            lambda: (torch.randn(6, 45), torch.randn(45), torch.randn(45)),
            _layernorm_reference,
        ),
        BF16,
    ),
    Case(
        "layernorm_welford",
        layernorm_welford,
        lambda: (torch.randn(4, 41) + 3,),
        lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6),
    ),
    *in_dtypes(
        Case(
            "add_rmsnorm",
            add_rmsnorm,
            lambda: (torch.randn(5, 50), torch.randn(5, 50), torch.randn(50)),
            _add_rmsnorm_reference,
        ),
        HALF,
    ),
    Case(
        "groupnorm",
        groupnorm,
        lambda: (torch.randn(2, 6, 5, 5), torch.randn(6), torch.randn(6), 2),
        lambda x, w, b, groups: F.group_norm(x, groups, w, b),
    ),
    Case("instancenorm_three_loops", instancenorm, lambda: (torch.randn(2, 3, 3, 7),), F.instance_norm),
    Case("l2_normalize", l2_normalize, lambda: (torch.randn(6, 30) * torch.rand(6, 1) * 0.3,), _l2_reference),
]
