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

META = {
    "slug": "grouped_gemm_padded",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("varlen", "inverse-map", "owner-grid", "column-owner", "strided-cotangent"),
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
def _padded_dw(
    X, DY, FirstTile, DW, N, K, x_m, x_k, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(FirstTile + expert).to(tl.int64) * BLOCK_M
    last = tl.load(FirstTile + expert + 1).to(tl.int64) * BLOCK_M
    m = first + tl.arange(0, STEP)
    xt_at = X + k[:, None] * x_k + m[None, :] * x_m
    dy_at = DY + m[:, None] * dy_m + n[None, :] * dy_n
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    # STEP divides BLOCK_M: a step never leaves the expert. An expert without tiles stores zeros.
    for _ in range(first, last, STEP):
        acc = tl.dot(tl.load(xt_at), tl.load(dy_at), acc)
        xt_at += STEP * x_m
        dy_at += STEP * dy_m
    tl.store(DW + (expert * K + k[:, None]) * N + n[None, :], acc)


def backward(saved, grad_y, needs=(True, True)):
    x, weight, tile_expert, first_tile = saved
    E, K, N = weight.shape
    dx = _rows(grad_y, weight.transpose(1, 2), tile_expert) if needs[0] else None
    dw = None
    if needs[1]:
        dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
        BLOCK_M = x.shape[0] // tile_expert.shape[0]
        BLOCK_K, BLOCK_N = _divisor(K, 128), _divisor(N, 128)
        _padded_dw[(N // BLOCK_N, K // BLOCK_K, E)](
            x, grad_y, first_tile, dw, N, K, *x.stride(), *grad_y.stride(),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STEP=min(BLOCK_M, 128 // x.element_size()),
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 100, "E": 3, "K16": 2, "N16": 3, "BLOCK_M": 16},
    {"T": 171, "E": 5, "K16": 3, "N16": 1, "BLOCK_M": 32},
    {"T": 60, "E": 3, "K16": 1, "N16": 5, "BLOCK_M": 16, "dtype": "bfloat16"},
    {"T": 77, "E": 2, "K16": 5, "N16": 2, "BLOCK_M": 16, "dtype": "float16"},
)
BENCH = ({"T": 16000, "E": 16, "K16": 64, "N16": 128, "BLOCK_M": 128, "dtype": "bfloat16"},)


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
