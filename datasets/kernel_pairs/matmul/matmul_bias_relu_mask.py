"""relu(x W + b): the mask is read off the saved output while both gradient products load their tiles of dy.

dz = dy [y > 0] is never written. dX = dz W^T walks the columns, dW = x^T dz walks the rows, and each masks the tile of
dy that it loads anyway: masked in registers, it is the left operand of both products. A small pass sums dz to db.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_bias_relu_mask",
    "family": "matmul",
    "op": "linear_relu",
    "schema": 1,
    "techniques": ("prologue-fusion", "saved-output", "owner-grid", "two-stage-partials"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _linear_relu_fwd(X, W, Bias, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Column tiles are the fast axis: programs that run together share their rows of x.
    tile = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    m = (tile // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_tile = X + m[:, None] * K + k[None, :]
    w_tile = W + k[:, None] * N + n[None, :]
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(x_tile, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        w = tl.load(w_tile, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        z = tl.dot(x, w, z)
        x_tile += BLOCK_K
        w_tile += BLOCK_K * N
    y = tl.where(z > 0.0, z, 0.0)
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, weight, bias):
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _linear_relu_fwd[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
        x, weight, bias, y, M, N, K,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, y, bias.dtype)


# --- backward ---
@triton.jit
def _masked(DY, Y, row, col):
    """Tile dy [y > 0]. The saved output decides: an output that was rounded to zero passes no gradient."""
    dy = DY.load([row, col])
    return tl.where(Y.load([row, col]) > 0.0, dy, 0.0)


@triton.jit
def _relu_dx(
    DY, Y, W, DX, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        dx = tl.dot(_masked(DY, Y, m, n), W.load([k, n]).T, dx)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], dx, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _relu_dw(
    DY, Y, X, DW, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(N, BLOCK_N) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    n, k = (band * GROUP + inside % height) * BLOCK_N, inside // height * BLOCK_K
    # dW^T = dz^T x: what is masked in registers is the left operand, which a product takes from there.
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for m in range(0, M, BLOCK_M):
        acc = tl.dot(_masked(DY, Y, m, n).T, X.load([m, k]), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    tl.store(DW + rows[:, None].to(tl.int64) * N + cols[None, :], acc.T, mask=(rows[:, None] < K) & (cols[None, :] < N))


@triton.jit
def _relu_db(DY, Y, Parts, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    m, n = part * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Y + m[:, None] * N + n[None, :], mask=inside, other=0.0)
    tl.store(Parts + part * N + n, tl.sum(tl.where(y > 0.0, dy, 0.0), 0), mask=n < N)


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


def backward(saved, grad_y, needs=(True, True, True)):
    x, weight, y, bias_dtype = saved
    (M, K), N = x.shape, weight.shape[1]
    dx = dw = db = None
    depth = 128 // x.element_size()
    if needs[0]:
        dx = torch.empty_like(x)
        BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(depth, _up(N))
        _relu_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(y, BM, BN), _tiles(weight, BK, BN), dx, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty_like(weight)
        BN, BK, BM = min(128, _up(N)), min(256, _up(K)), min(depth, _up(M))
        _relu_dw[(triton.cdiv(N, BN) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(y, BM, BN), _tiles(x, BM, BK), dw, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[2]:
        ROWS = 128
        bands = triton.cdiv(M, ROWS)
        parts = torch.empty(bands, N, device=x.device, dtype=torch.float32)
        _relu_db[(bands, triton.cdiv(N, 64))](
            grad_y, y, parts, M, N, *grad_y.stride(), BLOCK_M=ROWS, BLOCK_N=64, num_warps=4
        )
        db = parts.sum(0).to(bias_dtype)
    return dx, dw, db


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "K": 32},
    {"M": 75, "N": 150, "K": 41},
    {"M": 32, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 48, "N": 40, "K": 16, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    bias = 0.5 * torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias):
    return torch.relu((x @ weight).float() + bias.float()).to(x.dtype)
