"""Quantile of each row between two order statistics: their columns are saved, two entries a row share the gradient.

Nothing is sorted. Floats as integers of the same order are bisected: 32 counts over the row in registers end at the
value of a rank, a running count picks the right column among equals. dx is zero but for dy (1 - f) and dy f.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "quantile_interp_rows",
    "family": "reduction_stat",
    "op": "quantile",
    "schema": 1,
    "techniques": ("argmax-routing", "row-local", "multi-row-tile", "strided-cotangent"),
    "saves": ("columns: i32 (2, M)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_of_rank(key, n, N, rank):
    """Column of the element with `rank` smaller ones before it; equal elements rank by column."""
    low = tl.min(key, 0)
    high = tl.max(tl.where(n < N, key, low), 0)
    for _ in range(33):
        middle = low + (high - low) // 2
        enough = tl.sum((key <= middle).to(tl.int32), 0) > rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    smaller = tl.sum((key < high).to(tl.int32), 0)
    equal = (key == high).to(tl.int32)
    chosen = (equal != 0) & (tl.cumsum(equal, 0) == rank - smaller + 1)
    return tl.sum(tl.where(chosen, n, 0), 0)


@triton.jit
def _quantile_fwd(X, Y, Columns, M, N, rank, fraction, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    x = tl.load(X + row * N + n, mask=n < N, other=float("inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    # Negative floats run backwards as integers: flipping all bits but the sign puts them in order.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(n < N, key, 0x7FFFFFFFFFFF)
    below = _column_of_rank(key, n, N, rank)
    above = _column_of_rank(key, n, N, tl.minimum(rank + 1, N - 1))
    lower = tl.load(X + row * N + below).to(tl.float32)
    upper = tl.load(X + row * N + above).to(tl.float32)
    tl.store(Y + row, lower + fraction * (upper - lower))
    tl.store(Columns + row, below)
    tl.store(Columns + M + row, above)


def forward(x, q):
    """x (M, N) with N up to about 16384, q between 0 and 1."""
    x = x.contiguous()
    M, N = x.shape
    rank = min(int(q * (N - 1)), N - 1)
    fraction = q * (N - 1) - rank
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    columns = torch.empty(2, M, device=x.device, dtype=torch.int32)
    BLOCK_N = triton.next_power_of_2(N)
    _quantile_fwd[(M,)](x, y, columns, M, N, rank, fraction, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512)))
    return y, (columns, N, fraction)


# --- backward ---
@triton.jit
def _quantile_bwd(DY, Columns, DX, M, N, fraction, dy_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    below = tl.load(Columns + m, mask=m < M, other=-1)
    above = tl.load(Columns + M + m, mask=m < M, other=-1)
    dy = tl.load(DY + m * dy_m, mask=m < M, other=0.0).to(tl.float32)
    # At the last rank both are one column: its two shares add up to dy.
    dx = tl.where(n == below, (1.0 - fraction) * dy, 0.0) + tl.where(n == above, fraction * dy, 0.0)
    tl.store(DX + m * N + n, dx, mask=(m < M) & (n < N))


def backward(saved, grad_y, needs=None):
    columns, N, fraction = saved
    M = columns.shape[1]
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_N = min(2048, triton.next_power_of_2(N))
    BLOCK_M = max(1, 4096 // BLOCK_N)
    _quantile_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        grad_y, columns, dx, M, N, fraction, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 64}, {"M": 5, "N": 203, "q": 0.9}, {"M": 7, "N": 40, "q": 0.25, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, q=0.37, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), q


def reference(x, q):
    N = x.shape[1]
    rank = min(int(q * (N - 1)), N - 1)
    # The sort itself needs no gradient, which would be a scatter of whole rows: two elements do.
    columns = x.detach().sort(dim=-1, stable=True).indices[:, (rank, min(rank + 1, N - 1))]
    lower, upper = x.gather(1, columns).float().unbind(1)
    return (lower + (q * (N - 1) - rank) * (upper - lower)).to(x.dtype)
