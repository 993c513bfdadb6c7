"""Batch of outer products a b^T: both gradients are sums over one tile of the cotangent, along rows and along columns.

da[m] = sum over n of dC[m, n] b[n],    db[n] = sum over m of dC[m, n] a[m].
dC is the only large tensor and is read once, with its own strides. A program owns a band of rows of one batch: it walks
the columns, so that da is complete in its registers, and leaves the band's share of every db as a partial row.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "outer_product",
    "family": "matmul",
    "op": "outer",
    "schema": 1,
    "techniques": ("one-launch", "row-local", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "16 bytes of a tile of 256 rows, which was the fastest of the sweep on an H200",
}


# --- forward ---
@triton.jit
def _outer_fwd(A, B, C, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a = tl.load(A + batch * M + m, mask=m < M, other=0.0).to(tl.float32)
    b = tl.load(B + batch * N + n, mask=n < N, other=0.0).to(tl.float32)
    c_at = C + (batch * M + m[:, None]) * N + n[None, :]
    tl.store(c_at, a[:, None] * b[None, :], mask=(m[:, None] < M) & (n[None, :] < N))


def _blocks(N):
    BLOCK_N = max(32, min(256, triton.next_power_of_2(N)))
    return 4096 // BLOCK_N, BLOCK_N


def forward(a, b):
    a, b = a.contiguous(), b.contiguous()
    (Z, M), N = a.shape, b.shape[1]
    c = torch.empty(Z, M, N, device=a.device, dtype=a.dtype)
    BLOCK_M, BLOCK_N = _blocks(N)
    _outer_fwd[(triton.cdiv(N, BLOCK_N), triton.cdiv(M, BLOCK_M), Z)](
        a, b, c, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return c, (a, b)


# --- backward ---
@triton.jit
def _outer_bwd(
    DC, A, B, DA, DBParts, M, N, dc_z, dc_m, dc_n,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    m = band.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    a = tl.load(A + batch * M + m, mask=m < M, other=0.0).to(tl.float32)
    part = DBParts + (batch * tl.num_programs(0) + band) * N
    da = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Two tiles of the cotangent are copied ahead of the one that is summed both ways.
    for start in tl.range(0, N, BLOCK_N, num_stages=3):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dc_at = DC + batch * dc_z + m[:, None] * dc_m + n[None, :] * dc_n
        dc = tl.load(dc_at, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0).to(tl.float32)
        if NEED_A:
            da += dc * tl.load(B + batch * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if NEED_B:
            tl.store(part + n, tl.sum(dc * a[:, None], 0), mask=n < N)
    if NEED_A:
        tl.store(DA + batch * M + m, tl.sum(da, 1), mask=m < M)


def backward(saved, grad_c, needs=(True, True)):
    a, b = saved
    (Z, M), N = a.shape, b.shape[1]
    BLOCK_N = max(32, min(128, triton.next_power_of_2(N)))
    BLOCK_M = min(256, max(16, triton.next_power_of_2(M)))
    bands = triton.cdiv(M, BLOCK_M)
    da = torch.empty_like(a) if needs[0] else None
    # With 64 rows a band, the partial rows are a thirty-second of a bf16 cotangent.
    parts = torch.empty(Z, bands, N, device=a.device, dtype=torch.float32)
    _outer_bwd[(bands, Z)](
        grad_c, a, b, da, parts, M, N, *grad_c.stride(),
        NEED_A=needs[0], NEED_B=needs[1], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=8,
    )  # fmt: skip
    return da, parts.sum(1).to(b.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"Z": 2, "M": 64, "N": 128},
    {"Z": 3, "M": 75, "N": 301},
    {"Z": 1, "M": 130, "N": 40, "dtype": "bfloat16"},
    {"Z": 2, "M": 33, "N": 72, "dtype": "float16"},
)
BENCH = ({"Z": 64, "M": 1024, "N": 2048, "dtype": "bfloat16"},)


def make_args(Z, M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    vectors = (torch.randn(Z, M, generator=g), torch.randn(Z, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in vectors)


def reference(a, b):
    return (a.float()[:, :, None] * b.float()[:, None, :]).to(a.dtype)
