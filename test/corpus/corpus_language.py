"""Corners of the language: functions as arguments, tuples, ranges of all kinds, casts, and rarer operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _square_of(x):
    return x * x


@triton.jit
def _sigmoid_of(x):
    return tl.sigmoid(x)


@triton.jit
def _map(X, Y, n, function: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + o, function(tl.load(X + o, mask=o < n, other=0.0)), mask=o < n)


def higher_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """One kernel, two functions as constants."""
    a, b = torch.empty_like(x), torch.empty_like(x)
    for function, y in ((_square_of, a), (_sigmoid_of, b)):
        _map[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), function, BLOCK=16)
    return a, b


@triton.jit
def _polar(x, y):
    r = tl.sqrt(x * x + y * y)
    return (x / r, y / r), r


@triton.jit
def _tuples(X, Y, OUT, n, steps, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=1.0)
    y = tl.load(Y + o, mask=o < n, other=1.0)
    state = (x, y)
    total = tl.zeros_like(x)
    for _ in range(steps):
        unit, r = _polar(state[0], state[1])
        total += r
        state = (unit[0] * 2.0 - unit[1], unit[1] * unit[0])
    tl.store(OUT + o, total + state[0], mask=o < n)


def tuples(x: Tensor, y: Tensor, steps: int) -> Tensor:
    out = torch.empty_like(x)
    _tuples[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), steps, BLOCK=16)
    return out


def _tuples_reference(x: Tensor, y: Tensor, steps: int) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(steps):
        r = (x * x + y * y).sqrt()
        total, x, y = total + r, 2 * x / r - y / r, x / r * (y / r)
    return total + x


@triton.jit
def _ranges(X, OUT, N, FIRST, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    first = tl.load(FIRST)  # int64
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in range(N - 1, -1, -2):
        acc = acc * 0.5 + tl.load(X + k * BLOCK + c)
    for k in tl.range(first, N, 3, num_stages=3, loop_unroll_factor=2):
        acc += k * tl.load(X + k * BLOCK + c)
    for k in tl.static_range(1, 7, 2):
        acc += tl.load(X + k * BLOCK + c) * k
    for k in range(5, 2):
        acc += k * 1000.0
    tl.store(OUT + c, acc)


def ranges(x: Tensor, first: Tensor) -> Tensor:
    """Negative steps, bounds from memory, unrolled and empty ranges."""
    out = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
    _ranges[(1,)](x, out, x.shape[0], first, BLOCK=x.shape[1])
    return out


def _ranges_reference(x: Tensor, first: Tensor) -> Tensor:
    acc = torch.zeros_like(x[0])
    for k in range(x.shape[0] - 1, -1, -2):
        acc = acc * 0.5 + x[k]
    for k in [*range(int(first), x.shape[0], 3), 1, 3, 5]:
        acc = acc + k * x[k]
    return acc


@triton.jit
def _casts(X, K, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    k = tl.load(K + o, mask=o < n, other=0)
    truncated = x.to(tl.int32)  # towards zero
    wide = x.to(tl.float64) * k.to(tl.float64)
    narrow = (x.to(tl.float16).to(tl.bfloat16)).to(tl.float32)
    byte = (k.to(tl.uint8)).to(tl.float32)
    flag = (k > 0).to(tl.float32) + (x != 0).to(tl.int32)
    tl.store(OUT + o, (wide.to(tl.float32) + narrow * byte + truncated * flag) * x, mask=o < n)


def casts(x: Tensor, k: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _casts[(triton.cdiv(x.numel(), 16),)](x, k, out, x.numel(), BLOCK=16)
    return out


def _casts_reference(x: Tensor, k: Tensor) -> Tensor:
    flag = (k > 0).double() + (x != 0)
    return (x * k + x * (k & 0xFF) + x.trunc() * flag) * x


@triton.jit
def _joined(X, OUT, M: tl.constexpr, N: tl.constexpr):
    # four values side by side and apart again, in two dimensions
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(X + m * N + n)
    four = tl.join(tl.join(x, x * x), tl.join(x + 1.0, x * x * x))
    a, b = tl.split(tl.permute(four, (0, 1, 3, 2)))
    p, q = tl.split(a)
    r, s = tl.split(b)
    wide = tl.interleave(p * q, r * s)
    wide_n = tl.arange(0, 2 * N)[None, :]
    tl.store(OUT + m * 2 * N + wide_n, wide)


def joined(x: Tensor) -> Tensor:
    out = torch.empty((x.shape[0], 2 * x.shape[1]), dtype=x.dtype, device=x.device)
    _joined[(1,)](x, out, *x.shape)
    return out


def _joined_reference(x: Tensor) -> Tensor:
    """join(join(a, b), join(c, d)) ends in [[a, c], [b, d]]; transposed, its halves are (a, c) and (b, d)."""
    return torch.stack([x * (x + 1), x**5], -1).flatten(1)


@triton.jit
def _gathers(X, ROWS, DEEP, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(X + m[:, None] * N + n[None, :])
    rows = tl.load(ROWS + k[:, None] * N + n[None, :])
    picked = tl.gather(x, rows, 0)
    cube = tl.reshape(picked, (K // 2, 2, N))
    deep = tl.load(DEEP + tl.arange(0, K // 2)[:, None, None] * N + n[None, None, :])
    tl.store(OUT + tl.arange(0, K // 2)[:, None, None] * N + n[None, None, :], tl.gather(cube * cube, deep, 1))


def gathers(x: Tensor, rows: Tensor, deep: Tensor) -> Tensor:
    out = torch.empty(deep.shape, dtype=x.dtype, device=x.device)
    _gathers[(1,)](x, rows, deep, out, *x.shape, rows.shape[0])
    return out


def _gathers_reference(x: Tensor, rows: Tensor, deep: Tensor) -> Tensor:
    cube = x.gather(0, rows.long()).view(deep.shape[0], 2, x.shape[1])
    return (cube * cube).gather(1, deep.long()[:, None])[:, 0]


@triton.jit
def _scans_2d(X, K, OUT, TOTALS, WHERE, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(X + m * N + n)
    k = tl.load(K + m * N + n)
    down = tl.cumsum(x, 0, reverse=True)
    along = tl.cumsum(x * x, 1)
    tl.store(OUT + m * N + n, down * along)
    tl.store(TOTALS + m * N + n, tl.cumsum(k, 1) + tl.cumprod(tl.where(k > 2, 2, 1), 0))
    best, where = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=False)
    tl.store(WHERE + tl.arange(0, M), where + (best > 100.0).to(tl.int32))


def scans_2d(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, totals = torch.empty_like(x), torch.empty_like(k)
    where = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    _scans_2d[(1,)](x, k, out, totals, where, *x.shape)
    return out, totals, where


def _scans_reference(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    down = x.flip(0).cumsum(0).flip(0)
    totals = k.cumsum(1) + torch.where(k > 2, 2, 1).cumprod(0)
    return down * (x * x).cumsum(1), totals, x.argmax(1)


@triton.jit
def _library_softmax(X, Y, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    y = tl.softmax(x, 1, keep_dims=True) + tl.softmax(x, 0, keep_dims=True)
    z = tl.fdiv(x, tl.exp(x)) + tl.div_rn(x, x * x + 1.0) + tl.math.exp2(x) * tl.maximum(x, 0.0)
    tl.store(Y + at, y * z)


def library_softmax(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _library_softmax[(1,)](x, y, *x.shape)
    return y


def _library_reference(x: Tensor) -> Tensor:
    return (x.softmax(1) + x.softmax(0)) * (x / x.exp() + x / (x * x + 1) + torch.exp2(x) * x.relu())


@triton.jit
def _swizzled(X, Y, M, N, B: tl.constexpr, GROUP: tl.constexpr):
    row, column = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP)
    m, n = row * B + tl.arange(0, B), column * B + tl.arange(0, B)
    live = (m < M)[:, None] & (n < N)[None, :]
    x = tl.load(X + m[:, None] * N + n[None, :], mask=live, other=0.0)
    tl.store(Y + m[:, None] * N + n[None, :], x * (row + 1) - column, mask=live)


def swizzled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _swizzled[(triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 4))](x, y, *x.shape, B=4, GROUP=2)
    return y


def _swizzled_reference(x: Tensor) -> Tensor:
    row, column = torch.arange(x.shape[0]) // 4, torch.arange(x.shape[1]) // 4
    return x * (row[:, None] + 1) - column


@triton.jit
def _while_tile(X, Y, STEPS, N, limit, BLOCK: tl.constexpr):
    # goes on while any lane is large; lanes that are done stay as they are
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    steps = 0
    while tl.max(tl.abs(x), 0) > limit:
        x = tl.where(tl.abs(x) > limit, x * 0.5 + tl.sum(x, 0) / 64.0, x)
        steps += 1
        tl.device_assert(steps < 100, "does not converge")
    tl.store(Y + row * N + c, x, mask=c < N)
    tl.store(STEPS + row, steps)


def while_tile(x: Tensor) -> tuple[Tensor, Tensor]:
    y, steps = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    _while_tile[(x.shape[0],)](x, y, steps, x.shape[1], 0.5, BLOCK=16)
    return y, steps


def _while_tile_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, counts = [], []
    for row in x:
        steps = 0
        while row.abs().max() > 0.5:
            row = torch.where(row.abs() > 0.5, row * 0.5 + row.sum() / 64, row)
            steps += 1
        rows.append(row)
        counts.append(steps)
    return torch.stack(rows), torch.tensor(counts)


@triton.jit
def _states(CODES, X, Y, T):
    # a small machine: what happens next depends on the code that was read
    row = tl.program_id(0)
    total = 0.0
    scale = 1.0
    t = 0
    while t < T:
        code = tl.load(CODES + row * T + t)
        x = tl.load(X + row * T + t)
        if code == 0:
            total += x * scale
            t += 1
        elif code == 1:
            scale = scale * x
            if scale > 2.0:
                scale = 1.0
                t += 2
            else:
                t += 1
        else:
            for _ in range(code):
                total = total * 0.5 + x
            t += 1
    tl.store(Y + row, total * scale)


def states(codes: Tensor, x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _states[(x.shape[0],)](codes, x, y, x.shape[1])
    return y


def _states_reference(codes: Tensor, x: Tensor) -> Tensor:
    rows = []
    for code, row in zip(codes.tolist(), x, strict=True):
        total, scale, t = torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype), 0
        while t < len(code):
            if code[t] == 0:
                total, t = total + row[t] * scale, t + 1
            elif code[t] == 1:
                scale = scale * row[t]
                scale, t = (torch.ones_like(scale), t + 2) if scale > 2 else (scale, t + 1)
            else:
                for _ in range(code[t]):
                    total = total * 0.5 + row[t]
                t += 1
        rows.append(total * scale)
    return torch.stack(rows)


@triton.jit
def _double_precision(X, Y, n, BLOCK: tl.constexpr):
    # compensated summation: exact arithmetic leaves nothing to compensate
    acc = tl.zeros((BLOCK,), tl.float64)
    lost = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(X + o, mask=o < n, other=0.0) - lost
        total = acc + x
        lost = (total - acc) - x
        acc = total
    tl.store(Y, tl.sum(acc, 0) * 2.0 - tl.sum(lost, 0))


def double_precision(x: Tensor) -> Tensor:
    y = torch.empty((), dtype=x.dtype, device=x.device)
    _double_precision[(1,)](x, y, x.numel(), BLOCK=8)
    return y


CASES = [
    *in_dtypes(Case("higher_order", higher_order, lambda: (torch.randn(30),), lambda x: (x * x, x.sigmoid()))),
    Case("tuples_in_loops", tuples, lambda: (torch.randn(20), torch.randn(20), 4), _tuples_reference),
    Case("ranges_of_all_kinds", ranges, lambda: (torch.randn(11, 8), torch.tensor(4)), _ranges_reference),
    Case(
        "casts",
        casts,
        lambda: (torch.randn(40) * 5, torch.randint(-300, 300, (40,), dtype=torch.int32)),
        _casts_reference,
    ),
    *in_dtypes(Case("join_of_joins", joined, lambda: (torch.randn(4, 8),), _joined_reference), BF16),
    Case(
        "gather_along_rows_and_depth",
        gathers,
        lambda: (
            torch.randn(8, 4),
            torch.randint(0, 8, (16, 4), dtype=torch.int32),
            torch.randint(0, 2, (8, 4), dtype=torch.int32),
        ),
        _gathers_reference,
    ),
    Case(
        "scans_in_two_dimensions",
        scans_2d,
        lambda: (torch.randn(8, 16), torch.randint(0, 5, (8, 16))),
        _scans_reference,
    ),
    *in_dtypes(Case("library_softmax", library_softmax, lambda: (torch.randn(4, 8),), _library_reference)),
    Case("swizzled_programs", swizzled, lambda: (torch.randn(14, 10),), _swizzled_reference),
    Case("while_over_a_tile", while_tile, lambda: (torch.randn(5, 13),), _while_tile_reference),
    Case(
        "state_machine",
        states,
        lambda: (torch.randint(0, 4, (6, 9)), torch.rand(6, 9) + 0.6),
        _states_reference,
    ),
    Case("double_precision", double_precision, lambda: (torch.randn(45, dtype=DOUBLE),), lambda x: 2 * x.sum()),
]
