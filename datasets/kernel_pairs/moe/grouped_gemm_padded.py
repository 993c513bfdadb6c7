"""Grouped product over expert segments padded to whole row tiles: a table names each tile's expert, no loop has a mask.

The rows of an expert are padded with zeros to a multiple of BLOCK_M when they are sorted. So every row tile belongs to
one expert, and forward and dX look it up in a table instead of searching offsets. dW's owner of an expert's tile walks
over that expert's row tiles, which are whole too. Block sizes divide K and N, so that the loops load without a single
comparison; pad rows of x are zero, and add nothing to dW whatever their cotangent is.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "grouped_gemm_padded",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("varlen", "inverse-map", "owner-grid", "column-owner"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _padded_rows(
    L, W, TileExpert, OUT, N, K, l_m, l_k, w_e, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1).to(tl.int64)
    expert = tl.load(TileExpert + tile).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    l_at = L + m[:, None] * l_m + k[None, :] * l_k
    w_at = W + expert * w_e + k[:, None] * w_k + n[None, :] * w_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K // BLOCK_K):
        acc = tl.dot(tl.load(l_at), tl.load(w_at), acc)
        l_at += BLOCK_K * l_k
        w_at += BLOCK_K * w_k
    tl.store(OUT + m[:, None] * N + n[None, :], acc)


def _divisor(size, most):
    """Largest power of two up to `most` that divides the size."""
    return math.gcd(size, most)


def _rows(left, weight, tile_expert):
    (P, K), N = left.shape, weight.shape[2]
    BLOCK_M = P // tile_expert.shape[0]
    BLOCK_N = _divisor(N, 128)
    out = torch.empty(P, N, device=left.device, dtype=left.dtype)
    _padded_rows[(N // BLOCK_N, P // BLOCK_M)](
        left, weight, tile_expert, out, N, K, *left.stride(), *weight.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_divisor(K, 128 // left.element_size()),
        num_warps=8 if BLOCK_M * BLOCK_N >= 128 * 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, tile_expert, first_tile):
    # tile_expert[i] is the expert of row tile i; expert e has the tiles first_tile[e] to first_tile[e + 1].
    if x.shape[1] % 16 or weight.shape[2] % 16:
        raise ValueError("K and N must be multiples of 16")
    return _rows(x, weight, tile_expert), (x, weight, tile_expert, first_tile)


# --- backward ---
@triton.jit
def _padded_dx(DY, W, TileExpert, DX, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Row tiles are the slow axis: programs in flight share rows of dY and, mostly, one expert's weight.
    tile = tl.program_id(1)
    expert = tl.load(TileExpert + tile).to(tl.int32)
    k = tl.program_id(0) * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        # Weights of all experts lie below one another, as one matrix (E K, N).
        acc = tl.dot(DY.load([tile * BLOCK_M, n]), W.load([expert * K + k, n]).T, acc)
    rows, cols = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc)


@triton.jit
def _padded_dw(
    X, DY, FirstTile, DW, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr
):
    expert = tl.program_id(2)
    k, n = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_N
    first = tl.load(FirstTile + expert).to(tl.int32) * BLOCK_M
    last = tl.load(FirstTile + expert + 1).to(tl.int32) * BLOCK_M
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    # STEP divides BLOCK_M: a step never leaves the expert. An expert without tiles stores zeros.
    for m in range(first, last, STEP):
        acc = tl.dot(X.load([m, k]).T, DY.load([m, n]), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    tl.store(DW + (expert.to(tl.int64) * K + rows[:, None]) * N + cols[None, :], acc)


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles; rows of sixteen elements or more are aligned once they are dense."""
    if matrix.stride(1) != 1 or matrix.stride(0) % 16 or matrix.stride(0) < matrix.shape[1]:
        matrix = matrix.contiguous()
    if matrix.storage_offset() % 16:
        matrix = matrix.clone()
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def backward(saved, grad_y, needs=(True, True)):
    x, weight, tile_expert, first_tile = saved
    E, K, N = weight.shape
    P, depth = x.shape[0], 128 // x.element_size()
    BLOCK_M = P // tile_expert.shape[0]
    dx = dw = None
    if needs[0]:
        dx = torch.empty(P, K, device=x.device, dtype=x.dtype)
        # Blocks that divide K and N: the largest powers of two up to these.
        BLOCK_K, BLOCK_N = math.gcd(K, 128), math.gcd(N, depth)
        _padded_dx[(K // BLOCK_K, P // BLOCK_M)](
            _tiles(grad_y, BLOCK_M, BLOCK_N), _tiles(weight.reshape(E * K, N), BLOCK_K, BLOCK_N), tile_expert, dx, N, K,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
        BLOCK_K, BLOCK_N, STEP = math.gcd(K, 128), math.gcd(N, 256), min(BLOCK_M, depth)
        _padded_dw[(K // BLOCK_K, N // BLOCK_N, E)](
            _tiles(x, STEP, BLOCK_K), _tiles(grad_y, STEP, BLOCK_N), first_tile, dw, N, K,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STEP=STEP, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 100, "E": 3, "K16": 2, "N16": 3, "BLOCK_M": 16},
    {"T": 171, "E": 5, "K16": 3, "N16": 1, "BLOCK_M": 32},
    {"T": 60, "E": 3, "K16": 1, "N16": 5, "BLOCK_M": 16, "dtype": "bfloat16"},
    {"T": 77, "E": 2, "K16": 5, "N16": 2, "BLOCK_M": 16, "dtype": "float16"},
)
BENCH = ({"T": 32000, "E": 16, "K16": 64, "N16": 128, "BLOCK_M": 128, "dtype": "bfloat16"},)


def make_args(T, E, K16, N16, BLOCK_M, dtype="float32", device="cpu", seed=0):
    if BLOCK_M < 16 or BLOCK_M & (BLOCK_M - 1):
        raise ValueError("BLOCK_M must be a power of two, at least 16")
    g = torch.Generator().manual_seed(seed)
    expert = torch.randint(0, E, (T,), generator=g)
    # With more than two, the second expert gets no rows.
    expert[expert == min(1, E - 2)] = 0
    tiles = (torch.bincount(expert, minlength=E) + BLOCK_M - 1) // BLOCK_M
    first_tile = torch.cat((torch.zeros(1, dtype=torch.int64), tiles.cumsum(0)))
    order = torch.sort(expert, stable=True).values
    rank = torch.arange(T) - torch.searchsorted(order, order)
    x = torch.zeros(int(first_tile[-1]) * BLOCK_M, 16 * K16)
    x[first_tile[order] * BLOCK_M + rank] = torch.randn(T, 16 * K16, generator=g)
    weight = torch.randn(E, 16 * K16, 16 * N16, generator=g) / (16 * K16) ** 0.5
    tile_expert = torch.repeat_interleave(torch.arange(E), tiles).to(torch.int32)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, tile_expert.to(device), first_tile.to(device=device, dtype=torch.int32)


def reference(x, weight, tile_expert, first_tile):
    tile = x.shape[0] // tile_expert.shape[0]
    parts = x.split([tile * tiles for tiles in first_tile.diff().tolist()])
    return torch.cat([part @ own for part, own in zip(parts, weight, strict=True)])
