"""Prefix sums, linear recurrences and other scans, forwards and in reverse, in one tile and across tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _cumsum(X, FORWARD, REVERSE, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    tl.store(FORWARD + row * N + c, tl.cumsum(x, 0), mask=c < N)
    tl.store(REVERSE + row * N + c, tl.cumsum(x * x, 0, reverse=True), mask=c < N)


def cumsum(x: Tensor) -> tuple[Tensor, Tensor]:
    forward, reverse = torch.empty_like(x), torch.empty_like(x)
    _cumsum[(x.shape[0],)](x, forward, reverse, x.shape[1], BLOCK=32)
    return forward, reverse


@triton.jit
def _cumsum_tiles(X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    carry = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        live = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
        tl.store(Y + m[:, None] * N + n[None, :], carry[None, :] + tl.cumsum(x, axis=0), mask=live)
        carry += tl.sum(x, axis=0)


def cumsum_tiles(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _cumsum_tiles[(triton.cdiv(x.shape[1], 8),)](x, y, *x.shape, BM=8, BN=8)
    return y


@triton.jit
def _then(a_first, b_first, a_second, b_second):
    return a_first * a_second, a_second * b_first + b_second


@triton.jit
def _recurrence(A, X, H, T, C, BT: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr):
    t = tl.arange(0, BT)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    live = (t[:, None] < T) & (c[None, :] < C)
    at = t[:, None] * C + c[None, :]
    a = tl.load(A + at, mask=live, other=1.0)
    x = tl.load(X + at, mask=live, other=0.0)
    _, h = tl.associative_scan((a, x), 0, _then, reverse=REVERSE)
    tl.store(H + at, h, mask=live)


def recurrence(a: Tensor, x: Tensor, reverse: bool) -> Tensor:
    h = torch.empty_like(x)
    _recurrence[(triton.cdiv(x.shape[1], 4),)](a, x, h, *x.shape, BT=32, BC=4, REVERSE=reverse)
    return h


def recurrence_reference(a: Tensor, x: Tensor, reverse: bool = False) -> Tensor:
    if reverse:
        return recurrence_reference(a.flip(0), x.flip(0)).flip(0)
    h, steps = torch.zeros_like(x[0]), []
    for k in range(x.shape[0]):
        h = a[k] * h + x[k]
        steps.append(h)
    return torch.stack(steps)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _selective(X, DT, A, B, C, D, Z, Y, T, E, BIAS, S: tl.constexpr, BE: tl.constexpr):
    batch = tl.program_id(1)
    e, s = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, S)
    live = e < E
    a = -tl.exp(tl.load(A + e[:, None] * S + s[None, :], mask=live[:, None], other=0.0).to(tl.float32))
    skip = tl.load(D + e, mask=live, other=0.0)
    bias = tl.load(BIAS + e, mask=live, other=0.0)
    h = tl.zeros((BE, S), tl.float32)
    for t in range(T):
        at = (batch * T + t) * E + e
        x = tl.load(X + at, mask=live, other=0.0)
        dt = _softplus(tl.load(DT + at, mask=live, other=0.0).to(tl.float32) + bias)
        b = tl.load(B + (batch * T + t) * S + s)
        c = tl.load(C + (batch * T + t) * S + s)
        h = tl.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b[None, :]
        z = tl.load(Z + at, mask=live, other=0.0).to(tl.float32)
        y = tl.sum(h * c[None, :], 1) + skip * x
        tl.store(Y + at, y * z * tl.sigmoid(z), mask=live)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, bias: Tensor
) -> Tensor:
    (batch, T, E), S = x.shape, a.shape[1]
    y = torch.empty_like(x)
    _selective[(triton.cdiv(E, 4), batch)](x, dt, a, b, c, d, z, y, T, E, bias, S=S, BE=4)
    return y


def _selective_reference(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, bias: Tensor
) -> Tensor:
    dt = torch.nn.functional.softplus(dt + bias)
    h, steps = x.new_zeros(x.shape[0], *a.shape), []
    for t in range(x.shape[1]):
        h = (dt[:, t, :, None] * -a.exp()).exp() * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        steps.append((h * c[:, t, None]).sum(-1))
    return (torch.stack(steps, 1) + d * x) * torch.nn.functional.silu(z)


def _selective_args() -> tuple[Tensor, ...]:
    x, dt, z = (torch.randn(2, 9, 6) for _ in range(3))
    b, c = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    return x, dt, torch.randn(6, 4), b, c, torch.randn(6), z, torch.randn(6)


@triton.jit
def _gated_recurrence(X, R, GATE, LAMBDA, H0, H, LAST, T, W, c, BT: tl.constexpr, BW: tl.constexpr):
    w = tl.program_id(0) * BW + tl.arange(0, BW)
    t = tl.arange(0, BT)
    rate = -c * _softplus(tl.load(LAMBDA + w, mask=w < W, other=0.0))
    h = tl.load(H0 + w, mask=w < W, other=0.0)
    for start in range(0, T, BT):
        at = (start + t)[:, None] * W + w[None, :]
        live = (start + t < T)[:, None] & (w < W)[None, :]
        x = tl.load(X + at, mask=live, other=0.0)
        r = tl.sigmoid(tl.load(R + at, mask=live, other=0.0))
        i = tl.sigmoid(tl.load(GATE + at, mask=live, other=0.0))
        log_a = tl.where(live, rate[None, :] * r, 0.0)
        a = tl.exp(log_a)
        drive = tl.where(live, tl.sqrt(1.0 - tl.exp(2.0 * tl.where(live, log_a, -1.0))) * (i * x), 0.0)
        decay, inner = tl.associative_scan((a, drive), 0, _then)
        states = inner + decay * h[None, :]
        tl.store(H + at, states, mask=live)
        h = tl.sum(tl.where((t == BT - 1)[:, None], states, 0.0), 0)
    tl.store(LAST + w, h, mask=w < W)


def gated_recurrence(x: Tensor, r: Tensor, i: Tensor, rate: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence of RG-LRU in chunks of 8 steps."""
    h, last = torch.empty_like(x), torch.empty_like(h0)
    _gated_recurrence[(triton.cdiv(x.shape[1], 4),)](x, r, i, rate, h0, h, last, *x.shape, 8.0, BT=8, BW=4)
    return h, last


def _gated_reference(x: Tensor, r: Tensor, i: Tensor, rate: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    log_a = -8.0 * torch.nn.functional.softplus(rate) * r.sigmoid()
    drive = (1 - (2 * log_a).exp()).sqrt() * i.sigmoid() * x
    h, steps = h0, []
    for k in range(x.shape[0]):
        h = log_a[k].exp() * h + drive[k]
        steps.append(h)
    return torch.stack(steps), h


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _larger_with_place(a, place_a, b, place_b):
    second = b > a
    return tl.where(second, b, a), tl.where(second, place_b, place_a)


@triton.jit
def _cummax(X, Y, WHERE, Z, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=-float("inf"))
    y, place = tl.associative_scan((x, c), 0, _larger_with_place)
    tl.store(Y + row * N + c, y, mask=c < N)
    tl.store(WHERE + row * N + c, place, mask=c < N)
    tl.store(Z + row * N + c, tl.associative_scan(x, 0, _larger, reverse=True), mask=c < N)


def cummax(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, z = torch.empty_like(x), torch.empty_like(x)
    where = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _cummax[(x.shape[0],)](x, y, where, z, x.shape[1], BLOCK=32)
    return y, where, z


def _cummax_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, where = x.cummax(1)
    return y, where, x.flip(1).cummax(1).values.flip(1)


@triton.jit
def _restart(sum_a, start_a, sum_b, start_b):
    return tl.where(start_b != 0, sum_b, sum_a + sum_b), start_a | start_b


@triton.jit
def _segmented(X, START, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=0.0)
    start = tl.load(START + c, mask=c < n, other=1).to(tl.int32)
    y, _ = tl.associative_scan((x, start), 0, _restart)
    tl.store(Y + c, y, mask=c < n)


def segmented(x: Tensor, start: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _segmented[(1,)](x, start, y, x.numel(), BLOCK=64)
    return y


def _segmented_reference(x: Tensor, start: Tensor) -> Tensor:
    sums: list[Tensor] = []
    for value, begins in zip(x, start.tolist(), strict=True):
        sums.append(value if begins or not sums else sums[-1] + value)
    return torch.stack(sums)


@triton.jit
def _cumprod(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=1.0)
    tl.store(Y + tl.program_id(0) * N + c, tl.cumprod(x, 0), mask=c < N)


def cumprod(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _cumprod[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


@triton.jit
def _log_add(a, b):
    top = tl.maximum(a, b)
    low = tl.minimum(a, b)
    return top + tl.log(1.0 + tl.exp(low - top))


@triton.jit
def _log_cumsum_exp(X, Y, TOTAL, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=-1.0e4)
    tl.store(Y + row * N + c, tl.associative_scan(x, 0, _log_add), mask=c < N)
    tl.store(TOTAL + row, tl.reduce(x, 0, _log_add))


def log_cumsum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    y, total = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    _log_cumsum_exp[(x.shape[0],)](x, y, total, x.shape[1], BLOCK=16)
    return y, total


CASES = [
    *in_dtypes(
        Case(
            "cumsum_both_ways",
            cumsum,
            lambda: (torch.randn(3, 27),),
            lambda x: (x.cumsum(1), (x * x).flip(1).cumsum(1).flip(1)),
        ),
        HALF,
    ),
    *in_dtypes(Case("cumsum_across_tiles", cumsum_tiles, lambda: (torch.randn(21, 11),), lambda x: x.cumsum(0)), BF16),
    Case("linear_recurrence", recurrence, lambda: (torch.rand(29, 6), torch.randn(29, 6), False), recurrence_reference),
    Case(
        "linear_recurrence_reverse",
        recurrence,
        lambda: (torch.rand(32, 5), torch.randn(32, 5), True),
        recurrence_reference,
    ),
    *in_dtypes(Case("selective_scan", selective_scan, _selective_args, _selective_reference), BF16),
    Case(
        "gated_recurrence_chunks",
        gated_recurrence,
        lambda: (*(torch.randn(24, 6) for _ in range(3)), torch.randn(6), torch.randn(6)),
        _gated_reference,
    ),
    Case("cummax_with_places", cummax, lambda: (torch.randn(4, 30),), _cummax_reference),
    Case("segmented_scan", segmented, lambda: (torch.randn(50), torch.rand(50) < 0.2), _segmented_reference),
    Case("cumprod", cumprod, lambda: (torch.randn(3, 13),), lambda x: x.cumprod(1)),
    Case(
        "log_cumsum_exp",
        log_cumsum_exp,
        lambda: (torch.randn(4, 13) * 10,),
        lambda x: (x.logcumsumexp(1), x.logsumexp(1)),
    ),
]
