"""[x1, x2] W without the concatenation: two sums enter one accumulator, and two ranges of W's rows leave the gradients.

y = x1 W[:K1] + x2 W[K1:],    dx1 = dY W[:K1]^T,    dx2 = dY W[K1:]^T,    dW[:K1] = x1^T dY,    dW[K1:] = x2^T dY.
dX is one kernel launched per input with a row offset into W, so that an input without gradient costs nothing. dW is one
launch over row tiles of both ranges: no tile straddles the seam, the tile's number says which input it belongs to.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "linear_cat_two_inputs",
    "family": "matmul",
    "op": "linear_cat",
    "schema": 1,
    "techniques": ("owner-grid", "one-launch", "column-owner"),
    "saves": (),
    "grads": ("x1", "x2", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_product(acc, X, W, m, n, M, N, K, BLOCK_K: tl.constexpr):
    """acc + x W for the rows m and columns n of one input; W points at the first of its rows."""
    k = tl.arange(0, BLOCK_K)
    x_at = X + m[:, None] * K + k[None, :]
    w_at = W + k[:, None] * N + n[None, :]
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
        x_at += BLOCK_K
        w_at += BLOCK_K * N
    return acc


@triton.jit
def _cat_linear_fwd(X1, X2, W, Y, M, N, K1, K2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = _add_product(acc, X1, W, m, n, M, N, K1, BLOCK_K)
    acc = _add_product(acc, X2, W + K1 * N, m, n, M, N, K2, BLOCK_K)
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x1, x2, weight):
    x1, x2, weight = x1.contiguous(), x2.contiguous(), weight.contiguous()
    (M, K1), K2, N = x1.shape, x2.shape[1], weight.shape[1]
    if weight.shape[0] != K1 + K2:
        raise ValueError("the weight needs a row for each feature of both inputs")
    y = torch.empty(M, N, device=x1.device, dtype=x1.dtype)
    BM, BN = _side(M), _side(N)
    _cat_linear_fwd[(triton.cdiv(N, BN), triton.cdiv(M, BM))](
        x1, x2, weight, y, M, N, K1, K2,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_side(min(K1, K2), 128 // x1.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x1, x2, weight)


# --- backward ---
@triton.jit
def _part_dx(
    DY, W, DX, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # W is one input's range of rows. GROUP row tiles are walked before the next column tile: dY stays in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        dx = tl.dot(DY.load([m, n]), W.load([k, n]).T, dx)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], dx, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _range_dw(X, DY, DW, k, n, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile at row k of one input's range of dW, which starts at DW."""
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        acc = tl.dot(X.load([m, k]).T, DY.load([m, n]), acc)
    rows, cols = k.to(tl.int64) + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    tl.store(DW + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < K) & (cols[None, :] < N))


@triton.jit
def _cat_dw(X1, X2, DY, DW, M, N, K1, K2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Row tiles are the fast axis: programs that run together share their columns of dY.
    tiles1 = tl.cdiv(K1, BLOCK_K)
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N
    if tile < tiles1:
        _range_dw(X1, DY, DW, tile * BLOCK_K, n, M, N, K1, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        DW += tl.cast(K1, tl.int64) * N
        _range_dw(X2, DY, DW, (tile - tiles1) * BLOCK_K, n, M, N, K2, BLOCK_M, BLOCK_N, BLOCK_K)


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
    x1, x2, weight = saved
    (M, K1), K2, N = x1.shape, x2.shape[1], weight.shape[1]
    step = 128 // x1.element_size()
    dxs = []
    for x, rows, need in ((x1, weight[:K1], needs[0]), (x2, weight[K1:], needs[1])):
        dx = torch.empty_like(x) if need else None
        if need:
            K = x.shape[1]
            BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(step, _up(N))
            _part_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
                _tiles(grad_y, BM, BN), _tiles(rows, BK, BN), dx, M, N, K,
                GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
            )  # fmt: skip
        dxs.append(dx)
    dw = None
    if needs[2]:
        dw = torch.empty_like(weight)
        BK, BN, BM = min(128, _up(min(K1, K2))), min(256, _up(N)), min(step, _up(M))
        _cat_dw[(triton.cdiv(K1, BK) + triton.cdiv(K2, BK), triton.cdiv(N, BN))](
            _tiles(x1, BM, BK), _tiles(x2, BM, BK), _tiles(grad_y, BM, BN), dw, M, N, K1, K2,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return *dxs, dw


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K1": 48, "K2": 16},
    {"M": 75, "N": 70, "K1": 41, "K2": 29},
    {"M": 40, "N": 136, "K1": 24, "K2": 150, "dtype": "bfloat16"},
    {"M": 130, "N": 20, "K1": 17, "K2": 33, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K1": 4096, "K2": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K1, K2, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, K1, generator=g),
        torch.randn(M, K2, generator=g),
        torch.randn(K1 + K2, N, generator=g) * (K1 + K2) ** -0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x1, x2, weight):
    return torch.cat((x1, x2), 1) @ weight
