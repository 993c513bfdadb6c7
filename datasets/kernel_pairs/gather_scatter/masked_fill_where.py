"""where(mask, a, b) with one value per row in a and one per column in b: a cotangent read once feeds two masked sums.

A program owns a band of rows. Row sums under the mask are complete when it has walked the columns; column sums under
the rest leave as one partial row per band, a thirty-second of what was read.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "masked_fill_where",
    "family": "gather_scatter",
    "op": "where",
    "schema": 1,
    "techniques": ("broadcast-reduction", "one-launch", "two-stage-partials", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _where_fwd(Mask, A, B, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    mask = tl.load(Mask + m * N + n, mask=ok, other=0) != 0
    a = tl.load(A + m, mask=m < M)
    b = tl.load(B + n, mask=n < N)
    tl.store(Y + m * N + n, tl.where(mask, a, b), mask=ok)


def forward(mask, a, b):
    """mask (M, N) of bool or int8, a (M, 1), b (N)."""
    mask, a, b = mask.contiguous(), a.contiguous(), b.contiguous()
    if mask.dtype is torch.bool:
        mask = mask.view(torch.int8)
    M, N = mask.shape
    y = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BLOCK_N = min(512, triton.next_power_of_2(N))
    BLOCK_M = 4096 // BLOCK_N
    _where_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        mask, a, b, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (mask, a, b)


# --- backward ---
@triton.jit
def _where_bwd(DY, Mask, DA, Parts, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    band = tl.program_id(0).to(tl.int64)
    m = band * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        mask = tl.load(Mask + m[:, None] * N + n[None, :], mask=ok, other=0) != 0
        dy_at = m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        rows += tl.where(mask, dy, 0.0)
        tl.store(Parts + band * N + n, tl.sum(tl.where(mask, 0.0, dy), 0), mask=n < N)
    tl.store(DA + m, tl.sum(rows, 1), mask=m < M)


def backward(saved, grad_y, needs=None):
    mask, a, b = saved
    M, N = mask.shape
    da = torch.empty_like(a)
    BLOCK_M, BLOCK_N = 128, min(64, triton.next_power_of_2(N))
    bands = triton.cdiv(M, BLOCK_M)
    parts = torch.empty(bands, N, device=a.device, dtype=torch.float32)
    _where_bwd[(bands,)](grad_y, mask, da, parts, M, N, *grad_y.stride(), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return da, parts.sum(0).to(b.dtype)


# --- check ---
SWEEP = ({"M": 96, "N": 64}, {"M": 203, "N": 77}, {"M": 40, "N": 24, "dtype": "bfloat16"})
BENCH = ({"M": 32768, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(M, N, generator=g) < 0.4).to(torch.int8)
    a, b = torch.randn(M, 1, generator=g), torch.randn(N, generator=g)
    return mask.to(device), *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))


def reference(mask, a, b):
    return torch.where(mask != 0, a, b)
