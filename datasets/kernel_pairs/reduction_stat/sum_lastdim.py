"""Sum over the last dimension: the backward reads one number per row and writes it over the whole row.

The gradient could be an expanded view of the cotangent; it is written out here for consumers that need dense memory.
It is bound by its stores alone, so the grid is cut for them: column tiles of a row share nothing and need no loop.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sum_lastdim",
    "family": "reduction_stat",
    "op": "sum",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_sum(X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Lanes keep their own sums over the tiles: threads exchange data once, after the loop.
    lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        lanes += tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + m, tl.sum(lanes, 1), mask=m < M)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _row_sum[(triton.cdiv(M, BLOCK_M),)](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return y, (M, N)


# --- backward ---
@triton.jit
def _spread_rows(DY, DX, M, N, dy_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # With stride 0, as under `y.sum().backward()`, all rows read the same address.
    dy = tl.load(DY + m * dy_m, mask=m < M, other=0.0)
    value = tl.broadcast_to(dy[:, None], (BLOCK_M, BLOCK_N))
    tl.store(DX + m[:, None] * N + n[None, :], value, mask=(m[:, None] < M) & (n[None, :] < N))


def backward(saved, grad_y, needs=None):
    M, N = saved
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_N = min(2048, triton.next_power_of_2(N))
    BLOCK_M = max(1, 4096 // BLOCK_N)
    _spread_rows[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        grad_y, dx, M, N, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 128}, {"M": 5, "N": 2059}, {"M": 19, "N": 45, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"}, {"M": 262144, "N": 128, "dtype": "float32"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().sum(-1).to(x.dtype)
