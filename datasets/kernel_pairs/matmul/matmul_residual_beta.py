"""alpha A B + beta C with learned scalars: five gradients out of two products and one stream.

dA = alpha dY B^T,  dB = alpha A^T dY,  dC = beta dY,  dalpha = <dY, A B>,  dbeta = <dY, C>.
A B is not kept for dalpha: <dY, A B> = <dY B^T, A>, and dY B^T is what the program of dA has in its accumulator. It
multiplies that by its own tile of A and stores one partial sum. dbeta rides on the stream that writes dC.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_residual_beta",
    "family": "matmul",
    "op": "addmm",
    "schema": 1,
    "techniques": ("epilogue-fusion", "scalar-gradient", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b", "c", "alpha", "beta"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _addmm_fwd(A, B, C, Alpha, Beta, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(A + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(B + k[:, None].to(tl.int64) * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    at = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    c = tl.load(C + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, tl.load(Alpha) * acc + tl.load(Beta) * c, mask=inside)


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(a, b, c, alpha, beta):
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    (M, K), N = a.shape, b.shape[1]
    y = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _addmm_fwd[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
        a, b, c, alpha, beta, y, M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=min(_side(K), 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b, c, alpha, beta)


# --- backward ---
@triton.jit
def _addmm_da(
    DY, A, B, Alpha, DA, Parts, M, N, K, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        bt = tl.load(B + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
        acc = tl.dot(dy, bt, acc)
    at = m[:, None] * K + k[None, :]
    inside = (m[:, None] < M) & (k[None, :] < K)
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Parts + tl.program_id(0), tl.sum(tl.sum(acc * a, 1), 0))
    tl.store(DA + at, tl.load(Alpha) * acc, mask=inside)


@triton.jit
def _addmm_db(
    DY, A, Alpha, DB, M, N, K, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    k = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        at = tl.load(A + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        acc = tl.dot(at, dy, acc)
    tl.store(DB + k[:, None] * N + n[None, :], tl.load(Alpha) * acc, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _addmm_dc(DY, C, Beta, DC, Parts, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # A program keeps its columns and strides over row tiles, so that few partial sums leave.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    beta = tl.load(Beta)
    dot = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        m = start.to(tl.int64) + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < M) & (n[None, :] < N)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n, mask=inside, other=0.0).to(tl.float32)
        dot += dy * tl.load(C + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(DC + m[:, None] * N + n[None, :], beta * dy, mask=inside)
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(dot, 1), 0))


def backward(saved, grad_y, needs=(True,) * 5):
    a, b, c, alpha, beta = saved
    (M, K), N = a.shape, b.shape[1]
    strides = grad_y.stride(0), grad_y.stride(1)
    BLOCK_M, BLOCK_N, BLOCK_K = _side(M), _side(N), _side(K)
    depth = 128 // a.element_size()
    da = db = dc = dalpha = dbeta = None
    if needs[0] or needs[3]:
        da = torch.empty_like(a)
        tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(K, BLOCK_K)
        parts = torch.empty(tiles, device=a.device, dtype=torch.float32)
        _addmm_da[(tiles,)](
            grad_y, a, b, alpha, da, parts, M, N, K, *strides,
            BLOCK_M=BLOCK_M, BLOCK_N=min(BLOCK_N, depth), BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
        dalpha = parts.sum().to(alpha.dtype)
    if needs[1]:
        db = torch.empty_like(b)
        _addmm_db[(triton.cdiv(K, BLOCK_K) * triton.cdiv(N, BLOCK_N),)](
            grad_y, a, alpha, db, M, N, K, *strides,
            BLOCK_M=min(BLOCK_M, depth), BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[2] or needs[4]:
        dc = torch.empty_like(c)
        grid = min(triton.cdiv(M, 16), 64), triton.cdiv(N, BLOCK_N)
        parts = torch.empty(grid, device=a.device, dtype=torch.float32)
        _addmm_dc[grid](grad_y, c, beta, dc, parts, M, N, *strides, BLOCK_M=16, BLOCK_N=BLOCK_N, num_warps=4)
        dbeta = parts.sum().to(beta.dtype)
    return da, db, dc, dalpha, dbeta


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 150, "N": 71, "K": 41},
    {"M": 96, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 40, "N": 90, "K": 16, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 2048, "K": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    matrices = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b, torch.randn(M, N, generator=g)))
    # The scalars are parameters and stay in fp32.
    return *matrices, torch.tensor(0.7, device=device), torch.tensor(-1.3, device=device)


def reference(a, b, c, alpha, beta):
    return (alpha * (a @ b).float() + beta * c.float()).to(a.dtype)
