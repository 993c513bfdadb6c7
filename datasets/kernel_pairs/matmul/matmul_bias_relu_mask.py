"""relu(x W + b): the mask is read off the saved output while both gradient products load their tiles of dy.

dz = dy [y > 0] is never written. dX = dz W^T walks the columns, dW = x^T dz walks the rows, and each masks the tile of
dy that it loads anyway. The dW programs of the first row tile of W add up their columns of dz on the way: that is db.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_bias_relu_mask",
    "family": "matmul",
    "op": "linear_relu",
    "schema": 1,
    "techniques": ("prologue-fusion", "saved-output", "owner-grid", "column-owner", "strided-cotangent"),
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
def _masked_dy(DY, Y, m, n, M, N, dy_m, dy_n):
    """Tile dy [y > 0]. The saved output decides: an output that was rounded to zero passes no gradient."""
    inside = (m[:, None] < M) & (n[None, :] < N)
    dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=inside, other=0.0)
    y = tl.load(Y + m[:, None] * N + n[None, :], mask=inside, other=0.0)
    return tl.where(y > 0.0, dy, 0.0)


@triton.jit
def _relu_dx(DY, Y, W, DX, M, N, K, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile = tl.program_id(0)
    columns = tl.cdiv(K, BLOCK_K)
    m = (tile // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tile % columns).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dz = _masked_dy(DY, Y, m, n, M, N, dy_m, dy_n)
        wt = tl.load(W + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
        dx = tl.dot(dz.to(wt.dtype), wt, dx)
    tl.store(DX + m[:, None] * K + k[None, :], dx, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _relu_dw_db(
    DY, Y, X, DW, DB, M, N, K, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Row tiles of W are the slow axis, so the programs that also sum the bias start first.
    tile = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    row_tile = tile // columns
    k = row_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    n = (tile % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        dz = _masked_dy(DY, Y, m, n, M, N, dy_m, dy_n)
        xt = tl.load(X + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        dw = tl.dot(xt, dz.to(xt.dtype), dw)
        if row_tile == 0:
            db += dz.to(tl.float32)
    tl.store(DW + k[:, None].to(tl.int64) * N + n[None, :], dw, mask=(k[:, None] < K) & (n[None, :] < N))
    if row_tile == 0:
        tl.store(DB + n, tl.sum(db, 0), mask=n < N)


def backward(saved, grad_y, needs=(True, True, True)):
    x, weight, y, bias_dtype = saved
    (M, K), N = x.shape, weight.shape[1]
    dx = dw = db = None
    depth = 128 // x.element_size()
    if needs[0]:
        dx = torch.empty_like(x)
        _relu_dx[(triton.cdiv(M, 128) * triton.cdiv(K, 128),)](
            grad_y, y, weight, dx, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=128, BLOCK_N=depth, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[1] or needs[2]:
        # One product gives both; the bias alone is rarely asked for.
        dw = torch.empty_like(weight)
        db = torch.empty(N, device=x.device, dtype=bias_dtype)
        _relu_dw_db[(triton.cdiv(K, 128) * triton.cdiv(N, 128),)](
            grad_y, y, x, dw, db, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=depth, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dw, db


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "K": 32},
    {"M": 75, "N": 150, "K": 41},
    {"M": 32, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 48, "N": 40, "K": 16, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 1024, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    bias = 0.5 * torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias):
    return torch.relu((x @ weight).float() + bias.float()).to(x.dtype)
