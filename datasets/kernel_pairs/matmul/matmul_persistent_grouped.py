"""A B by persistent programs: each gradient walks its tiles in the order that keeps its own operands in L2.

As many programs as processors take tiles round robin, so that those in flight are neighbours in the order of the tiles.
A band of GROUP tile rows, walked column by column, re-reads a square patch of both operands instead of whole rows. For
C and dA = dC B^T the bands lie along M. dB = A^T dC has a long sum and, with few rows, would give bands of odd height:
its bands are chosen along whichever axis of B has more tiles. In the backward the loops over tiles and over the sum are
one pipeline, fed by tensor descriptors: operands of a program's next tile arrive while it stores the last one.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_persistent_grouped",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("persistent-grid", "owner-grid"),
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
def _left_right(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The two halves of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def _persistent_da(
    DC, B, DA, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=True):
        row, col = _in_bands(tile, rows, cols, GROUP)
        da = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for n in range(0, N, BLOCK_N):
            da = tl.dot(DC.load([row * BLOCK_M, n]), B.load([col * BLOCK_K, n]).T, da)
        # By halves, so that a fourth stage fits beside the tile on its way out.
        left, right = _left_right(da, BLOCK_M, BLOCK_K)
        DA.store([row * BLOCK_M, col * BLOCK_K], left.to(DA.dtype))
        DA.store([row * BLOCK_M, col * BLOCK_K + BLOCK_K // 2], right.to(DA.dtype))


@triton.jit
def _persistent_db(
    A, DC, DB, M, N, K, BANDS_ON_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(K, BLOCK_K), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=True):
        if BANDS_ON_K:
            row, col = _in_bands(tile, rows, cols, GROUP)
        else:
            col, row = _in_bands(tile, cols, rows, GROUP)
        db = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for m in range(0, M, BLOCK_M):
            db = tl.dot(A.load([m, row * BLOCK_K]).T, DC.load([m, col * BLOCK_N]), db)
        left, right = _left_right(db, BLOCK_K, BLOCK_N)
        DB.store([row * BLOCK_K, col * BLOCK_N], left.to(DB.dtype))
        DB.store([row * BLOCK_K, col * BLOCK_N + BLOCK_N // 2], right.to(DB.dtype))


def _aligned(matrix):
    """The matrix, or a copy that a descriptor can point at: dense rows that start on sixteen bytes."""
    step = 16 // matrix.element_size()
    starts = matrix.stride(0) | matrix.storage_offset()
    if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and starts % step == 0:
        return matrix
    wide = matrix.new_empty(matrix.shape[0], triton.cdiv(matrix.shape[1], step) * step)
    wide = wide[:, : matrix.shape[1]]
    wide.copy_(matrix)
    return wide


def _tiles(matrix, rows, cols):
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _like(tensor):
    """Room for a gradient, with rows that start on sixteen bytes."""
    rows, cols = tensor.shape
    step = 16 // tensor.element_size()
    return tensor.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _most(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_c, needs=(True, True)):
    a, b = saved
    (M, K), N = a.shape, b.shape[1]
    a, b, grad_c = (_aligned(tensor) for tensor in (a, b, grad_c))
    depth = 128 // a.element_size()
    da = db = None
    if needs[0]:
        da = _like(a)
        BLOCK_M, BLOCK_K, BLOCK_N = min(128, _most(M)), min(256, _most(K)), min(depth, _most(N))
        tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(K, BLOCK_K)
        _persistent_da[(_programs(a, tiles),)](
            _tiles(grad_c, BLOCK_M, BLOCK_N), _tiles(b, BLOCK_K, BLOCK_N), _tiles(da, BLOCK_M, BLOCK_K // 2), M, N, K,
            GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1]:
        db = _like(b)
        BLOCK_K, BLOCK_N, BLOCK_M = min(128, _most(K)), min(256, _most(N)), min(depth, _most(M))
        rows_k, cols_n = triton.cdiv(K, BLOCK_K), triton.cdiv(N, BLOCK_N)
        _persistent_db[(_programs(a, rows_k * cols_n),)](
            _tiles(a, BLOCK_M, BLOCK_K), _tiles(grad_c, BLOCK_M, BLOCK_N), _tiles(db, BLOCK_K, BLOCK_N // 2), M, N, K,
            BANDS_ON_K=rows_k >= cols_n, GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            num_warps=8, num_stages=4,
        )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "K": 32},
    {"M": 270, "N": 150, "K": 41},
    {"M": 140, "N": 260, "K": 136, "dtype": "bfloat16"},
    {"M": 32, "N": 16, "K": 200, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))


def reference(a, b):
    return a @ b
