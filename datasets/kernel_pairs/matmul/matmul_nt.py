"""C = A B^T on strided operands: dA and dB are two more products of one tiled kernel, transposed by strides alone."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_nt",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _matmul_nt_fwd(
    A, B, C, M, N, K, a_m, a_k, b_n, b_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP * tiles_n)) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    m = ((first + pid % (GROUP * tiles_n) % height) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = ((pid % (GROUP * tiles_n) // height) * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = A + m[:, None] * a_m + k[None, :] * a_k
    b_at = B + n[None, :] * b_n + k[:, None] * b_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
        b = tl.load(b_at, mask=(n[None, :] < N) & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    tl.store(C + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(a, b):
    M, K = a.shape
    N = b.shape[0]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    _matmul_nt_fwd[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
        a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // a.element_size(), GROUP=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    return c, (a, b)


# --- backward ---
@triton.jit
def _matmul_nt_bwd(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = L (M, K) R (K, N); which axis of the saved operand is summed is only a matter of strides.
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP * tiles_n)) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    m = ((first + pid % (GROUP * tiles_n) % height) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = ((pid % (GROUP * tiles_n) // height) * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    l_at = L + m[:, None] * l_m + k[None, :] * l_k
    r_at = R + k[:, None] * r_k + n[None, :] * r_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(l_at, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
        right = tl.load(r_at, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc)
        l_at += BLOCK_K * l_k
        r_at += BLOCK_K * r_k
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _product(left, right):
    M, K = left.shape
    N = right.shape[1]
    out = torch.empty(M, N, device=right.device, dtype=right.dtype)
    _matmul_nt_bwd[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
        left, right, out, M, N, K, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // right.element_size(), GROUP=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def backward(saved, grad_c, needs=None):
    a, b = saved
    need_a, need_b = needs or (True, True)
    da = _product(grad_c, b) if need_a else None
    db = _product(grad_c.t(), a) if need_b else None
    return da, db


# --- check ---
SWEEP = (
    {"M": 32, "N": 16, "K": 64},
    {"M": 150, "N": 37, "K": 45, "dtype": "float16"},
    {"M": 24, "N": 40, "K": 72, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 2048, "K": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, K, generator=g), torch.randn(N, K, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(a, b):
    return a @ b.t()
