"""Gaussian kernel matrix with a learned length scale: one launch per operand, the first also collects the scale.

    k[m, n] = exp(-|x[m] - y[n]|^2 / (2 l^2)),    l = exp(log_scale)

With w = g k the gradient of x[m] is (sum of w y[n] - x[m] sum of w) / l^2, a matrix product, and that of log_scale is
the sum of w |x - y|^2 / l^2, for which each program of the first launch stores its part. Distances are computed again:
they cost less than reading k, and k rounded to 16 bits has lost them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cdist_rbf",
    "family": "reduction_stat",
    "op": "rbf_kernel",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "recompute", "scalar-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y", "log_scale"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _squared_distances(x, y):
    # In full precision, because the terms cancel for near points.
    inner = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    return tl.maximum(tl.sum(x * x, 1)[:, None] - 2.0 * inner + tl.sum(y * y, 1)[None, :], 0.0)


@triton.jit
def _rbf_fwd(
    X, Y, LogScale, Out, M, N, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    half = 0.5 * tl.exp(-2.0 * tl.load(LogScale).to(tl.float32))
    x = tl.load(X + m[:, None] * D + d, mask=(m[:, None] < M) & (d < D), other=0.0).to(tl.float32)
    y = tl.load(Y + n[:, None] * D + d, mask=(n[:, None] < N) & (d < D), other=0.0).to(tl.float32)
    k = tl.exp(-half * _squared_distances(x, y))
    tl.store(Out + m[:, None] * N + n[None, :], k, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, y, log_scale):
    """x (M, D), y (N, D) with D up to 128 or so, log_scale (1)."""
    x, y = x.contiguous(), y.contiguous()
    (M, D), N = x.shape, y.shape[0]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _rbf_fwd[(triton.cdiv(M, 64), triton.cdiv(N, 64))](
        x, y, log_scale, out, M, N, D,
        BLOCK_M=64, BLOCK_N=64, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=8,
    )  # fmt: skip
    return out, (x, y, log_scale)


# --- backward ---
@triton.jit
def _rbf_bwd(
    G, X, Y, LogScale, DX, Parts, M, N, D, each, g_m, g_n,
    SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_x = (m[:, None] < M) & (d < D)
    inverse = tl.exp(-2.0 * tl.load(LogScale).to(tl.float32))
    x = tl.load(X + m[:, None] * D + d, mask=in_x, other=0.0).to(tl.float32)
    pull = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(split * each, tl.minimum((split + 1) * each, N), BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        y = tl.load(Y + n[:, None] * D + d, mask=(n[:, None] < N) & (d < D), other=0.0).to(tl.float32)
        inside = (m[:, None] < M) & (n[None, :] < N)
        g = tl.load(G + m[:, None] * g_m + n[None, :] * g_n, mask=inside, other=0.0).to(tl.float32)
        square = _squared_distances(x, y)
        w = g * tl.exp(-0.5 * inverse * square)
        pull = tl.dot(w, y, pull, input_precision="tf32x3")
        weight += tl.sum(w, 1)
        if SCALE:
            moment += tl.sum(w * square, 1)
    share = DX + split.to(tl.int64) * M * D
    tl.store(share + m[:, None] * D + d, inverse * (pull - weight[:, None] * x), mask=in_x)
    if SCALE:
        tl.store(Parts + split * tl.num_programs(0) + tile, inverse * tl.sum(moment, 0))


def backward(saved, grad_out, needs=None):
    x, y, log_scale = saved
    (M, D), N = x.shape, y.shape[0]
    g_m, g_n = grad_out.stride()
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_D": max(16, triton.next_power_of_2(D)), "num_warps": 4}

    def split(own, other):
        # The walked set is cut, until every one of 132 processors has four programs to hide latency with.
        splits = max(1, min(triton.cdiv(528, triton.cdiv(own, 32)), other // 256))
        each = triton.cdiv(triton.cdiv(other, splits), 32) * 32
        return each, (triton.cdiv(own, 32), triton.cdiv(other, each))

    each, grid = split(M, N)
    dx = torch.empty(grid[1], M, D, device=x.device, dtype=torch.float32)
    parts = torch.empty(grid, device=x.device, dtype=torch.float32)
    _rbf_bwd[grid](grad_out, x, y, log_scale, dx, parts, M, N, D, each, g_m, g_n, SCALE=True, **sizes)
    each, grid = split(N, M)
    dy = torch.empty(grid[1], N, D, device=x.device, dtype=torch.float32)
    _rbf_bwd[grid](grad_out, y, x, log_scale, dy, parts, N, M, D, each, g_n, g_m, SCALE=False, **sizes)
    return dx.sum(0).to(x.dtype), dy.sum(0).to(y.dtype), parts.sum().to(log_scale.dtype).view(1)


# --- check ---
SWEEP = ({"M": 64, "N": 48, "D": 16}, {"M": 77, "N": 45, "D": 23}, {"M": 16, "N": 40, "D": 32, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "D": 64, "dtype": "float32"},)


def make_args(M, N, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(M, D, generator=g), torch.randn(N, D, generator=g)
    # A length scale of the order of the distances.
    log_scale = torch.tensor([0.5 * D]).log() * 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y, log_scale))


def reference(x, y, log_scale):
    x32, y32 = x.float(), y.float()
    square = x32.square().sum(1)[:, None] - 2.0 * x32 @ y32.t() + y32.square().sum(1)
    return (-0.5 * (-2.0 * log_scale.float()).exp() * square.clamp(min=0.0)).exp().to(x.dtype)
