"""Column reductions: by atomics, in two stages, by the last program, and batch norm with partial sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes


@triton.jit
def _column_sum_atomic(X, OUT, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
    tl.atomic_add(OUT + n, tl.sum(x * x, 0), mask=n < N, sem="relaxed")


def column_sum_atomic(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[1], device=x.device)
    _column_sum_atomic[(triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 8))](x, out, *x.shape, BM=4, BN=8)
    return out


@triton.jit
def _column_parts(X, DY, DW, DB, M, N, ROWS, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * ROWS, tl.minimum((part + 1) * ROWS, M)):
        x = tl.load(X + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        dw += x * dy
        db += dy
    tl.store(DW + part * N + c, dw, mask=c < N)
    tl.store(DB + part * N + c, db, mask=c < N)


@triton.jit
def _fold_parts(PARTS, OUT, P, N, BP: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BP, BN), tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        acc += tl.load(PARTS + p[:, None] * N + n[None, :], mask=(p[:, None] < P) & (n[None, :] < N), other=0.0)
    tl.store(OUT + n, tl.sum(acc, 0), mask=n < N)


def column_sum_two_stages(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """One partial buffer is folded by a kernel, the other by torch."""
    M, N = x.shape
    parts = 5
    dw, db = (torch.empty((parts, N), dtype=torch.float32, device=x.device) for _ in range(2))
    _column_parts[(parts,)](x, dy, dw, db, M, N, triton.cdiv(M, parts), BLOCK=triton.next_power_of_2(N))
    out = torch.empty(N, device=x.device)
    _fold_parts[(triton.cdiv(N, 8),)](dw, out, parts, N, BP=2, BN=8)
    return out, db.sum(0).to(x.dtype)


@triton.jit
def _total_by_last(X, PARTS, COUNT, OUT, n, P, BLOCK: tl.constexpr, BP: tl.constexpr):
    pid = tl.program_id(0)
    o = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    tl.store(PARTS + pid, tl.sum(x * x * x, 0))
    tl.debug_barrier()
    arrived = tl.atomic_add(COUNT, 1, sem="acq_rel")
    if arrived == P - 1:
        p = tl.arange(0, BP)
        parts = tl.load(PARTS + p, mask=p < P, other=0.0, cache_modifier=".cg")
        tl.store(OUT, tl.sum(parts, 0))
        tl.store(COUNT, 0)


def total_by_last_program(x: Tensor) -> Tensor:
    programs = triton.cdiv(x.numel(), 16)
    parts, out = torch.empty(programs, device=x.device), torch.empty((), device=x.device)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _total_by_last[(programs,)](x, parts, count, out, x.numel(), programs, BLOCK=16, BP=8)
    return out


@triton.jit
def _column_extremes(X, HIGH, LOW, M, N, BM: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    high = tl.full((BN,), -float("inf"), tl.float32)
    low = tl.full((BN,), float("inf"), tl.float32)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        live = (m[:, None] < M) & (n[None, :] < N)
        at = X + m[:, None] * N + n[None, :]
        high = tl.maximum(high, tl.max(tl.load(at, mask=live, other=-float("inf")), 0))
        low = tl.minimum(low, tl.min(tl.load(at, mask=live, other=float("inf")), 0))
    tl.store(HIGH + n, high, mask=n < N)
    tl.store(LOW + n, low, mask=n < N)


def column_extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    high, low = (torch.empty(x.shape[1], device=x.device) for _ in range(2))
    _column_extremes[(triton.cdiv(x.shape[1], 8),)](x, high, low, *x.shape, BM=4, BN=8)
    return high, low


@triton.jit
def _batch_moments(X, SUM, SQUARES, B, C, HW, BLOCK: tl.constexpr):
    sample, channel = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, BLOCK)
    x = tl.load(X + (sample * C + channel) * HW + p, mask=p < HW, other=0.0)
    tl.store(SUM + channel * B + sample, tl.sum(x, 0))
    tl.store(SQUARES + channel * B + sample, tl.sum(x * x, 0))


@triton.jit
def _batch_apply(X, SUM, SQUARES, RUNNING, W, Y, B, C, HW, eps, momentum, BB: tl.constexpr, BLOCK: tl.constexpr):
    sample, channel = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, BB)
    count = B * HW
    mean = tl.sum(tl.load(SUM + channel * B + b, mask=b < B, other=0.0), 0) / count
    var = tl.sum(tl.load(SQUARES + channel * B + b, mask=b < B, other=0.0), 0) / count - mean * mean
    if sample == 0:
        old = tl.load(RUNNING + channel)
        tl.store(RUNNING + channel, old * (1 - momentum) + mean * momentum)
    p = tl.arange(0, BLOCK)
    at = (sample * C + channel) * HW + p
    x = tl.load(X + at, mask=p < HW, other=0.0)
    tl.store(Y + at, (x - mean) * tl.rsqrt(var + eps) * tl.load(W + channel), mask=p < HW)


def batchnorm(x: Tensor, w: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    """Updates the running mean in place, as modules do."""
    B, C, HW = x.shape
    total, squares = (torch.empty((C, B), device=x.device) for _ in range(2))
    _batch_moments[(B, C)](x, total, squares, B, C, HW, BLOCK=16)
    y = torch.empty_like(x)
    _batch_apply[(B, C)](x, total, squares, running, w, y, B, C, HW, 1e-5, 0.1, BB=4, BLOCK=16)
    return y, running


def _batchnorm_reference(x: Tensor, w: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    return F.batch_norm(x, None, None, w, training=True), 0.9 * running + 0.1 * x.mean((0, 2))


@triton.jit
def _frobenius(X, OUT, n, BLOCK: tl.constexpr):
    acc = 0.0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(X + o, mask=o < n, other=0.0).to(tl.float32)
        acc += tl.sum(x * x, 0)
    tl.atomic_add(OUT, acc)


@triton.jit
def _rescale(X, SQUARES, Y, n, limit, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.load(SQUARES))
    scale = tl.where(norm > limit, limit / norm, 1.0)
    tl.store(Y + o, tl.load(X + o, mask=o < n) * scale, mask=o < n)


def clip_norm(x: Tensor, limit: float) -> Tensor:
    squares = torch.zeros(1, dtype=torch.float32, device=x.device)
    _frobenius[(4,)](x, squares, x.numel(), BLOCK=16)
    y = torch.empty_like(x)
    _rescale[(triton.cdiv(x.numel(), 64),)](x, squares, y, x.numel(), limit, BLOCK=64)
    return y


CASES = [
    Case("column_sum_atomic", column_sum_atomic, lambda: (torch.randn(11, 19),), lambda x: (x * x).sum(0)),
    *in_dtypes(
        Case(
            "column_sum_two_stages",
            column_sum_two_stages,
            lambda: (torch.randn(23, 13), torch.randn(23, 13)),
            lambda x, dy: ((x * dy).sum(0), dy.sum(0)),
        ),
        torch.bfloat16,
    ),
    Case("total_by_last_program", total_by_last_program, lambda: (torch.randn(75),), lambda x: (x**3).sum()),
    Case("column_extremes", column_extremes, lambda: (torch.randn(10, 13),), lambda x: (x.amax(0), x.amin(0))),
    Case(
        "batchnorm_partials_in_place",
        batchnorm,
        lambda: (torch.randn(3, 4, 14), torch.randn(4), torch.randn(4)),
        _batchnorm_reference,
    ),
    *in_dtypes(
        Case("clip_norm", clip_norm, lambda: (torch.randn(7, 25), 2.5), lambda x, limit: x * (limit / x.norm())),
        torch.float16,
    ),
]
