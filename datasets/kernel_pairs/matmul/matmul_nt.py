"""C = A @ B^T: both gradients are the same GEMM with other strides and another reduced axis, nothing is transposed."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_nt",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("tensor-core", "strided-cotangent", "l2-swizzle", "shared-kernel"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gemm(
    A, B, C, M, N, K, a_m, a_k, b_k, b_n, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tiles are numbered down GROUP rows before the next column, so that concurrent programs share rows of B in L2.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    tile_m = band * GROUP + (pid % (GROUP * tiles_n)) % height
    tile_n = (pid % (GROUP * tiles_n)) // height
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(
            A + m[:, None] * a_m + (start + k)[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0
        )
        b = tl.load(
            B + (start + k)[:, None] * b_k + n[None, :] * b_n, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0
        )
        acc = tl.dot(a, b, acc)
    tl.store(C + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _matmul(a, b):
    """a @ b for 2-D operands of any strides, into a fresh contiguous tensor."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BLOCK_M, BLOCK_N = (max(16, min(128, triton.next_power_of_2(size))) for size in (M, N))
    BLOCK_K = max(16, min(128 // a.element_size(), triton.next_power_of_2(K)))
    _gemm[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), GROUP=8,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8 if BLOCK_M * BLOCK_N > 8192 else 4,
    )  # fmt: skip
    return c


def forward(a, b):
    return _matmul(a, b.T), (a, b)


# --- backward ---
def backward(saved, grad_c, needs=(True, True)):
    a, b = saved
    # (M, N) @ (N, K) and (N, M) @ (M, K): views only; a transposed or expanded cotangent is just other strides.
    da = _matmul(grad_c, b) if needs[0] else None
    db = _matmul(grad_c.T, a) if needs[1] else None
    return da, db


# --- check ---
SWEEP = ({"M": 32, "N": 48, "K": 64}, {"M": 37, "N": 21, "K": 50}, {"M": 64, "N": 32, "K": 16, "dtype": "float16"})


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) / K**0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))


def reference(a, b):
    return (a.float() @ b.float().T).to(a.dtype)
