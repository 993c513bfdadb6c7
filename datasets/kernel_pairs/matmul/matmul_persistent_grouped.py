"""A B by persistent programs: each gradient walks its tiles in the order that keeps its own operands in L2.

As many programs as processors take tiles round robin, so that those in flight are neighbours in the order of the tiles.
A band of GROUP tile rows, walked column by column, re-reads a square patch of both operands instead of whole rows. For
C and dA = dC B^T the bands lie along M. dB = A^T dC has a long sum and, with few rows, would give bands of odd height:
its bands are chosen along whichever axis of B has more tiles.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_persistent_grouped",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("persistent-grid", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _in_bands(tile, along, across, GROUP: tl.constexpr):
    """Position (along, across) of a tile when bands of GROUP tiles are walked across, the last band being lower."""
    band = tile // (GROUP * across)
    height = tl.minimum(along - band * GROUP, GROUP)
    inside = tile - band * GROUP * across
    return band * GROUP + inside % height, inside // height


@triton.jit
def _persistent_fwd(
    A, B, C, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), rows * cols, tl.num_programs(0)):
        row, col = _in_bands(tile, rows, cols, GROUP)
        m = row.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = col.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        a_at = A + m[:, None] * K + k[None, :]
        b_at = B + k[:, None] * N + n[None, :]
        c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for left in range(K, 0, -BLOCK_K):
            a = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
            b = tl.load(b_at, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
            c = tl.dot(a, b, c)
            a_at += BLOCK_K
            b_at += BLOCK_K * N
        tl.store(C + m[:, None] * N + n[None, :], c, mask=(m[:, None] < M) & (n[None, :] < N))


def _programs(tensor, tiles):
    count = torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 8
    return min(tiles, count)


def _side(size):
    # Tiles of 128 for real sizes, smaller ones for sizes that do not fill them.
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(a, b):
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    _persistent_fwd[(_programs(a, tiles),)](
        a, b, c, M, N, K, GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=min(_side(K), 128 // a.element_size()),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return c, (a, b)


# --- backward ---
@triton.jit
def _persistent_da(
    DC, B, DA, M, N, K, dc_m, dc_n,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    for tile in range(tl.program_id(0), rows * cols, tl.num_programs(0)):
        row, col = _in_bands(tile, rows, cols, GROUP)
        m = row.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = col.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        dc_at = DC + m[:, None] * dc_m + n[None, :] * dc_n
        bt_at = B + k[None, :] * N + n[:, None]
        da = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for left in range(N, 0, -BLOCK_N):
            dc = tl.load(dc_at, mask=(m[:, None] < M) & (n[None, :] < left), other=0.0)
            bt = tl.load(bt_at, mask=(n[:, None] < left) & (k[None, :] < K), other=0.0)
            da = tl.dot(dc, bt, da)
            dc_at += BLOCK_N * dc_n
            bt_at += BLOCK_N
        tl.store(DA + m[:, None] * K + k[None, :], da, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _persistent_db(
    A, DC, DB, M, N, K, dc_m, dc_n,
    BANDS_ON_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(K, BLOCK_K), tl.cdiv(N, BLOCK_N)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    for tile in range(tl.program_id(0), rows * cols, tl.num_programs(0)):
        if BANDS_ON_K:
            row, col = _in_bands(tile, rows, cols, GROUP)
        else:
            col, row = _in_bands(tile, cols, rows, GROUP)
        k = row.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        n = col.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        at_at = A + m[None, :] * K + k[:, None]
        dc_at = DC + m[:, None] * dc_m + n[None, :] * dc_n
        db = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for left in range(M, 0, -BLOCK_M):
            at = tl.load(at_at, mask=(k[:, None] < K) & (m[None, :] < left), other=0.0)
            dc = tl.load(dc_at, mask=(m[:, None] < left) & (n[None, :] < N), other=0.0)
            db = tl.dot(at, dc, db)
            at_at += BLOCK_M * K
            dc_at += BLOCK_M * dc_m
        tl.store(DB + k[:, None] * N + n[None, :], db, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_c, needs=(True, True)):
    a, b = saved
    (M, K), N = a.shape, b.shape[1]
    BLOCK_M, BLOCK_N, BLOCK_K = _side(M), _side(N), _side(K)
    rows_k, cols_n = triton.cdiv(K, BLOCK_K), triton.cdiv(N, BLOCK_N)
    depth = 256 // a.element_size()
    da = db = None
    if needs[0]:
        da = torch.empty_like(a)
        _persistent_da[(_programs(a, triton.cdiv(M, BLOCK_M) * rows_k),)](
            grad_c, b, da, M, N, K, grad_c.stride(0), grad_c.stride(1),
            GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=min(BLOCK_N, depth), BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[1]:
        db = torch.empty_like(b)
        _persistent_db[(_programs(a, rows_k * cols_n),)](
            a, grad_c, db, M, N, K, grad_c.stride(0), grad_c.stride(1), BANDS_ON_K=rows_k >= cols_n,
            GROUP=8, BLOCK_M=min(BLOCK_M, depth), BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "K": 32},
    {"M": 270, "N": 150, "K": 41},
    {"M": 140, "N": 260, "K": 136, "dtype": "bfloat16"},
    {"M": 32, "N": 16, "K": 200, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))


def reference(a, b):
    return a @ b
