"""Grouped GEMM: consecutive rows of x belong to experts, each with its own weight; group borders may fall anywhere."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def grouped_gemm_fwd_kernel(
    X,
    W,
    Y,
    TILE_EXPERT,
    TILE_ROW,
    ENDS,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A tile of rows never crosses a group: the host lists each tile's expert and first row.
    tile = tl.program_id(0)
    expert = tl.load(TILE_EXPERT + tile).to(tl.int64)
    end = tl.load(ENDS + expert)
    rows = tl.load(TILE_ROW + tile) + tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)

    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < end)[:, None] & (inner < K)[None, :]
        w_mask = (inner < K)[:, None] & (cols < N)[None, :]
        b_x = tl.load(X + rows[:, None] * K + inner[None, :], mask=x_mask, other=0.0)
        b_w = tl.load(W + expert * K * N + inner[:, None] * N + cols[None, :], mask=w_mask, other=0.0)
        b_acc += tl.dot(b_x, b_w)
    y_mask = (rows < end)[:, None] & (cols < N)[None, :]
    tl.store(Y + rows[:, None] * N + cols[None, :], b_acc, mask=y_mask)


def row_tiles(sizes, block):
    """Expert and first row of every tile of at most `block` rows, for groups of the given sizes laid end to end."""
    tiles, first = [], 0
    for expert, size in enumerate(sizes):
        tiles += [(expert, row) for row in range(first, first + size, block)]
        first += size
    return tiles


@autodiff(inputs_require_grad=("x", "weight"))
def grouped_gemm(x, weight, sizes):
    """`y[i] = x[i] @ weight[e]` for the rows i of expert e.

    x is (M, K), weight (E, K, N); `sizes` are E ints that sum to M, the rows of each expert in order.
    """
    M, K = x.shape
    E, _, N = weight.shape
    assert len(sizes) == E
    assert sum(sizes) == M
    x, weight = x.contiguous(), weight.contiguous()
    BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32
    tiles = torch.tensor(row_tiles(sizes, BLOCK_M), dtype=torch.int32, device=x.device)
    ends = torch.tensor(sizes, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    grouped_gemm_fwd_kernel[(len(tiles), triton.cdiv(N, BLOCK_N))](
        x,
        weight,
        y,
        tiles[:, 0].contiguous(),
        tiles[:, 1].contiguous(),
        ends,
        N,
        K,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    return y


SWEEP = [
    dict(M=8192, N=4096, K=1024, E=8, dtype="bfloat16"),
    dict(M=4096, N=1024, K=1024, E=64, dtype="float16"),
    dict(M=300, N=70, K=50, E=5),
    dict(M=40, N=100, K=33, E=3),
]


def make_args(M, N, K, E, dtype="float32", device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Uneven groups: every row picks an expert, so some may stay empty.
    chosen = torch.randint(0, E, (M,), generator=generator)
    sizes = torch.bincount(chosen, minlength=E).tolist()
    x = torch.randn(M, K, generator=generator).to(device, getattr(torch, dtype))
    weight = torch.randn(E, K, N, generator=generator).to(device, getattr(torch, dtype))
    return x, weight, sizes


def reference(x, weight, sizes):
    groups = torch.split(x, sizes)
    return torch.cat([rows @ matrix for rows, matrix in zip(groups, weight, strict=True)])
