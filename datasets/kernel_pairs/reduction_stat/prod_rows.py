"""Product of each row: two scans give the product of all other factors, so that zeros need no special case.

dx[n] = dy (x[0] .. x[n-1]) (x[n+1] .. x[N-1]). Dividing the product by x[n] would be cheaper and fail at a zero, where
this gives the right value: the product of the rest with one zero in the row, nothing with two.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "prod_rows",
    "family": "reduction_stat",
    "op": "prod",
    "schema": 1,
    "techniques": ("reverse-scan", "row-local", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _prod_fwd(X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=1.0).to(tl.float32)
    tl.store(Y + m, tl.reduce(x, 1, _times), mask=m < M)


def _tile(N):
    # Rows are held whole: a product of more factors than fit has left the range of fp32.
    BLOCK_N = triton.next_power_of_2(N)
    return max(1, 2048 // BLOCK_N), BLOCK_N, max(4, min(16, BLOCK_N // 1024))


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N, warps = _tile(N)
    _prod_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps)
    return y, (x,)


# --- backward ---
@triton.jit
def _prod_bwd(DY, X, DX, M, N, dy_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    row = m[:, None] < M
    at = m[:, None] * N + n[None, :]
    # Loads shifted by one make inclusive scans exclusive; the second load of the row is served by L1.
    left = tl.load(X + at - 1, mask=row & (n[None, :] > 0) & (n[None, :] < N), other=1.0).to(tl.float32)
    right = tl.load(X + at + 1, mask=row & (n[None, :] + 1 < N), other=1.0).to(tl.float32)
    others = tl.associative_scan(left, 1, _times) * tl.associative_scan(right, 1, _times, reverse=True)
    dy = tl.load(DY + m * dy_m, mask=m < M, other=0.0).to(tl.float32)
    tl.store(DX + at, dy[:, None] * others, mask=row & (n[None, :] < N))


def backward(saved, grad_y, needs=None):
    (x,) = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_M, BLOCK_N, warps = _tile(N)
    _prod_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, x, dx, M, N, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps
    )
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 203}, {"M": 21, "N": 24, "dtype": "bfloat16"})
BENCH = ({"M": 65536, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = 1.0 + torch.randn(M, N, generator=g) / N**0.5
    # One zero in the second row, two in the third.
    x[1:3, N // 2] = 0.0
    x[2:3, N // 3] = 0.0
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().prod(-1).to(x.dtype)
