"""Matrix product with a bias: x (M, K) times w (K, N) plus b (N,)."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="matmul_bias",
    family="matmul",
    op="linear",
    schema=1,
    techniques=("tiled", "three-kernels"),
    saves=(),
    grads=("x", "w", "b"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _linear_fwd(X, W, B, Y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(X + i[:, None] * K + k[None, :], mask=(i[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None] * N + j[None, :], mask=(k[:, None] < K) & (j[None, :] < N), other=0.0)
        acc += tl.dot(x, w)
    acc += tl.load(B + j, mask=j < N, other=0.0)[None, :]
    tl.store(Y + i[:, None] * N + j[None, :], acc, mask=(i[:, None] < M) & (j[None, :] < N))


def forward(x, w, b):
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _linear_fwd[(triton.cdiv(M, 16), triton.cdiv(N, 16))](x, w, b, y, M, N, K, BM=16, BN=16, BK=16)
    return y, (x, w, b)


# --- backward ---
@triton.jit
def _linear_dx(DY, W, DX, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        j = start + tl.arange(0, BN)
        g = tl.load(DY + i[:, None] * N + j[None, :], mask=(i[:, None] < M) & (j[None, :] < N), other=0.0)
        w = tl.load(W + k[None, :] * N + j[:, None], mask=(k[None, :] < K) & (j[:, None] < N), other=0.0)
        acc += tl.dot(g, w)
    tl.store(DX + i[:, None] * K + k[None, :], acc, mask=(i[:, None] < M) & (k[None, :] < K))


@triton.jit
def _linear_dw(DY, X, DW, DB, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BK, BN), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        i = start + tl.arange(0, BM)
        x = tl.load(X + i[None, :] * K + k[:, None], mask=(i[None, :] < M) & (k[:, None] < K), other=0.0)
        g = tl.load(DY + i[:, None] * N + j[None, :], mask=(i[:, None] < M) & (j[None, :] < N), other=0.0)
        acc += tl.dot(x, g)
        total += tl.sum(g, 0)
    tl.store(DW + k[:, None] * N + j[None, :], acc, mask=(k[:, None] < K) & (j[None, :] < N))
    if tl.program_id(0) == 0:
        tl.store(DB + j, total, mask=j < N)


def backward(saved, grad_out):
    x, w, b = saved
    (M, K), N = x.shape, w.shape[1]
    g = grad_out.contiguous()
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
    _linear_dx[(triton.cdiv(M, 16), triton.cdiv(K, 16))](g, w, dx, M, N, K, BM=16, BN=16, BK=16)
    _linear_dw[(triton.cdiv(K, 16), triton.cdiv(N, 16))](g, x, dw, db, M, N, K, BM=16, BN=16, BK=16)
    return dx, dw, db


# --- check ---
SWEEP = (dict(M=20, N=24, K=18), dict(M=32, N=32, K=32))


def make_args(M, N, K, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g), torch.randn(N, generator=g)
    return x.to(device), w.to(device), b.to(device)


def reference(x, w, b):
    return x @ w + b
