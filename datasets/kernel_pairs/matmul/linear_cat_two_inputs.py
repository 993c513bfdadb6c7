"""[x1, x2] W without the concatenation: two sums enter one accumulator, and two ranges of W's rows leave the gradients.

y = x1 W[:K1] + x2 W[K1:],    dx1 = dY W[:K1]^T,    dx2 = dY W[K1:]^T,    dW[:K1] = x1^T dY,    dW[K1:] = x2^T dY.
dX is one kernel launched per input with a row offset into W, so that an input without gradient costs nothing. dW is one
launch over row tiles of both ranges: no tile straddles the seam, the tile's number says which input it belongs to.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_cat_two_inputs",
    "family": "matmul",
    "op": "linear_cat",
    "schema": 1,
    "techniques": ("owner-grid", "one-launch", "column-owner", "strided-cotangent"),
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
    DY, W, DX, M, N, K, first_row, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    dy_at = DY + m[:, None] * dy_m + n[None, :] * dy_n
    wt_at = W + (first_row + k)[None, :] * N + n[:, None]
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for left in range(N, 0, -BLOCK_N):
        dy = tl.load(dy_at, mask=(m[:, None] < M) & (n[None, :] < left), other=0.0)
        wt = tl.load(wt_at, mask=(n[:, None] < left) & (k[None, :] < K), other=0.0)
        dx = tl.dot(dy, wt, dx)
        dy_at += BLOCK_N * dy_n
        wt_at += BLOCK_N
    tl.store(DX + m[:, None] * K + k[None, :], dx, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _range_dw(
    X, DY, DW, k, n, M, N, K, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows k of one input's range of dW, which starts at DW."""
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        xt = tl.load(X + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, dy, acc)
    tl.store(DW + k[:, None] * N + n[None, :], acc, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _cat_dw(
    X1, X2, DY, DW, M, N, K1, K2, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    tiles1 = tl.cdiv(K1, BLOCK_K)
    if tile < tiles1:
        k = tile.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        _range_dw(X1, DY, DW, k, n, M, N, K1, dy_m, dy_n, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        k = (tile - tiles1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        _range_dw(X2, DY, DW + K1 * N, k, n, M, N, K2, dy_m, dy_n, BLOCK_M, BLOCK_N, BLOCK_K)


def backward(saved, grad_y, needs=(True, True, True)):
    x1, x2, weight = saved
    (M, K1), K2, N = x1.shape, x2.shape[1], weight.shape[1]
    BM, BN, step = _side(M), _side(N), 128 // x1.element_size()
    dxs = []
    for x, first_row, need in ((x1, 0, needs[0]), (x2, K1, needs[1])):
        dx = torch.empty_like(x) if need else None
        if need:
            BK = _side(x.shape[1])
            _part_dx[(triton.cdiv(x.shape[1], BK), triton.cdiv(M, BM))](
                grad_y, weight, dx, M, N, x.shape[1], first_row, *grad_y.stride(),
                BLOCK_M=BM, BLOCK_N=min(BN, step), BLOCK_K=BK, num_warps=16, num_stages=3,
            )  # fmt: skip
        dxs.append(dx)
    dw = None
    if needs[2]:
        dw = torch.empty_like(weight)
        BK = _side(min(K1, K2))
        _cat_dw[(triton.cdiv(N, BN), triton.cdiv(K1, BK) + triton.cdiv(K2, BK))](
            x1, x2, grad_y, dw, M, N, K1, K2, *grad_y.stride(),
            BLOCK_M=min(BM, step), BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return *dxs, dw


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K1": 48, "K2": 16},
    {"M": 75, "N": 70, "K1": 41, "K2": 29},
    {"M": 40, "N": 136, "K1": 24, "K2": 150, "dtype": "bfloat16"},
    {"M": 130, "N": 20, "K1": 17, "K2": 33, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 2048, "K1": 2048, "K2": 1024, "dtype": "bfloat16"},)


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
