"""Convolutions, pooling, interpolation, butterflies and other kernels over grids."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _causal_conv(X, W, BIAS, Y, T, C, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    batch = tl.program_id(2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BT, BC), tl.float32) + tl.load(BIAS + c, mask=c < C, other=0.0)[None, :]
    for k in tl.static_range(K):
        at = t - (K - 1 - k)
        live = (at >= 0)[:, None] & (at < T)[:, None] & (c < C)[None, :]
        x = tl.load(X + (batch * T + at)[:, None] * C + c[None, :], mask=live, other=0.0)
        acc += x * tl.load(W + c * K + k, mask=c < C, other=0.0)[None, :]
    y = acc * tl.sigmoid(acc)
    tl.store(Y + (batch * T + t)[:, None] * C + c[None, :], y, mask=(t < T)[:, None] & (c < C)[None, :])


def causal_conv(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Depthwise over (batch, time, channels), then silu."""
    B, T, C = x.shape
    y = torch.empty_like(x)
    _causal_conv[(triton.cdiv(T, 8), triton.cdiv(C, 8), B)](x, w, bias, y, T, C, K=w.shape[1], BT=8, BC=8)
    return y


def _causal_reference(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (w.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, w[:, None], bias, groups=w.shape[0])).transpose(1, 2)


@triton.jit
def _conv2d(X, W, Y, C, H, WIDTH, OUT_C, OH, OW, stride, pad, R: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr):
    batch = tl.program_id(2)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    row, column = p // OW, p % OW
    acc = tl.zeros((BP, BO), tl.float32)
    for c in range(C):
        for r in tl.static_range(R):
            for s in tl.static_range(R):
                y, x = row * stride - pad + r, column * stride - pad + s
                live = (p < OH * OW) & (y >= 0) & (y < H) & (x >= 0) & (x < WIDTH)
                value = tl.load(X + ((batch * C + c) * H + y) * WIDTH + x, mask=live, other=0.0)
                w = tl.load(W + ((o * C + c) * R + r) * R + s, mask=o < OUT_C, other=0.0)
                acc += value[:, None] * w[None, :]
    at = (batch * OUT_C + o)[None, :] * OH * OW + p[:, None]
    tl.store(Y + at, acc, mask=(p < OH * OW)[:, None] & (o < OUT_C)[None, :])


def conv2d(x: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    (B, C, H, W), OUT, R = x.shape, w.shape[0], w.shape[2]
    OH, OW = (H + 2 * pad - R) // stride + 1, (W + 2 * pad - R) // stride + 1
    y = torch.empty((B, OUT, OH, OW), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(OH * OW, 16), triton.cdiv(OUT, 4), B)
    _conv2d[grid](x, w, y, C, H, W, OUT, OH, OW, stride, pad, R=R, BP=16, BO=4)
    return y


@triton.jit
def _pool(X, MEAN, HIGH, H, W, OH, OW, K: tl.constexpr, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    row, column = p // OW, p % OW
    live = p < OH * OW
    total = tl.zeros((BLOCK,), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for k in range(K * K):
        at = plane * H * W + (row * K + k // K) * W + column * K + k % K
        total += tl.load(X + at, mask=live, other=0.0)
        high = tl.maximum(high, tl.load(X + at, mask=live, other=float("-inf")))
    tl.store(MEAN + plane * OH * OW + p, total / (K * K), mask=live)
    tl.store(HIGH + plane * OH * OW + p, high, mask=live)


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    B, C, H, W = x.shape
    mean, high = (torch.empty((B, C, H // 2, W // 2), dtype=x.dtype, device=x.device) for _ in range(2))
    _pool[(B * C,)](x, mean, high, H, W, H // 2, W // 2, K=2, BLOCK=16)
    return mean, high


@triton.jit
def _sample(PLANE, row, column, H, W, live):
    inside = live & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(PLANE + row * W + column, mask=inside, other=0.0)


@triton.jit
def _grid_sample(X, GRID, Y, C, H, W, n, BLOCK: tl.constexpr):
    batch = tl.program_id(1)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = p < n
    gx = tl.load(GRID + (batch * n + p) * 2, mask=live, other=0.0)
    gy = tl.load(GRID + (batch * n + p) * 2 + 1, mask=live, other=0.0)
    x = ((gx + 1.0) * W - 1.0) * 0.5
    y = ((gy + 1.0) * H - 1.0) * 0.5
    left, top = tl.floor(x), tl.floor(y)
    fx, fy = x - left, y - top
    column, row = left.to(tl.int32), top.to(tl.int32)
    for c in range(C):
        plane = X + (batch * C + c) * H * W
        upper = _sample(plane, row, column, H, W, live) * (1 - fx) + _sample(plane, row, column + 1, H, W, live) * fx
        lower = (
            _sample(plane, row + 1, column, H, W, live) * (1 - fx)
            + _sample(plane, row + 1, column + 1, H, W, live) * fx
        )
        tl.store(Y + (batch * C + c) * n + p, upper * (1 - fy) + lower * fy, mask=live)


def grid_sample(x: Tensor, grid: Tensor) -> Tensor:
    B, C, H, W = x.shape
    n = grid.shape[1] * grid.shape[2]
    y = torch.empty((B, C, *grid.shape[1:3]), dtype=x.dtype, device=x.device)
    _grid_sample[(triton.cdiv(n, 16), B)](x, grid, y, C, H, W, n, BLOCK=16)
    return y


@triton.jit
def _upsample(X, Y, H, W, OH, OW, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = p < OH * OW
    y = tl.maximum((p // OW + 0.5) * H / OH - 0.5, 0.0)
    x = tl.maximum((p % OW + 0.5) * W / OW - 0.5, 0.0)
    row, column = y.to(tl.int32), x.to(tl.int32)
    fy, fx = y - row, x - column
    below, right = tl.minimum(row + 1, H - 1), tl.minimum(column + 1, W - 1)
    base = X + plane * H * W
    a = tl.load(base + row * W + column, mask=live, other=0.0)
    b = tl.load(base + row * W + right, mask=live, other=0.0)
    c = tl.load(base + below * W + column, mask=live, other=0.0)
    d = tl.load(base + below * W + right, mask=live, other=0.0)
    value = (a * (1 - fx) + b * fx) * (1 - fy) + (c * (1 - fx) + d * fx) * fy
    tl.store(Y + plane * OH * OW + p, value, mask=live)


def upsample(x: Tensor, height: int, width: int) -> Tensor:
    B, C, H, W = x.shape
    y = torch.empty((B, C, height, width), dtype=x.dtype, device=x.device)
    _upsample[(B * C, triton.cdiv(height * width, 32))](x, y, H, W, height, width, BLOCK=32)
    return y


@triton.jit
def _fft_stage(RE, IM, COS, SIN, OUT_RE, OUT_IM, span, N: tl.constexpr):
    # one decimation in time: pairs at a distance of span
    row = tl.program_id(0) * N
    k = tl.arange(0, N // 2)
    low = k // span * span * 2 + k % span
    high = low + span
    turn = k % span * (N // 2 // span)
    cos, sin = tl.load(COS + turn), tl.load(SIN + turn)
    a_re, a_im = tl.load(RE + row + low), tl.load(IM + row + low)
    b_re, b_im = tl.load(RE + row + high), tl.load(IM + row + high)
    t_re, t_im = b_re * cos - b_im * sin, b_re * sin + b_im * cos
    tl.store(OUT_RE + row + low, a_re + t_re)
    tl.store(OUT_IM + row + low, a_im + t_im)
    tl.store(OUT_RE + row + high, a_re - t_re)
    tl.store(OUT_IM + row + high, a_im - t_im)


def fft(re: Tensor, im: Tensor) -> tuple[Tensor, Tensor]:
    """One launch per stage; torch permutes the input to bit-reversed order and makes the twiddles."""
    rows, N = re.shape
    stages = N.bit_length() - 1
    order = [int(f"{k:0{stages}b}"[::-1], 2) for k in range(N)]
    re, im = re[:, order].contiguous(), im[:, order].contiguous()
    angle = -2.0 * math.pi / N * torch.arange(N // 2, device=re.device, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    for stage in range(stages):
        out_re, out_im = torch.empty_like(re), torch.empty_like(im)
        _fft_stage[(rows,)](re, im, cos, sin, out_re, out_im, 1 << stage, N=N)
        re, im = out_re, out_im
    return re, im


def _fft_reference(re: Tensor, im: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.fft.fft(torch.complex(re, im))
    return out.real, out.imag


@triton.jit
def _hadamard(X, Y, N: tl.constexpr, LOG: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(X + row * N + tl.arange(0, N))
    for k in tl.static_range(LOG):
        pairs = tl.reshape(x, (N >> (k + 1), 2, 1 << k))
        a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (N,))
    tl.store(Y + row * N + tl.arange(0, N), x)


def hadamard(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _hadamard[(x.shape[0],)](x, y, N=x.shape[1], LOG=x.shape[1].bit_length() - 1)
    return y


def _hadamard_reference(x: Tensor) -> Tensor:
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < x.shape[1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix


@triton.jit
def _heat(X, Y, H, W, rate, BLOCK: tl.constexpr):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = p < H * W
    row, column = p // W, p % W
    x = tl.load(X + p, mask=live, other=0.0)
    # periodic in both directions
    up = tl.load(X + (row + H - 1) % H * W + column, mask=live, other=0.0)
    down = tl.load(X + (row + 1) % H * W + column, mask=live, other=0.0)
    left = tl.load(X + row * W + (column + W - 1) % W, mask=live, other=0.0)
    right = tl.load(X + row * W + (column + 1) % W, mask=live, other=0.0)
    tl.store(Y + p, x + rate * (up + down + left + right - 4.0 * x) + x * x * rate, mask=live)


def heat(x: Tensor, steps: int) -> Tensor:
    """Two buffers take turns."""
    a, b = x.clone(), torch.empty_like(x)
    for _ in range(steps):
        _heat[(triton.cdiv(x.numel(), 32),)](a, b, *x.shape, 0.1, BLOCK=32)
        a, b = b, a
    return a


def _heat_reference(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        around = x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1)
        x = x + 0.1 * (around - 4 * x) + 0.1 * x * x
    return x


CASES = [
    *in_dtypes(
        Case(
            "causal_conv1d_silu",
            causal_conv,
            lambda: (torch.randn(2, 19, 11), torch.randn(11, 4), torch.randn(11)),
            _causal_reference,
        ),
        BF16,
    ),
    *in_dtypes(
        Case(
            "conv2d_direct",
            conv2d,
            lambda: (torch.randn(2, 3, 7, 6), torch.randn(5, 3, 3, 3), 2, 1),
            lambda x, w, stride, pad: F.conv2d(x, w, stride=stride, padding=pad),
        ),
        HALF,
    ),
    Case(
        "pool_mean_max",
        pool,
        lambda: (torch.randn(2, 2, 7, 6),),
        lambda x: (F.avg_pool2d(x, 2), F.max_pool2d(x, 2)),
    ),
    Case(
        "grid_sample_bilinear",
        grid_sample,
        lambda: (torch.randn(2, 3, 5, 6), torch.rand(2, 4, 5, 2) * 2.4 - 1.2),
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
    ),
    Case(
        "upsample_bilinear",
        upsample,
        lambda: (torch.randn(1, 2, 4, 5), 7, 11),
        lambda x, height, width: F.interpolate(x, (height, width), mode="bilinear"),
    ),
    Case("fft_stages", fft, lambda: (torch.randn(3, 32), torch.randn(3, 32)), _fft_reference),
    *in_dtypes(Case("hadamard_butterflies", hadamard, lambda: (torch.randn(3, 32),), _hadamard_reference), BF16),
    Case("heat_ping_pong", heat, lambda: (torch.randn(6, 9), 4), _heat_reference),
]
