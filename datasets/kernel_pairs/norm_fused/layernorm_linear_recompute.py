"""LayerNorm and the linear layer behind it as one operator: the normalised x is never stored, in neither direction.

The forward normalises tiles of x on their way into the product. So does the backward for the weight's gradient dy^T n:
only mean and 1/std of each row are saved. The gradient of n is a plain product into the buffer of dx, where a row pass
turns it into dx in place and sums the shares of gamma and beta.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "layernorm_linear_recompute",
    "family": "norm_fused",
    "op": "layer_norm_linear",
    "schema": 1,
    "techniques": (
        "prologue-fusion", "recompute", "in-place", "saved-statistics", "two-stage-partials",
    ),
    "saves": ("stats: fp32 (2, M)",),
    "grads": ("x", "gamma", "beta", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _ln_row_stats(X, Stats, M, K, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(X + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / K
    d = tl.where(k < K, x - mean, 0.0)
    tl.store(Stats + row, mean)
    tl.store(Stats + M + row, tl.rsqrt(tl.sum(d * d, 0) / K + eps))


@triton.jit
def _normed_tile(X, Gamma, Beta, mean, rstd, m, k, M, K):
    """A tile of LayerNorm(x) in the dtype of x, zero outside."""
    ok = (m[:, None] < M) & (k[None, :] < K)
    x = tl.load(X + m[:, None] * K + k[None, :], mask=ok, other=0.0)
    gamma = tl.load(Gamma + k, mask=k < K, other=0.0).to(tl.float32)
    beta = tl.load(Beta + k, mask=k < K, other=0.0).to(tl.float32)
    n = (x.to(tl.float32) - mean[:, None]) * rstd[:, None] * gamma[None, :] + beta[None, :]
    return tl.where(ok, n, 0.0).to(x.dtype)


@triton.jit
def _ln_linear_fwd(
    X, Gamma, Beta, Stats, W, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mean = tl.load(Stats + m, mask=m < M, other=0.0)
    rstd = tl.load(Stats + M + m, mask=m < M, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        normed = _normed_tile(X, Gamma, Beta, mean, rstd, m, k, M, K)
        w = tl.load(W + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        acc = tl.dot(normed, w, acc)
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, gamma, beta, weight, eps=1e-5):
    x, weight = x.contiguous(), weight.contiguous()
    M, K = x.shape
    N = weight.shape[0]
    stats = torch.empty(2, M, device=x.device, dtype=torch.float32)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(K)
    _ln_row_stats[(M,)](x, stats, M, K, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    _ln_linear_fwd[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
        x, gamma, beta, stats, weight, y, M, N, K,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, gamma, beta, weight, stats)


# --- backward ---
@triton.jit
def _dnormed(
    DY, W, DN, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([m, n]), W.load([n, k]), acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DN + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _ln_rows_in_place(X, Gamma, Stats, DX, Parts, M, K, BLOCK: tl.constexpr):
    # DX holds the gradient of the normalised rows; each is replaced by dx once it has been read whole.
    pid = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    ok = k < K
    gamma = tl.load(Gamma + k, mask=ok, other=0.0).to(tl.float32)
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    for row in range(pid, M, tl.num_programs(0)):
        dn = tl.load(DX + row * K + k, mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(Stats + M + row)
        xhat = (tl.load(X + row * K + k, mask=ok, other=0.0).to(tl.float32) - tl.load(Stats + row)) * rstd
        dgamma += dn * xhat
        dbeta += dn
        g = dn * gamma
        c1 = tl.sum(g * xhat, 0) / K
        c2 = tl.sum(g, 0) / K
        tl.store(DX + row * K + k, rstd * (g - c2 - xhat * c1), mask=ok)
    tl.store(Parts + 2 * pid * K + k, dgamma, mask=ok)
    tl.store(Parts + (2 * pid + 1) * K + k, dbeta, mask=ok)


@triton.jit
def _dweight(
    DY, X, Gamma, Beta, Stats, DW, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(N, BLOCK_N) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    first_n, first_k = (band * GROUP + inside % height) * BLOCK_N, inside // height * BLOCK_K
    # dW^T = normed^T dy: what is normalised in registers is the left operand, which a product takes from there.
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    k = first_k + tl.arange(0, BLOCK_K)
    gamma = tl.load(Gamma + k, mask=k < K, other=0.0).to(tl.float32)
    beta = tl.load(Beta + k, mask=k < K, other=0.0).to(tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        mean = tl.load(Stats + m, mask=m < M, other=0.0)
        rstd = tl.load(Stats + M + m, mask=m < M, other=0.0)
        # Rows past the end meet a dy of zeros.
        x = X.load([start, first_k]).T
        normed = (x.to(tl.float32) - mean[None, :]) * rstd[None, :] * gamma[:, None] + beta[:, None]
        acc = tl.dot(normed.to(x.dtype), DY.load([start, first_n]), acc)
    n = first_n + tl.arange(0, BLOCK_N)
    tl.store(DW + n[:, None].to(tl.int64) * K + k[None, :], acc.T, mask=(n[:, None] < N) & (k[None, :] < K))


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) != 1 or matrix.stride(0) % step or matrix.stride(0) < width or matrix.storage_offset() % step:
        dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, gamma, beta, weight, stats = saved
    M, K = x.shape
    N = weight.shape[0]
    needs = needs or (True, True, True, True)
    step = 128 // x.element_size()
    dx = dgamma = dbeta = dweight = None
    if any(needs[:3]):
        dx = torch.empty_like(x)
        BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(step, _up(N))
        _dnormed[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(weight, BN, BK), dx, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        BLOCK = triton.next_power_of_2(K)
        warps = max(1, min(16, BLOCK // 256))
        # One wave: 1024 threads for each of 132 processors.
        programs = min(132 * 32 // warps, triton.cdiv(M, 2))
        parts = torch.empty(programs, 2, K, device=x.device, dtype=torch.float32)
        _ln_rows_in_place[(programs,)](x, gamma, stats, dx, parts, M, K, BLOCK=BLOCK, num_warps=warps)
        dgamma, dbeta = parts.sum(0).to(gamma.dtype)
    if needs[3]:
        dweight = torch.empty_like(weight)
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(step, _up(M))
        _dweight[(triton.cdiv(N, BN) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(x, BM, BK), gamma, beta, stats, dweight, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dgamma, dbeta, dweight


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 71, "N": 45, "K": 37, "dtype": "float16"},
    {"M": 40, "N": 24, "K": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, K, generator=g),
        torch.rand(K, generator=g) + 0.5,
        torch.randn(K, generator=g) * 0.3,
        torch.randn(N, K, generator=g) * K**-0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, gamma, beta, weight, eps=1e-5):
    normed = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), gamma.float(), beta.float(), eps)
    return normed.to(x.dtype) @ weight.t()
