"""Edges: infinities and NaN, ties, arguments that alias, memory formats, narrow and wide integers, odd signatures."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus import corpus_elementwise as activations
from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _masked_softmax(X, KEEP, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    keep = tl.load(KEEP + row * N + c, mask=c < N, other=0) != 0
    x = tl.where(keep, tl.load(X + row * N + c, mask=c < N, other=0.0), float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + c, e / tl.sum(e, 0), mask=c < N)


def masked_softmax(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """A row without any kept element is NaN, in its values only: other rows have their gradients."""
    y = torch.empty_like(x)
    _masked_softmax[(x.shape[0],)](x, keep, y, x.shape[1], BLOCK=16)
    return y[:3], y[3:].isnan()


def _masked_reference(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    y = x.masked_fill(keep == 0, -torch.inf).softmax(-1)
    return y[:3], y[3:].isnan()


@triton.jit
def _guarded(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    root = tl.where(x > 0.0, tl.sqrt(x), 0.0)  # NaN below zero, an infinite slope at zero
    inverse = tl.where(x == 0.0, 1.0, 1.0 / x)
    log = tl.where(x > 0.0, tl.log(x), -1.0)
    tl.store(Y + o, root + inverse * log, mask=o < n)


def guarded(x: Tensor) -> Tensor:
    """Branches not taken have no part in the gradient, whatever their slope."""
    y = torch.empty_like(x)
    _guarded[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


def _guarded_reference(x: Tensor) -> Tensor:
    safe = torch.where(x > 0, x, 1.0)
    root = torch.where(x > 0, safe.sqrt(), 0.0)
    inverse = torch.where(x == 0, 1.0, 1.0 / torch.where(x == 0, 1.0, x))
    return root + inverse * torch.where(x > 0, safe.log(), -1.0)


@triton.jit
def _double_plus(X, Y, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    y = tl.load(Y + o, mask=o < n, other=0.0)
    tl.store(OUT + o, x * y + x, mask=o < n)


def aliased_arguments(x: Tensor) -> Tensor:
    """One tensor is both inputs and the output."""
    _double_plus[(triton.cdiv(x.numel(), 16),)](x, x, x, x.numel(), BLOCK=16)
    return x


def overlapping_views(x: Tensor) -> Tensor:
    """Two views that overlap are read, a third tensor and then a view are written."""
    n = x.numel() - 1
    out = torch.empty(n + 3, dtype=x.dtype, device=x.device).fill_(1.0)
    _double_plus[(triton.cdiv(n, 16),)](x[1:], x[:-1], out[3:], n, BLOCK=16)
    _double_plus[(1,)](out[3:], x, out, 2, BLOCK=16)
    return out


def _overlapping_reference(x: Tensor) -> Tensor:
    product = x[1:] * x[:-1] + x[1:]
    first = product[:2] * x[:2] + product[:2]
    return torch.cat([first, x.new_ones(1), product])


@triton.jit
def _channel_scale(X, S, Y, C, H, W, sb, sc, sh, sw, BLOCK: tl.constexpr):
    batch, p = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c, h, w = p // (H * W), p // W % H, p % W
    live = c < C
    at = batch * sb + c * sc + h * sh + w * sw
    s = tl.load(S + c, mask=live, other=0.0)
    tl.store(Y + at, tl.load(X + at, mask=live, other=0.0) * s * s, mask=live)


def channels_last(x: Tensor, s: Tensor) -> Tensor:
    """`empty_like` keeps the memory format, so input and output share strides."""
    assert x.is_contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    assert y.stride() == x.stride()
    B, C, H, W = x.shape
    _channel_scale[(B, triton.cdiv(C * H * W, 32))](x, s, y, C, H, W, *x.stride(), BLOCK=32)
    return y


def torch_writes_between(x: Tensor) -> tuple[Tensor, Tensor]:
    """Torch changes memory in place, by slices, masks, indices and `out=`, before and after kernels."""
    work = torch.zeros(4, x.shape[1], dtype=x.dtype, device=x.device)
    work[1:3] = x[:2]
    work[0].copy_(x[2])
    work[3, ::2] = 2.0
    work.masked_fill_(work > 1.5, 0.5)
    y = torch.empty_like(work)
    _double_plus[(triton.cdiv(work.numel(), 16),)](work, work, y, work.numel(), BLOCK=16)
    y.mul_(3.0).add_(work, alpha=2.0)
    y.t()[0] -= 1.0
    torch.mul(y[0], y[1], out=work[0])
    y.index_add_(0, torch.tensor([0, 2], device=x.device), x[:2])
    y[:, -1].zero_()
    z = torch.empty_like(work)
    _double_plus[(triton.cdiv(y.numel(), 16),)](work, y, z, y.numel(), BLOCK=16)
    return y, z


def _torch_writes_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    even = torch.arange(x.shape[1]) % 2 == 0
    work = torch.stack([x[2], x[0], x[1], torch.where(even, 2.0, torch.zeros_like(x[0]))])
    work = work.masked_fill(work > 1.5, 0.5)
    y = 3 * (work * work + work) + 2 * work
    y = y - (torch.arange(x.shape[1]) == 0).double()
    work = torch.cat([(y[0] * y[1])[None], work[1:]])
    y = y + torch.stack([x[0], torch.zeros_like(x[0]), x[1], torch.zeros_like(x[0])])
    y = y * (torch.arange(x.shape[1]) < x.shape[1] - 1)
    return y, work * y + work


@triton.jit
def _narrow(A, B, OUT8, OUT16, OUT64, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    a = tl.load(A + o, mask=o < n, other=0)
    b = tl.load(B + o, mask=o < n, other=1)
    tl.store(OUT8 + o, a * b + a, mask=o < n)
    tl.store(OUT8 + n + o, (a << 1) - b, mask=o < n)
    tl.store(OUT16 + o, (a.to(tl.int16) * b).to(tl.uint16), mask=o < n)
    wide = a.to(tl.int64) * 0x123456789ABCDEF
    tl.store(OUT64 + o, wide * wide + b, mask=o < n)
    tl.store(OUT64 + n + o, (wide.to(tl.uint64, bitcast=True) // 1000003).to(tl.int64), mask=o < n)
    tl.store(OUT64 + 2 * n + o, (wide >> 7) ^ (wide.to(tl.uint64, bitcast=True) >> 7).to(tl.int64), mask=o < n)


def narrow_and_wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = a.numel()
    out8 = torch.empty((2, n), dtype=torch.int8, device=a.device)
    out16 = torch.empty(n, dtype=torch.uint16, device=a.device)
    out64 = torch.empty((3, n), dtype=torch.int64, device=a.device)
    _narrow[(1,)](a, b, out8, out16, out64, n, BLOCK=64)
    return out8, out16.to(torch.int32), out64


def _narrow_reference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def wrap(value: int, bits: int) -> int:
        return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    eight, sixteen, wide_rows = [], [], []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        eight.append([wrap(x * y + x, 8), wrap(x * 2 - y, 8)])
        sixteen.append(x * y % (1 << 16))
        wide = wrap(x * 0x123456789ABCDEF, 64)
        unsigned = wide % (1 << 64)
        wide_rows.append([wrap(wide * wide + y, 64), unsigned // 1000003, wrap((wide >> 7) ^ (unsigned >> 7), 64)])
    return torch.tensor(eight).t(), torch.tensor(sixteen), torch.tensor(wide_rows).t()


@triton.jit(do_not_specialize=["n"], debug=True)
def _signature(X, Y, n, big, flag, scale, bound, TYPE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr = 16):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0).to(TYPE)
    y = tl.minimum(x * scale, bound) * SCALE
    if flag and big > 2147483648:
        y += activations._tanh(x)
    tl.store(Y + o, y, mask=o < n)


def odd_signature(x: Tensor) -> Tensor:
    """A number beyond 32 bits, a bool, an infinite bound, a dtype and a float as constants, a default block."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(x.numel(), 16),)
    _signature[grid](x, y, x.numel(), 1 << 40, True, 1 / 3, float("inf"), tl.float32, SCALE=0.75)
    return y


def _signature_reference(x: Tensor) -> Tensor:
    return x / 4 + x.tanh()


@triton.jit
def _ties(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=-float("inf"))
    _, first = tl.max(x, 0, return_indices=True)
    tl.store(Y + row, tl.load(X + row * N + first) * first)


def first_of_ties(x: Tensor) -> Tensor:
    """Equal elements: the first one wins and takes the whole gradient."""
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _ties[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


def _ties_reference(x: Tensor) -> Tensor:
    first = torch.stack([(row == row.max()).nonzero()[0] for row in x.detach()])
    return (x.gather(1, first) * first)[:, 0]


@triton.jit
def _nan_aware(X, Y, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    y = tl.load(Y + o, mask=o < n, other=0.0)
    tl.store(OUT + o, tl.maximum(x, y), mask=o < n)
    tl.store(OUT + n + o, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL), mask=o < n)
    tl.store(OUT + 2 * n + o, tl.where(x != x, 0.0, x) * tl.where(y == y, 1.0, 2.0), mask=o < n)
    tl.store(OUT + 3 * n + o, tl.clamp(x, -1.0, 1.0), mask=o < n)


def nan_aware(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty((4, x.numel()), dtype=x.dtype, device=x.device)
    _nan_aware[(1,)](x, y, out, x.numel(), BLOCK=8)
    return out


def _nan_reference(x: Tensor, y: Tensor) -> Tensor:
    cleaned = torch.where(x.isnan(), 0.0, x) * torch.where(y.isnan(), 2.0, 1.0)
    clamped = torch.fmin(torch.fmax(x, torch.full_like(x, -1.0)), torch.ones_like(x))
    return torch.stack([torch.fmax(x, y), torch.maximum(x, y), cleaned, clamped])


@triton.jit
def _empty_work(X, LENGTHS, Y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(LENGTHS + row)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        c = start + tl.arange(0, BLOCK)
        acc += tl.load(X + c, mask=c < length, other=0.0)
    total = tl.sum(acc, 0)
    tl.store(Y + row, total / tl.maximum(length, 1))


def empty_work(x: Tensor, lengths: Tensor) -> Tensor:
    """No program has anything to do in its loop, then some have; then there is no program at all."""
    y = torch.empty(lengths.numel(), dtype=x.dtype, device=x.device)
    _empty_work[(lengths.numel(),)](x, torch.zeros_like(lengths), y, BLOCK=8)
    z = torch.empty_like(y)
    _empty_work[(lengths.numel(),)](x, lengths, z, BLOCK=8)
    _empty_work[(0,)](x, lengths, y, BLOCK=8)
    return y + z


CASES = [
    Case(
        "rows_without_elements",
        masked_softmax,
        lambda: (torch.randn(4, 9), (torch.arange(36).view(4, 9) % 4 < torch.tensor([[2], [4], [1], [0]])).int()),
        _masked_reference,
    ),
    Case("guarded_slopes", guarded, lambda: (torch.cat([torch.randn(20), torch.zeros(2)]),), _guarded_reference),
    *in_dtypes(Case("aliased_arguments", aliased_arguments, lambda: (torch.randn(4, 9),), lambda x: x * x + x), HALF),
    Case("overlapping_views", overlapping_views, lambda: (torch.randn(30),), _overlapping_reference),
    Case(
        "channels_last",
        channels_last,
        lambda: (torch.randn(2, 5, 3, 4).to(memory_format=torch.channels_last), torch.randn(5)),
        lambda x, s: x * s[:, None, None] ** 2,
    ),
    *in_dtypes(
        Case("torch_writes_between", torch_writes_between, lambda: (torch.randn(3, 7),), _torch_writes_reference), BF16
    ),
    Case(
        "narrow_and_wide_integers",
        narrow_and_wide,
        lambda: tuple(torch.randint(-128, 128, (50,), dtype=torch.int8) for _ in range(2)),
        _narrow_reference,
    ),
    *in_dtypes(Case("odd_signature", odd_signature, lambda: (torch.randn(40),), _signature_reference), HALF),
    Case("first_of_ties", first_of_ties, lambda: (torch.randint(0, 3, (5, 11)).float(),), _ties_reference),
    Case(
        "nan_aware",
        nan_aware,
        lambda: (torch.tensor([1.0, torch.nan, 2.0, torch.inf, -3.0]), torch.tensor([2.0, 1.0, torch.nan, 0.0, -4.0])),
        _nan_reference,
        wrt=(),
    ),
    Case(
        "empty_work",
        empty_work,
        lambda: (torch.randn(20), torch.tensor([0, 20, 0, 3], dtype=torch.int32)),
        lambda x, lengths: torch.stack([x[:k].sum() / max(k, 1) for k in lengths.tolist()]),
    ),
]
