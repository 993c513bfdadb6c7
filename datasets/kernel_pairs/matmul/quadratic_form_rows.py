"""Quadratic form x^T A x of every row with one matrix: two product-like terms, and dA as a sum over all rows.

y[m] = x[m]^T A x[m],    dx[m] = dy[m] (A + A^T) x[m],    dA = sum over m of dy[m] x[m] x[m]^T = X^T diag(dy) X.
Forward: tiles of X A are multiplied by the same tile of X while they lie in the accumulator, and only row sums leave.
Backward: a small pass writes A + A^T, so that dx is one plain product; dA splits the rows over programs, scales one
operand while it loads, and adds fp32 partial tiles in a fixed order.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "quadratic_form_rows",
    "family": "matmul",
    "op": "quadratic_form",
    "schema": 1,
    "techniques": ("prologue-fusion", "split-k", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("x", "a"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _quadratic_fwd(X, A, Y, M, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    y = tl.zeros((BLOCK_M,), tl.float32)
    for column in range(0, D, BLOCK_N):
        n = column + tl.arange(0, BLOCK_N)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(X + m[:, None] * D + k[None, :], mask=(m[:, None] < M) & (k[None, :] < D), other=0.0)
            a = tl.load(A + k[:, None] * D + n[None, :], mask=(k[:, None] < D) & (n[None, :] < D), other=0.0)
            product = tl.dot(x, a, product)
        x = tl.load(X + m[:, None] * D + n[None, :], mask=(m[:, None] < M) & (n[None, :] < D), other=0.0)
        y += tl.sum(product * x.to(tl.float32), 1)
    tl.store(Y + m, y, mask=m < M)


def _side(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, a):
    x, a = x.contiguous(), a.contiguous()
    M, D = x.shape
    y = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_M = _side(M, 64)
    _quadratic_fwd[(triton.cdiv(M, BLOCK_M),)](
        x, a, y, M, D, BLOCK_M=BLOCK_M, BLOCK_N=_side(D, 128), BLOCK_K=_side(D, 128 // x.element_size()),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, a)


# --- backward ---
@triton.jit
def _symmetrised(A, Both, D, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (k[:, None] < D) & (n[None, :] < D)
    a = tl.load(A + k[:, None] * D + n[None, :], mask=inside, other=0.0).to(tl.float32)
    at = tl.load(A + n[:, None] * D + k[None, :], mask=(n[:, None] < D) & (k[None, :] < D), other=0.0)
    tl.store(Both + k[:, None] * D + n[None, :], a + tl.trans(at).to(tl.float32), mask=inside)


@triton.jit
def _quadratic_dx(DY, X, Both, DX, M, D, stride_g, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * D + k[None, :], mask=(m[:, None] < M) & (k[None, :] < D), other=0.0)
        both = tl.load(Both + k[:, None] * D + n[None, :], mask=(k[:, None] < D) & (n[None, :] < D), other=0.0)
        acc = tl.dot(x, both, acc)
    # One factor per row: it waits for the finished product.
    g = tl.load(DY + m * stride_g, mask=m < M, other=0.0)
    tl.store(DX + m[:, None] * D + n[None, :], g[:, None] * acc, mask=(m[:, None] < M) & (n[None, :] < D))


@triton.jit
def _quadratic_da(
    DY, X, Parts, M, D, stride_g, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2).to(tl.int64) * rows
    last = tl.minimum(first + rows, M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        g = tl.load(DY + m * stride_g, mask=m < last, other=0.0)
        left = tl.load(X + m[None, :] * D + k[:, None], mask=(m[None, :] < last) & (k[:, None] < D), other=0.0)
        right = tl.load(X + m[:, None] * D + n[None, :], mask=(m[:, None] < last) & (n[None, :] < D), other=0.0)
        acc = tl.dot((left.to(tl.float32) * g[None, :]).to(right.dtype), right, acc)
    part = Parts + tl.program_id(2).to(tl.int64) * D * D
    tl.store(part + k[:, None] * D + n[None, :], acc, mask=(k[:, None] < D) & (n[None, :] < D))


def backward(saved, grad_y, needs=(True, True)):
    x, a = saved
    M, D = x.shape
    side, step = _side(D, 128), 128 // x.element_size()
    dx = da = None
    if needs[0]:
        dx = torch.empty_like(x)
        BLOCK_M = _side(M, 128)
        both, edge = torch.empty_like(a), _side(D, 64)
        _symmetrised[(triton.cdiv(D, edge), triton.cdiv(D, edge))](a, both, D, BLOCK=edge)
        _quadratic_dx[(triton.cdiv(M, BLOCK_M), triton.cdiv(D, side))](
            grad_y, x, both, dx, M, D, grad_y.stride(0),
            BLOCK_M=BLOCK_M, BLOCK_N=side, BLOCK_K=_side(D, step), num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[1]:
        tiles = triton.cdiv(D, side) ** 2
        # Two waves on 132 processors, each split four steps deep at least.
        splits = max(1, min(264 // tiles, M // (4 * step)))
        rows = triton.cdiv(triton.cdiv(M, splits), step) * step
        splits = triton.cdiv(M, rows)
        parts = torch.empty(splits, D, D, device=x.device, dtype=torch.float32)
        _quadratic_da[(triton.cdiv(D, side), triton.cdiv(D, side), splits)](
            grad_y, x, parts, M, D, grad_y.stride(0), rows,
            BLOCK_M=step, BLOCK_N=side, BLOCK_K=side, num_warps=4, num_stages=4,
        )  # fmt: skip
        da = parts.sum(0).to(a.dtype)
    return dx, da


# --- check ---
SWEEP = (
    {"M": 300, "D": 32},
    {"M": 407, "D": 75},
    {"M": 40, "D": 150, "dtype": "bfloat16"},
    {"M": 96, "D": 24, "dtype": "float16"},
)
BENCH = ({"M": 65536, "D": 512, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, a = torch.randn(M, D, generator=g), torch.randn(D, D, generator=g) / D
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, a))


def reference(x, a):
    return ((x @ a).float() * x.float()).sum(-1)
