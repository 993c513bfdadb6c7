"""Matrix product a @ b in tiles; the whole inner dimension fits one tile."""

import torch
import triton
import triton.language as tl

META = {"slug": "matmul_one_tile_k", "family": "matmul", "op": "matmul", "schema": 1, "grads": ("a", "b")}


# --- forward ---
@triton.jit
def _matmul(A, B, C, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = tl.load(A + m[:, None] * sam + k[None, :] * sak, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    b = tl.load(B + k[:, None] * sbk + n[None, :] * sbn, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b), mask=(m[:, None] < M) & (n[None, :] < N))


def product(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    inner = max(16, triton.next_power_of_2(K))
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    _matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), BM=16, BN=16, BK=inner)
    return c


def forward(a, b):
    return product(a, b), (a, b)


# --- backward ---
def backward(saved, grad_c, needs=None):
    a, b = saved
    return product(grad_c, b.t()), product(a.t(), grad_c)


# --- check ---
SWEEP = [{"M": 20, "N": 17, "K": 30}]


def make_args(M, N, K, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=g).to(device), torch.randn(K, N, generator=g).to(device)


def reference(a, b):
    return a @ b
