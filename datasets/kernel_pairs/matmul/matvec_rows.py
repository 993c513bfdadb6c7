"""Matrix times vector: dA is an outer product and dx a transposed product, both out of one pass over A.

y = A x,    dA[m, n] = dy[m] x[n],    dx[n] = sum over m of A[m, n] dy[m].
The forward's program owns rows, since their sums run along memory. The backward's owns a column tile within a band of
rows: x stays in registers for dA, and the band's share of dx needs no reduction across lanes until the end. Bands leave
one partial row each, enough of them to keep the device reading.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matvec_rows",
    "family": "matmul",
    "op": "matvec",
    "schema": 1,
    "techniques": ("one-launch", "two-stage-partials", "loop-swap", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _matvec_fwd(A, X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32)
        a = tl.load(A + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        acc += a.to(tl.float32) * x[None, :]
    tl.store(Y + m, tl.sum(acc, 1), mask=m < M)


def forward(a, x):
    a, x = a.contiguous(), x.contiguous()
    M, N = a.shape
    y = torch.empty(M, device=a.device, dtype=a.dtype)
    BLOCK_N = max(32, min(512, triton.next_power_of_2(N)))
    _matvec_fwd[(triton.cdiv(M, 8),)](a, x, y, M, N, BLOCK_M=8, BLOCK_N=BLOCK_N, num_warps=4)
    return y, (a, x)


# --- backward ---
@triton.jit
def _matvec_bwd(
    DY, A, X, DA, Parts, M, N, dy_m, band,
    NEED_A: tl.constexpr, NEED_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1).to(tl.int64) * band
    last = tl.minimum(first + band, M)
    x = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32)
    dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_M, num_stages=2):
        m = start + tl.arange(0, BLOCK_M)
        at = m[:, None] * N + n[None, :]
        inside = (m[:, None] < last) & (n[None, :] < N)
        dy = tl.load(DY + m * dy_m, mask=m < last, other=0.0).to(tl.float32)
        if NEED_X:
            dx += dy[:, None] * tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
        if NEED_A:
            tl.store(DA + at, dy[:, None] * x[None, :], mask=inside)
    if NEED_X:
        tl.store(Parts + tl.program_id(1).to(tl.int64) * N + n, tl.sum(dx, 0), mask=n < N)


def backward(saved, grad_y, needs=(True, True)):
    a, x = saved
    M, N = a.shape
    BLOCK_N = max(32, min(256, triton.next_power_of_2(N)))
    columns = triton.cdiv(N, BLOCK_N)
    # About eight programs for each of 132 processors, but no band shorter than 32 rows.
    bands = max(1, min(triton.cdiv(M, 32), 1056 // columns))
    band = triton.cdiv(M, bands)
    bands = triton.cdiv(M, band)
    da = torch.empty_like(a) if needs[0] else None
    parts = torch.empty(bands, N, device=a.device, dtype=torch.float32) if needs[1] else None
    _matvec_bwd[(columns, bands)](
        grad_y, a, x, da, parts, M, N, grad_y.stride(0), band,
        NEED_A=needs[0], NEED_X=needs[1], BLOCK_M=8, BLOCK_N=BLOCK_N, num_warps=2,
    )  # fmt: skip
    return da, parts.sum(0).to(x.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"M": 64, "N": 128},
    {"M": 75, "N": 301},
    {"M": 130, "N": 40, "dtype": "bfloat16"},
    {"M": 33, "N": 72, "dtype": "float16"},
)
BENCH = ({"M": 16384, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, x = torch.randn(M, N, generator=g), torch.randn(N, generator=g) * N**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, x))


def reference(a, x):
    return a @ x
