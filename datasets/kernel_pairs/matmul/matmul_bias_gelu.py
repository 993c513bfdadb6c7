"""GELU(x W + b) with the activation in the product's epilogue: dz and dbias partials in one pass, then two products."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_bias_gelu",
    "family": "matmul",
    "op": "linear_gelu",
    "schema": 1,
    "techniques": ("two-stage-partials", "owner-grid"),
    "saves": ("z: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _linear_gelu_fwd(
    X, W, Bias, Y, Z, M, N, K, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        x = tl.load(X + m[:, None] * K + kk[None, :], mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        w = tl.load(W + kk[:, None] * w_k + n[None, :] * w_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
    z = acc + tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    # tanh(u) = 2 sigmoid(2u) - 1 turns the tanh form of GELU into z sigmoid(2u).
    gate = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(Z + m[:, None] * N + n[None, :], z, mask=inside)
    tl.store(Y + m[:, None] * N + n[None, :], z * gate, mask=inside)


def forward(x, weight, bias):
    x = x.contiguous()
    M, K = x.shape
    N = weight.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    z = torch.empty_like(y)
    _linear_gelu_fwd[(triton.cdiv(M, 128), triton.cdiv(N, 128))](
        x, weight, bias, y, z, M, N, K, weight.stride(0), weight.stride(1),
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, bias, z)


# --- backward ---
@triton.jit
def _gelu_bias_bwd(DY, Z, DZ, DBP, M, N, dz_m, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # The summed dz must be complete before a product can use it, so the elementwise part is a pass of its own.
    part = tl.program_id(0).to(tl.int64)
    m = part * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    dz = dy * gate * (1.0 + z * (1.0 - gate) * slope)
    tl.store(DZ + m[:, None] * dz_m + n[None, :], dz, mask=inside)
    tl.store(DBP + part * N + n, tl.sum(dz, 0), mask=n < N)


@triton.jit
def _linear_gelu_product(
    L, R, OUT, M, N, K, TURN_L: tl.constexpr, TURN_R: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP * tiles_n)) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    m = (first + pid % (GROUP * tiles_n) % height) * BLOCK_M
    n = (pid % (GROUP * tiles_n) // height) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = L.load([k, m]).T if TURN_L else L.load([m, k])
        right = R.load([n, k]).T if TURN_R else R.load([k, n])
        acc = tl.dot(left, right, acc)
    rows = m.to(tl.int64) + tl.arange(0, BLOCK_M)
    cols = n + tl.arange(0, BLOCK_N)
    tl.store(OUT + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


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
    x, weight, bias, z = saved
    need_x, need_w, _ = needs or (True, True, True)
    (M, K), N = x.shape, weight.shape[1]
    width = triton.cdiv(N, 8) * 8
    dz = torch.empty(M, width, device=z.device, dtype=z.dtype)[:, :N]
    ROWS = 64
    parts = triton.cdiv(M, ROWS)
    db_parts = torch.empty(parts, N, device=z.device, dtype=torch.float32)
    _gelu_bias_bwd[(parts, triton.cdiv(N, 64))](
        grad_y, z, dz, db_parts, M, N, width, grad_y.stride(0), grad_y.stride(1),
        BLOCK_M=ROWS, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    dx = dw = None
    depth = 128 // x.element_size()
    if need_x:
        dx = torch.empty_like(x)
        BM, BN, BK = min(256, _up(M)), min(128, _up(K)), min(depth, _up(N))
        _linear_gelu_product[(triton.cdiv(M, BM) * triton.cdiv(K, BN),)](
            _tiles(dz, BM, BK), _tiles(weight, BN, BK), dx, M, K, N, TURN_L=False, TURN_R=True,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_w:
        dw = torch.empty(K, N, device=x.device, dtype=weight.dtype)
        BM, BN, BK = min(128, _up(K)), min(256, _up(N)), min(depth, _up(M))
        _linear_gelu_product[(triton.cdiv(K, BM) * triton.cdiv(N, BN),)](
            _tiles(x, BK, BM), _tiles(dz, BK, BN), dw, K, N, M, TURN_L=True, TURN_R=False,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw, db_parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 16},
    {"M": 75, "N": 150, "K": 41, "dtype": "float16"},
    {"M": 32, "N": 24, "K": 80, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "K": 1024, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, K, generator=g),
        torch.randn(K, N, generator=g) * K**-0.5,
        torch.randn(N, generator=g) * 0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias):
    z = (x @ weight).float() + bias.float()
    return torch.nn.functional.gelu(z, approximate="tanh").to(x.dtype)
