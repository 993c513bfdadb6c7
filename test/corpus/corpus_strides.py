"""Layouts: transposed, expanded, sliced and shared storage, odd sizes, size 1 and empty grids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes


@triton.jit
def _add_2d(X, Y, Z, M, N, sxm, sxn, sym, syn, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    live = (m < M) & (n < N)
    x = tl.load(X + m * sxm + n * sxn, mask=live, other=0.0)
    y = tl.load(Y + m * sym + n * syn, mask=live, other=0.0)
    tl.store(Z + m * N + n, x * x + x * y, mask=live)


def add_2d(x: Tensor, y: Tensor) -> Tensor:
    x, y = torch.broadcast_tensors(x, y)
    M, N = x.shape
    z = torch.empty((M, N), dtype=torch.result_type(x, y), device=x.device)
    grid = (triton.cdiv(M, 8), triton.cdiv(N, 16))
    _add_2d[grid](x, y, z, M, N, *x.stride(), *y.stride(), BM=8, BN=16)
    return z


def _add_2d_reference(x: Tensor, y: Tensor) -> Tensor:
    return x * x + x * y


@triton.jit
def _outer_3d(A, B, C, OUT, L, M, N, BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr):
    i = tl.arange(0, BI)[:, None, None]
    j = tl.arange(0, BJ)[None, :, None]
    k = tl.arange(0, BK)[None, None, :]
    a = tl.load(A + i, mask=i < L, other=0.0)
    b = tl.load(B + j, mask=j < M, other=0.0)
    c = tl.load(C + k, mask=k < N, other=0.0)
    value = (a + b) * (b - c) + a * c
    tl.store(OUT + (i * M + j) * N + k, value, mask=(i < L) & (j < M) & (k < N))


def outer_3d(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.empty((a.numel(), b.numel(), c.numel()), device=a.device)
    _outer_3d[(1,)](a, b, c, out, *out.shape, BI=4, BJ=8, BK=16)
    return out


def _outer_3d_reference(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = a[:, None, None], b[None, :, None], c[None, None, :]
    return (a + b) * (b - c) + a * c


@triton.jit
def _transpose(X, Y, M, N, B: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N))
    tl.store(Y + n[:, None] * M + m[None, :], tl.trans(x), mask=(n[:, None] < N) & (m[None, :] < M))


def transpose(x: Tensor) -> Tensor:
    y = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    _transpose[(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))](x, y, *x.shape, B=16)
    return y


@triton.jit
def _permute_tile(X, Y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    base = tl.program_id(0) * A * B * C
    flat = tl.arange(0, A * B * C)
    x = tl.reshape(tl.load(X + base + flat), (A, B, C))
    y = tl.permute(x, (2, 0, 1)) * 2.0
    y += tl.trans(x, 2, 0, 1)
    z = tl.sum(tl.view(tl.ravel(y), (C, A * B)), 1)
    tl.store(Y + tl.program_id(0) * C + tl.arange(0, C), z / B)


def permute_tile(x: Tensor) -> Tensor:
    y = torch.empty((x.shape[0], x.shape[3]), device=x.device)
    _permute_tile[(x.shape[0],)](x, y, *x.shape[1:])
    return y


@triton.jit
def _qkv_norms(Q, K, V, OUT, row_stride, heads, D: tl.constexpr):
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = row * row_stride + head * D + tl.arange(0, D)
    q = tl.load(Q + at)
    k = tl.load(K + at)
    v = tl.load(V + at)
    out = v * tl.sum(q * k, 0) / tl.sqrt(tl.sum(q * q, 0) + 1.0)
    tl.store(OUT + (row * heads + head) * D + tl.arange(0, D), out)


def qkv_norms(qkv: Tensor, heads: int) -> Tensor:
    """q, k and v are views of one storage."""
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.view(rows, 3, heads, width // heads).unbind(1)
    out = torch.empty((rows, heads, width // heads), device=qkv.device)
    _qkv_norms[(rows, heads)](q, k, v, out, qkv.stride(0), heads, D=width // heads)
    return out


def _qkv_reference(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = qkv.view(qkv.shape[0], 3, heads, -1).unbind(1)
    return v * (q * k).sum(-1, keepdim=True) / ((q * q).sum(-1, keepdim=True) + 1).sqrt()


def three_views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same kernel on q, k and v that the caller cut from one tensor."""
    rows, heads, width = q.shape
    out = torch.empty((rows, heads, width), device=q.device)
    _qkv_norms[(rows, heads)](q, k, v, out, q.stride(0), heads, D=width)
    return out


def _views_of_one() -> tuple[Tensor, ...]:
    return torch.randn(5, 3, 2, 8).unbind(1)


def _three_views_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v * (q * k).sum(-1, keepdim=True) / ((q * q).sum(-1, keepdim=True) + 1).sqrt()


@triton.jit
def _halo(X, W, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(X + o - 1, mask=(o > 0) & (o - 1 < n), other=0.0)
    here = tl.load(X + o, mask=o < n, other=0.0)
    right = tl.load(X + o + 1, mask=o + 1 < n, other=0.0)
    y = left * tl.load(W) + here * tl.load(W + 1) + right * tl.load(W + 2)
    tl.store(Y + o, y, mask=o < n)


def halo(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _halo[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), BLOCK=16)
    return y


def _halo_reference(x: Tensor, w: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (1, 1))
    return padded[:-2] * w[0] + padded[1:-1] * w[1] + padded[2:] * w[2]


@triton.jit
def _grid_3d(X, Y, sx0, sx1, sx2, H, W):
    b, h, w = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = tl.num_programs(2) - 1
    x = tl.load(X + b * sx0 + h * sx1 + w * sx2)
    mirrored = tl.load(X + b * sx0 + h * sx1 + (last - w) * sx2)
    tl.store(Y + (b * H + h) * W + w, x * x - mirrored)


def grid_3d(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _grid_3d[x.shape](x, y, *x.stride(), x.shape[1], x.shape[2])
    return y


@triton.jit
def _masked_rows(X, Y, LIVE, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    live = tl.load(LIVE + row).to(tl.int1) & (c < N)
    x = tl.load(X + row * N + c, mask=live, other=-1.0)
    tl.store(Y + row * N + c, x * x, mask=c < N)


def masked_rows(x: Tensor, live: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _masked_rows[(x.shape[0],)](x, y, live, x.shape[1], BLOCK=16)
    return y


@triton.jit
def _row_for_all(W, X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # pointers vary over columns alone, their mask over rows and programs too: one gather serves lanes that differ
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.arange(0, BN)[None, :]
    live = (m < M) & (n < N) & (n <= m)
    w = tl.load(W + n + tl.zeros((BM, BN), tl.int32), mask=live, other=2.0)
    x = tl.load(X + m * N + n, mask=(m < M) & (n < N), other=0.0)
    tl.store(Y + m * N + n, w * w * x, mask=(m < M) & (n < N))


def row_for_all(w: Tensor, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _row_for_all[(triton.cdiv(x.shape[0], 4),)](w, x, y, *x.shape, BM=4, BN=8)
    return y


def _row_reference(w: Tensor, x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[1]) <= torch.arange(x.shape[0])[:, None], w, 2.0) ** 2 * x


CASES = [
    Case("row_for_all", row_for_all, lambda: (torch.randn(7), torch.randn(10, 7)), _row_reference),
    *in_dtypes(
        Case("add_transposed", add_2d, lambda: (torch.randn(19, 13).t(), torch.randn(13, 19)), _add_2d_reference),
        torch.bfloat16,
    ),
    Case("add_expanded", add_2d, lambda: (torch.randn(1, 19).expand(13, 19), torch.randn(13, 1)), _add_2d_reference),
    Case("add_sliced", add_2d, lambda: (torch.randn(20, 40)[3:16:2, 1::3], torch.randn(7, 13)), _add_2d_reference),
    Case("add_scalar_operand", add_2d, lambda: (torch.randn(5, 7), torch.randn(1, 1)), _add_2d_reference),
    Case("add_one_element", add_2d, lambda: (torch.randn(1, 1), torch.randn(1, 1)), _add_2d_reference),
    Case("add_no_elements", add_2d, lambda: (torch.randn(0, 4), torch.randn(0, 4)), _add_2d_reference),
    Case(
        "outer_broadcast_3d",
        outer_3d,
        lambda: (torch.randn(3), torch.randn(7, dtype=torch.float64), torch.randn(11)),
        _outer_3d_reference,
    ),
    *in_dtypes(Case("transpose_tile", transpose, lambda: (torch.randn(21, 35),), lambda x: x.t()), torch.float16),
    Case("permute_reshape_view", permute_tile, lambda: (torch.randn(3, 2, 4, 8),), lambda x: 3 * x.sum((1, 2)) / 4),
    Case("qkv_views_inside", qkv_norms, lambda: (torch.randn(5, 3 * 16), 2), _qkv_reference),
    Case("qkv_views_given", three_views, _views_of_one, _three_views_reference),
    Case("stencil_with_halo", halo, lambda: (torch.randn(53), torch.randn(3)), _halo_reference),
    Case("grid_3d", grid_3d, lambda: (torch.randn(4, 3, 5).permute(1, 2, 0),), lambda x: x * x - x.flip(2)),
    Case(
        "mask_from_memory",
        masked_rows,
        lambda: (torch.randn(6, 11), torch.tensor([True, False, True, True, False, True])),
        lambda x, live: torch.where(live[:, None], x, -1.0) ** 2,
    ),
]
