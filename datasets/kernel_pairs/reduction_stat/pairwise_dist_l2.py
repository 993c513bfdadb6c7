"""All-pairs Euclidean distances: one gradient kernel serves both operands, launched twice with exchanged roles."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pairwise_dist_l2",
    "family": "reduction_stat",
    "op": "cdist",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _square_distances(x, y):
    """(BLOCK_M, BLOCK_N) squared distances of the rows of two fp32 tiles, in full precision because they cancel."""
    cross = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    return tl.maximum(tl.sum(x * x, 1)[:, None] + tl.sum(y * y, 1)[None, :] - 2.0 * cross, 0.0)


@triton.jit
def _distance_fwd(X, Y, Out, M, N, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(X + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0).to(tl.float32)
    y = tl.load(Y + n[:, None] * D + d[None, :], mask=(n[:, None] < N) & (d[None, :] < D), other=0.0).to(tl.float32)
    dist = tl.sqrt(_square_distances(x, y))
    tl.store(Out + m[:, None] * N + n[None, :], dist, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, y):
    x, y = x.contiguous(), y.contiguous()
    M, N, D = x.shape[0], y.shape[0], x.shape[1]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    _distance_fwd[grid](x, y, out, M, N, D, BLOCK_M=32, BLOCK_N=32, BLOCK_D=BLOCK_D, num_warps=8 if D > 64 else 4)
    return out, (x, y)


# --- backward ---
@triton.jit
def _distance_bwd(
    DOut, X, Y, Parts, M, N, D, each, stride_m, stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # d|x-y|/dx = (x-y)/|x-y|, summed over y: with w = g/dist this is x * sum(w) - w @ y, so the sum is a GEMM. A
    # program takes one of several stretches of y.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_x = (m[:, None] < M) & (d[None, :] < D)
    x = tl.load(X + m[:, None] * D + d[None, :], mask=in_x, other=0.0).to(tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    pull = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    split = tl.program_id(1)
    for start in range(split * each, tl.minimum((split + 1) * each, N), BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        y = tl.load(Y + n[:, None] * D + d[None, :], mask=(n[:, None] < N) & (d[None, :] < D), other=0.0)
        y = y.to(tl.float32)
        square = _square_distances(x, y)
        inside = (m[:, None] < M) & (n[None, :] < N)
        g = tl.load(DOut + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
        # Coinciding points have no direction: their subgradient is taken as zero.
        w = tl.where(square > 0.0, g * tl.rsqrt(tl.where(square > 0.0, square, 1.0)), 0.0)
        weight += tl.sum(w, 1)
        pull = tl.dot(w, y, pull, input_precision="tf32x3")
    part = Parts + split.to(tl.int64) * M * D
    tl.store(part + m[:, None] * D + d[None, :], x * weight[:, None] - pull, mask=in_x)


def _gradient_of_first(g_m, g_n, grad_out, x, y):
    M, N, D = x.shape[0], y.shape[0], x.shape[1]
    BLOCK_D = max(16, triton.next_power_of_2(D))
    # Four programs for each of 132 processors, and at least eight tiles of y for each.
    tiles = triton.cdiv(M, 32)
    splits = max(1, min(triton.cdiv(528, tiles), N // 256))
    each = triton.cdiv(triton.cdiv(N, splits), 32) * 32
    splits = triton.cdiv(N, each)
    parts = torch.empty(splits, M, D, device=x.device, dtype=torch.float32)
    _distance_bwd[(tiles, splits)](
        grad_out, x, y, parts, M, N, D, each, g_m, g_n,
        BLOCK_M=32, BLOCK_N=32, BLOCK_D=BLOCK_D, num_warps=8 if D > 64 else 4,
    )  # fmt: skip
    return parts.sum(0).to(x.dtype)


def backward(saved, grad_out, needs=(True, True)):
    x, y = saved
    g_m, g_n = grad_out.stride()
    dx = _gradient_of_first(g_m, g_n, grad_out, x, y) if needs[0] else None
    dy = _gradient_of_first(g_n, g_m, grad_out, y, x) if needs[1] else None
    return dx, dy


# --- check ---
SWEEP = ({"M": 32, "N": 32, "D": 16}, {"M": 37, "N": 45, "D": 23}, {"M": 16, "N": 40, "D": 32, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "D": 64, "dtype": "float32"},)


def make_args(M, N, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(M, D, generator=g), torch.randn(N, D, generator=g) + 1.0
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y))


def reference(x, y):
    x32, y32 = x.float(), y.float()
    square = x32.square().sum(1)[:, None] - 2.0 * x32 @ y32.t() + y32.square().sum(1)
    return square.clamp(min=0.0).sqrt().to(x.dtype)
