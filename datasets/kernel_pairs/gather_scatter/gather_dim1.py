"""torch.gather along rows: each output's cotangent is added at the column it was read from, by element-wise atomics."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gather_dim1",
    "family": "gather_scatter",
    "op": "gather",
    "schema": 1,
    "techniques": ("atomics", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gather_fwd(X, Index, Y, K, x_m, x_n, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.load(Index + row * K + k, mask=k < K, other=0).to(tl.int64)
    # Random within one row: a row of a few thousand columns stays in L1 while its program reads it.
    tl.store(Y + row * K + k, tl.load(X + row * x_m + column * x_n, mask=k < K), mask=k < K)


def forward(x, index):
    """x (M, N), index (M, K): y[m, k] = x[m, index[m, k]]."""
    index = index.contiguous()
    M, K = index.shape
    y = torch.empty(M, K, device=x.device, dtype=x.dtype)
    BLOCK_K = min(1024, triton.next_power_of_2(K))
    _gather_fwd[(M, triton.cdiv(K, BLOCK_K))](
        x, index, y, K, *x.stride(), BLOCK_K=BLOCK_K, num_warps=max(1, min(4, BLOCK_K // 128))
    )
    return y, (index, x.shape[1])


# --- backward ---
@triton.jit
def _gather_bwd(DY, Index, DX, K, N, dy_m, dy_k, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.load(Index + row * K + k, mask=k < K, other=0).to(tl.int64)
    dy = tl.load(DY + row * dy_m + k.to(tl.int64) * dy_k, mask=k < K, other=0.0).to(tl.float32)
    # Repeated columns meet in L2; rows are apart, so that programs of different rows never wait for one another.
    tl.atomic_add(DX + row * N + column, dy, mask=k < K, sem="relaxed")


def backward(saved, grad_y, needs=None):
    index, N = saved
    M, K = index.shape
    dx = torch.zeros(M, N, device=grad_y.device, dtype=torch.float32)
    BLOCK_K = min(1024, triton.next_power_of_2(K))
    _gather_bwd[(M, triton.cdiv(K, BLOCK_K))](
        grad_y, index, dx, K, N, *grad_y.stride(), BLOCK_K=BLOCK_K, num_warps=max(1, min(8, BLOCK_K // 128))
    )
    return dx.to(grad_y.dtype)


# --- check ---
SWEEP = ({"M": 8, "N": 32, "K": 48}, {"M": 5, "N": 19, "K": 1037}, {"M": 6, "N": 40, "K": 24, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "K": 1024, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.randint(0, N, (M, K), generator=g).to(device)


def reference(x, index):
    return x.gather(1, index)
