"""Distances, rotations, small linear algebra and tiles of three dimensions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _distances(A, B, OUT, KERNEL, M, N, D, gamma, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    square = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        a = tl.load(A + m[:, None] * D + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(B + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
        difference = a[:, None, :] - b[None, :, :]
        square += tl.sum(difference * difference, 2)
    live = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    tl.store(OUT + at, tl.sqrt(square), mask=live)
    tl.store(KERNEL + at, tl.exp(-gamma * square), mask=live)


def distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Euclidean distances and a radial basis; masked lanes have distance 0, where the root has no slope."""
    (M, D), N = a.shape, b.shape[0]
    out, kernel = (torch.empty((M, N), dtype=torch.float32, device=a.device) for _ in range(2))
    _distances[(triton.cdiv(M, 4), triton.cdiv(N, 8))](a, b, out, kernel, M, N, D, 0.3, BM=4, BN=8, BD=8)
    return out, kernel


def _distances_reference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    square = ((a[:, None] - b) ** 2).sum(-1)
    return square.sqrt(), (-0.3 * square).exp()


@triton.jit
def _rotate(Q, V, OUT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    w = tl.load(Q + o * 4, mask=live, other=1.0)
    x = tl.load(Q + o * 4 + 1, mask=live, other=0.0)
    y = tl.load(Q + o * 4 + 2, mask=live, other=0.0)
    z = tl.load(Q + o * 4 + 3, mask=live, other=0.0)
    norm = tl.sqrt(w * w + x * x + y * y + z * z)
    w, x, y, z = w / norm, x / norm, y / norm, z / norm
    a = tl.load(V + o * 3, mask=live, other=0.0)
    b = tl.load(V + o * 3 + 1, mask=live, other=0.0)
    c = tl.load(V + o * 3 + 2, mask=live, other=0.0)
    # v + 2 w (u x v) + 2 u x (u x v)
    p, q, r = y * c - z * b, z * a - x * c, x * b - y * a
    tl.store(OUT + o * 3, a + 2.0 * (w * p + y * r - z * q), mask=live)
    tl.store(OUT + o * 3 + 1, b + 2.0 * (w * q + z * p - x * r), mask=live)
    tl.store(OUT + o * 3 + 2, c + 2.0 * (w * r + x * q - y * p), mask=live)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(v)
    _rotate[(triton.cdiv(v.shape[0], 8),)](q, v, out, v.shape[0], BLOCK=8)
    return out


def _rotate_reference(q: Tensor, v: Tensor) -> Tensor:
    q = q / q.norm(dim=1, keepdim=True)
    w, u = q[:, :1], q[:, 1:]
    cross = torch.linalg.cross(u, v)
    return v + 2 * w * cross + 2 * torch.linalg.cross(u, cross)


@triton.jit
def _cholesky(A, L, N: tl.constexpr):
    # one column after another; the tile stays in registers and columns are picked by masks
    base = tl.program_id(0) * N * N
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(A + base + i * N + j)
    low = tl.zeros((N, N), a.dtype)
    for k in tl.static_range(N):
        row = tl.sum(tl.where(i == k, low, 0.0), 0)
        column = tl.sum(tl.where(j == k, a, 0.0), 1) - tl.sum(low * row[None, :], 1)
        pivot = tl.sqrt(tl.sum(tl.where(tl.arange(0, N) == k, column, 0.0), 0))
        low = tl.where((j == k) & (i >= k), (column / pivot)[:, None], low)
    tl.store(L + base + i * N + j, low)


def cholesky(a: Tensor) -> Tensor:
    low = torch.empty_like(a)
    _cholesky[(a.shape[0],)](a, low, N=a.shape[1])
    return low


def _cholesky_reference(a: Tensor) -> Tensor:
    """Reads the lower triangle only, as the kernel does, whose gradient is therefore not symmetric."""
    N = a.shape[1]
    low: dict[tuple[int, int], Tensor] = {}
    for k in range(N):
        for i in range(k, N):
            rest = a[:, i, k] - sum(low[i, s] * low[k, s] for s in range(k))
            low[i, k] = rest.sqrt() if i == k else rest / low[k, k]
    zero = torch.zeros_like(a[:, 0, 0])
    return torch.stack([torch.stack([low.get((i, k), zero) for k in range(N)], -1) for i in range(N)], 1)


def _positive_definite() -> tuple[Tensor]:
    x = torch.randn(2, 8, 8, dtype=DOUBLE)
    return (x @ x.mT + 4 * torch.eye(8, dtype=DOUBLE),)


@triton.jit
def _solve_lower(L, B, X, N, COLUMNS: tl.constexpr):
    # forward substitution through memory: each row reads the rows before it
    c = tl.arange(0, COLUMNS)
    for i in range(N):
        acc = tl.load(B + i * COLUMNS + c)
        for k in range(i):
            acc -= tl.load(L + i * N + k) * tl.load(X + k * COLUMNS + c)
        tl.store(X + i * COLUMNS + c, acc / tl.load(L + i * N + i))
        tl.debug_barrier()


def solve_lower(low: Tensor, b: Tensor) -> Tensor:
    x = torch.empty_like(b)
    _solve_lower[(1,)](low, b, x, low.shape[0], COLUMNS=b.shape[1])
    return x


@triton.jit
def _power_iteration(A, V, LAMBDA, steps, N: tl.constexpr):
    base = tl.program_id(0) * N * N
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(A + base + i * N + j)
    v = tl.full((N,), 1.0, tl.float32)
    value = 0.0
    for _ in range(steps):
        w = tl.sum(a * v[None, :], 1)
        value = tl.sqrt(tl.sum(w * w, 0))
        v = w / value
    tl.store(V + tl.program_id(0) * N + tl.arange(0, N), v)
    tl.store(LAMBDA + tl.program_id(0), value)


def power_iteration(a: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    v, value = torch.empty(a.shape[:2], dtype=a.dtype, device=a.device), torch.empty(a.shape[0], device=a.device)
    _power_iteration[(a.shape[0],)](a, v, value, steps, N=a.shape[1])
    return v, value


def _power_reference(a: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    v = torch.ones(a.shape[:2], dtype=a.dtype)
    value = torch.zeros(a.shape[0], dtype=a.dtype)
    for _ in range(steps):
        w = (a @ v[..., None])[..., 0]
        value = w.norm(dim=1)
        v = w / value[:, None]
    return v, value


@triton.jit
def _volume(X, W, Y, B, H, W_, A: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr):
    # a tile of three dimensions, reduced along each of them
    a, y, x = tl.arange(0, A)[:, None, None], tl.arange(0, BY)[None, :, None], tl.arange(0, BX)[None, None, :]
    live = (y < H) & (x < W_)
    value = tl.load(X + ((tl.program_id(0) * A + a) * H + y) * W_ + x, mask=live, other=0.0)
    rows = tl.sum(value, 2, keep_dims=True)
    columns = tl.sum(value, 1, keep_dims=True)
    depth = tl.sum(value, 0, keep_dims=True)
    w = tl.load(W + tl.arange(0, A))[:, None, None]
    out = w * (rows * columns + tl.broadcast_to(depth, (A, BY, BX)) * value)
    tl.store(Y + ((tl.program_id(0) * A + a) * H + y) * W_ + x, out, mask=live)


def volume(x: Tensor, w: Tensor) -> Tensor:
    B, A, H, W = x.shape
    y = torch.empty_like(x)
    _volume[(B,)](x, w, y, B, H, W, A=A, BY=8, BX=8)
    return y


def _volume_reference(x: Tensor, w: Tensor) -> Tensor:
    rows, columns, depth = x.sum(3, keepdim=True), x.sum(2, keepdim=True), x.sum(1, keepdim=True)
    return w[:, None, None] * (rows * columns + depth * x)


@triton.jit
def _complex_product(A, B, OUT, n, BLOCK: tl.constexpr):
    # interleaved real and imaginary parts
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    both = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    live = both < 2 * n
    a_re, a_im = tl.split(tl.reshape(tl.load(A + both, mask=live, other=0.0), (BLOCK, 2)))
    b_re = tl.load(B + 2 * o, mask=o < n, other=0.0)
    b_im = tl.load(B + 2 * o + 1, mask=o < n, other=0.0)
    out = tl.join(a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re)
    tl.store(OUT + both, tl.reshape(out, (2 * BLOCK,)), mask=live)


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(a)
    _complex_product[(triton.cdiv(a.shape[0], 16),)](a, b, out, a.shape[0], BLOCK=16)
    return out


def _complex_reference(a: Tensor, b: Tensor) -> Tensor:
    product = torch.view_as_complex(a.contiguous()) * torch.view_as_complex(b.contiguous())
    return torch.view_as_real(product)


CASES = [
    *in_dtypes(
        Case("distances_rbf", distances, lambda: (torch.randn(6, 11), torch.randn(10, 11)), _distances_reference), HALF
    ),
    Case("quaternion_rotate", rotate, lambda: (torch.randn(13, 4), torch.randn(13, 3)), _rotate_reference),
    Case("cholesky_columns", cholesky, _positive_definite, _cholesky_reference),
    Case(
        "triangular_solve",
        solve_lower,
        lambda: (torch.randn(6, 6).tril() + 3 * torch.eye(6), torch.randn(6, 4)),
        lambda low, b: torch.linalg.solve_triangular(low.tril(), b, upper=False),
    ),
    Case("power_iteration", power_iteration, lambda: (torch.rand(2, 16, 16), 5), _power_reference),
    *in_dtypes(Case("volume_3d", volume, lambda: (torch.randn(2, 4, 5, 7), torch.randn(4)), _volume_reference), BF16),
    Case("complex_product", complex_product, lambda: (torch.randn(21, 2), torch.randn(21, 2)), _complex_reference),
]
