"""Mahalanobis distance of row pairs with a full matrix A: rank-one updates of dA are gathered into one matrix product.

    s = sqrt(d^T A d),  d = x - y,    dd = g (A + A^T) d / (2 s),    dA = sum over rows of g / (2 s) d d^T

A program walks tiles of rows with A in registers. The rank-one terms of a tile are d^T (w d), which tl.dot adds to an
accumulator of A's shape; every program leaves one partial matrix.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mahalanobis_rows",
    "family": "reduction_stat",
    "op": "mahalanobis",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "one-launch", "saved-statistics", "strided-cotangent"),
    "saves": ("distance: fp32 (M)",),
    "grads": ("x", "y", "matrix"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _differences(X, Y, m, d, M, D):
    at = m[:, None] * D + d[None, :]
    ok = (m[:, None] < M) & (d[None, :] < D)
    return tl.load(X + at, mask=ok, other=0.0).to(tl.float32) - tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _mahalanobis_fwd(X, Y, A, Out, Distance, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    off = _differences(X, Y, m, d, M, D)
    a_ok = (d[:, None] < D) & (d[None, :] < D)
    a = tl.load(A + d[:, None] * D + d[None, :], mask=a_ok, other=0.0).to(tl.float32)
    square = tl.sum(tl.dot(off, a, input_precision="tf32x3") * off, 1)
    distance = tl.sqrt(tl.where(m < M, square, 1.0))
    tl.store(Out + m, distance, mask=m < M)
    tl.store(Distance + m, distance, mask=m < M)


def forward(x, y, matrix):
    """x, y (M, D) with D up to 128, matrix (D, D) positive definite but not necessarily symmetric."""
    x, y, matrix = x.contiguous(), y.contiguous(), matrix.contiguous()
    M, D = x.shape
    out = torch.empty(M, device=x.device, dtype=x.dtype)
    distance = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    _mahalanobis_fwd[(triton.cdiv(M, 64),)](
        x, y, matrix, out, distance, M, D, BLOCK_M=64, BLOCK_D=BLOCK_D, num_warps=4 if BLOCK_D <= 32 else 8
    )
    return out, (x, y, matrix, distance)


# --- backward ---
@triton.jit
def _mahalanobis_bwd(
    G, X, Y, A, Distance, DX, DY, Parts, M, D, stride, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    square = d[:, None] * D + d[None, :]
    a_ok = (d[:, None] < D) & (d[None, :] < D)
    a = tl.load(A + square, mask=a_ok, other=0.0).to(tl.float32)
    both = a + tl.trans(a)
    da = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        m = start + tl.arange(0, BLOCK_M).to(tl.int64)
        off = _differences(X, Y, m, d, M, D)
        g = tl.load(G + m * stride, mask=m < M, other=0.0).to(tl.float32)
        distance = tl.load(Distance + m, mask=m < M, other=1.0)
        # Equal rows have no direction: the gradient there is taken as zero.
        half = tl.where(distance > 0.0, 0.5 * g / tl.where(distance > 0.0, distance, 1.0), 0.0)
        weighted = half[:, None] * off
        dx = tl.dot(weighted, both, input_precision="tf32x3")
        at = m[:, None] * D + d[None, :]
        ok = (m[:, None] < M) & (d[None, :] < D)
        tl.store(DX + at, dx, mask=ok)
        tl.store(DY + at, -dx, mask=ok)
        da = tl.dot(tl.trans(off), weighted, da, input_precision="tf32x3")
    tl.store(Parts + tl.program_id(0).to(tl.int64) * D * D + square, da, mask=a_ok)


def backward(saved, grad_out, needs=None):
    x, y, matrix, distance = saved
    M, D = x.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    # Both matrices take most of a processor's registers: one program each, and one partial matrix.
    programs = min(triton.cdiv(M, 32), processors)
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    parts = torch.empty(programs, D, D, device=x.device, dtype=torch.float32)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    _mahalanobis_bwd[(programs,)](
        grad_out, x, y, matrix, distance, dx, dy, parts, M, D, grad_out.stride(0),
        BLOCK_M=32, BLOCK_D=BLOCK_D, num_warps=4 if BLOCK_D <= 32 else 8,
    )  # fmt: skip
    return dx, dy, parts.sum(0).to(matrix.dtype)


# --- check ---
SWEEP = ({"M": 96, "D": 16}, {"M": 203, "D": 21}, {"M": 40, "D": 32, "dtype": "bfloat16"})
BENCH = ({"M": 262144, "D": 64, "dtype": "float32"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(M, D, generator=g), torch.randn(M, D, generator=g)
    root, twist = (torch.randn(D, D, generator=g) * D**-0.5 for _ in range(2))
    # Positive definite plus a skew part: the quadratic form ignores it, the gradient of A must not assume symmetry.
    matrix = root @ root.t() + torch.eye(D) + twist - twist.t()
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y, matrix))


def reference(x, y, matrix):
    off = x.float() - y.float()
    return ((off @ matrix.float()) * off).sum(-1).sqrt().to(x.dtype)
