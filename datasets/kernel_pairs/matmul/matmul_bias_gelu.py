"""GELU(x W + b) with the activation in the product's epilogue: dz and dbias partials in one pass, then two products."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_bias_gelu",
    "family": "matmul",
    "op": "linear_gelu",
    "schema": 1,
    "techniques": ("two-stage-partials", "owner-grid", "strided-cotangent"),
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
def _gelu_bias_bwd(DY, Z, DZ, DBP, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
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
    tl.store(DZ + at, dz, mask=inside)
    tl.store(DBP + part * N + n, tl.sum(dz, 0), mask=n < N)


@triton.jit
def _linear_gelu_product(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(L + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        right = tl.load(R + kk[:, None] * r_k + n[None, :] * r_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _product(left, right):
    M, K = left.shape
    N = right.shape[1]
    out = torch.empty(M, N, device=left.device, dtype=left.dtype)
    _linear_gelu_product[(triton.cdiv(M, 128), triton.cdiv(N, 128))](
        left, right, out, M, N, K, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // left.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def backward(saved, grad_y, needs=None):
    x, weight, bias, z = saved
    need_x, need_w, _ = needs or (True, True, True)
    M, N = z.shape
    dz = torch.empty_like(z)
    db_parts = torch.empty(triton.cdiv(M, 64), N, device=z.device, dtype=torch.float32)
    _gelu_bias_bwd[(triton.cdiv(M, 64), triton.cdiv(N, 64))](
        grad_y, z, dz, db_parts, M, N, grad_y.stride(0), grad_y.stride(1), BLOCK_M=64, BLOCK_N=64, num_warps=4
    )
    dx = _product(dz, weight.t()) if need_x else None
    dw = _product(x.t(), dz) if need_w else None
    return dx, dw, db_parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 16},
    {"M": 75, "N": 150, "K": 41, "dtype": "float16"},
    {"M": 32, "N": 24, "K": 80, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 4096, "K": 1024, "dtype": "bfloat16"},)


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
