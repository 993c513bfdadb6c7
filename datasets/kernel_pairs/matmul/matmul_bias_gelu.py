"""Linear layer with bias and GELU in the epilogue: one pass turns dy into dz and dbias partials, two GEMMs follow."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_bias_gelu",
    "family": "matmul",
    "op": "linear_gelu",
    "schema": 1,
    "techniques": ("tensor-core", "epilogue-fusion", "saved-preactivation", "two-stage-partials", "strided-cotangent"),
    "saves": ("z: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _linear_gelu_fwd(X, W, Bias, Z, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k.to(tl.int64)[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
    acc += tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    tl.store(Z + at, acc, mask=inside)
    tl.store(Y + at, 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476)), mask=inside)


def _tile(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    z, y = (torch.empty(M, N, device=x.device, dtype=x.dtype) for _ in range(2))
    BM, BN = _tile(M), _tile(N)
    _linear_gelu_fwd[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        x, weight, bias, z, y, M, N, K, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_tile(K, 128 // x.element_size()), num_warps=8
    )
    return y, (x, weight, z)


# --- backward ---
@triton.jit
def _gelu_bias_bwd(DY, Z, DZ, Parts, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    z = tl.load(Z + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=inside, other=0.0).to(tl.float32)
    cdf = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
    dz = dy * (cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    tl.store(DZ + m[:, None] * N + n[None, :], dz, mask=inside)
    tl.store(Parts + tl.program_id(0) * N + n, tl.sum(dz, 0), mask=n < N)


@triton.jit
def _product(A, B, C, M, N, K, a_m, a_k, b_k, b_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(A + m[:, None] * a_m + k[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(B + k[:, None] * b_k + n[None, :] * b_n, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(C + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _multiply(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BM, BN = _tile(M), _tile(N)
    _product[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        a, b, c, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_tile(K, 128 // a.element_size()), num_warps=8,
    )  # fmt: skip
    return c


def backward(saved, grad_y, needs=(True, True, True)):
    x, weight, z = saved
    M, N = z.shape
    BM, BN = 32, _tile(N, 64)
    dz = torch.empty_like(z)
    parts = torch.empty(triton.cdiv(M, BM), N, device=x.device, dtype=torch.float32)
    _gelu_bias_bwd[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        grad_y, z, dz, parts, M, N, grad_y.stride(0), grad_y.stride(1), BLOCK_M=BM, BLOCK_N=BN
    )
    dx = _multiply(dz, weight.T) if needs[0] else None
    dw = _multiply(x.T, dz) if needs[1] else None
    return dx, dw, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = ({"M": 48, "N": 32, "K": 32}, {"M": 41, "N": 37, "K": 27}, {"M": 16, "N": 64, "K": 32, "dtype": "float16"})


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) / K**0.5, torch.randn(N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias):
    z = x.float() @ weight.float() + bias.float()
    return torch.nn.functional.gelu(z).to(x.dtype)
