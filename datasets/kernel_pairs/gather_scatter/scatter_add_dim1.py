"""scatter_add along rows: atomics are the forward's affair, the backward gathers and needs none."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scatter_add_dim1",
    "family": "gather_scatter",
    "op": "scatter_add",
    "schema": 1,
    "techniques": ("gather-form", "shared-gradient", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "src"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scatter_fwd(Sums, Src, Index, N, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(tl.program_id(1) * BLOCK_K, K, tl.num_programs(1) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = tl.load(Index + row * K + k, mask=k < K, other=0).to(tl.int64)
        src = tl.load(Src + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        tl.atomic_add(Sums + row * N + column, src, mask=k < K, sem="relaxed")


def _grid(M, K):
    BLOCK_K = min(1024, triton.next_power_of_2(K))
    # Long rows are shared by several programs, up to about eight for each of 132 processors in all.
    return (M, max(1, min(triton.cdiv(K, BLOCK_K), 1056 // M))), BLOCK_K, max(1, min(4, BLOCK_K // 128))


def forward(x, src, index):
    """x (M, N), src and index (M, K): y = x with src[m, k] added at y[m, index[m, k]]."""
    src, index = src.contiguous(), index.contiguous()
    (M, N), K = x.shape, src.shape[1]
    sums = torch.empty(M, N, device=x.device, dtype=torch.float32)
    sums.copy_(x)
    grid, BLOCK_K, warps = _grid(M, K)
    _scatter_fwd[grid](sums, src, index, N, K, BLOCK_K=BLOCK_K, num_warps=warps)
    return sums.to(x.dtype), (index,)


# --- backward ---
@triton.jit
def _scatter_bwd(DY, DSrc, Index, K, dy_m, dy_n, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cotangent = DY + row * dy_m
    for start in range(tl.program_id(1) * BLOCK_K, K, tl.num_programs(1) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = tl.load(Index + row * K + k, mask=k < K, other=0).to(tl.int64)
        # Repeated columns hand the same value to all that were added there.
        tl.store(DSrc + row * K + k, tl.load(cotangent + column * dy_n, mask=k < K), mask=k < K)


def backward(saved, grad_y, needs=None):
    (index,) = saved
    M, K = index.shape
    dsrc = torch.empty(M, K, device=grad_y.device, dtype=grad_y.dtype)
    grid, BLOCK_K, warps = _grid(M, K)
    _scatter_bwd[grid](grad_y, dsrc, index, K, *grad_y.stride(), BLOCK_K=BLOCK_K, num_warps=warps)
    # x is passed through: its gradient is the cotangent itself.
    return grad_y, dsrc


# --- check ---
SWEEP = ({"M": 8, "N": 32, "K": 48}, {"M": 5, "N": 19, "K": 1037}, {"M": 6, "N": 40, "K": 24, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 2048, "K": 8192, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, src = (torch.randn(M, size, generator=g).to(device=device, dtype=getattr(torch, dtype)) for size in (N, K))
    return x, src, torch.randint(0, N, (M, K), generator=g).to(device)


def reference(x, src, index):
    return x.float().scatter_add(1, index, src.float()).to(x.dtype)
