"""Grouped product over rows sorted by expert: dX keeps the forward's row tiles, dW lets one program own each tile."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "grouped_gemm_offsets",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("varlen", "owner-grid"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_rows(
    L, W, Offsets, OUT, N, K, E, l_m, l_k, w_e, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Row tiles never straddle experts. Each program finds its expert by counting tiles, without a table from the host.
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    tile -= tl.sum(tl.where(mine, after - tiles, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    m = tl.sum(tl.where(mine, begin, 0), 0).to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    W += expert.to(tl.int64) * w_e
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(
            L + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < last) & (kk[None, :] < K), other=0.0
        )
        w = tl.load(W + kk[:, None] * w_k + n[None, :] * w_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, w, acc)
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < last) & (n[None, :] < N))


def _rows(left, weight, offsets):
    T, K = left.shape
    E, _, N = weight.shape
    out = torch.empty(T, N, device=left.device, dtype=weight.dtype)
    # At most one tile per expert is partly filled; superfluous programs leave at once.
    _grouped_rows[(triton.cdiv(T, 64) + E, triton.cdiv(N, 128))](
        left, weight, offsets, out, N, K, E, left.stride(0), left.stride(1), *weight.stride(),
        BLOCK_M=64, BLOCK_N=128, BLOCK_K=128 // weight.element_size(), BLOCK_E=triton.next_power_of_2(E),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, offsets):
    # Rows offsets[e] to offsets[e + 1] of x belong to expert e; offsets begin with 0 and end with the number of rows.
    return _rows(x, weight, offsets), (x, weight, offsets)


# --- backward ---
@triton.jit
def _grouped_dx(
    DY, W, Offsets, DX, N, K, E,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Row tiles never straddle experts. Each program finds its expert by counting tiles, without a table from the host.
    tile = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    tile -= tl.sum(tl.where(mine, after - tiles, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    m = (tl.sum(tl.where(mine, begin, 0), 0) + tile * BLOCK_M).to(tl.int32)
    k = tl.program_id(0) * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # Rows of the next expert are read past `last`, and not stored.
    for n in range(0, N, BLOCK_N):
        w = tl.reshape(W.load([expert, k, n]), (BLOCK_K, BLOCK_N))
        acc = tl.dot(DY.load([m, n]), w.T, acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < last) & (cols[None, :] < K))


@triton.jit
def _add_rows(acc, X, DY, first, last, k, n, PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """acc + x^T dy over the rows from first to last, whole steps or, if PARTIAL, one step that other experts share."""
    for m in range(first, last, BLOCK_M):
        x, dy = X.load([m, k]), DY.load([m, n])
        if PARTIAL:
            # Both are cleared: a row of another expert may hold anything.
            own = (m + tl.arange(0, BLOCK_M))[:, None] < last
            x, dy = tl.where(own, x, 0.0), tl.where(own, dy, 0.0)
        acc = tl.dot(x.T, dy, acc)
    return acc


@triton.jit
def _grouped_dw(X, DY, Offsets, DW, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Tile (k, n) of one expert's x^T dy: its rows are contiguous, so the owner walks them and no partial sums leave it.
    k, n = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_N
    expert = tl.program_id(2)
    first = tl.load(Offsets + expert).to(tl.int32)
    last = tl.load(Offsets + expert + 1).to(tl.int32)
    whole = first + (last - first) // BLOCK_M * BLOCK_M
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    acc = _add_rows(acc, X, DY, first, whole, k, n, False, BLOCK_M)
    acc = _add_rows(acc, X, DY, whole, last, k, n, True, BLOCK_M)
    # An expert without rows stores its zeros like any other.
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    at = (expert.to(tl.int64) * K + rows[:, None]) * N + cols[None, :]
    tl.store(DW + at, acc, mask=(rows[:, None] < K) & (cols[None, :] < N))


def _tiles(tensor, *block):
    """A descriptor of tiles of a matrix, or of the matrices of a batch; of a copy where rows are not aligned."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    outer = tensor.stride()[:-1]
    if tensor.stride(-1) != 1 or any(s % step or s < width for s in outer) or tensor.storage_offset() % step:
        dense = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, step) * step)[..., :width]
        dense.copy_(tensor)
        tensor = dense
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, weight, offsets = saved
    need_x, need_w = needs or (True, True)
    T, (E, K, N) = x.shape[0], weight.shape
    depth = 128 // x.element_size()
    dx = dw = None
    if need_x:
        dx = torch.empty(T, K, device=x.device, dtype=x.dtype)
        BM, BK, BN = min(256, _up(T // E)), min(128, _up(K)), min(depth, _up(N))
        # At most one tile per expert is partly filled; superfluous programs leave at once.
        _grouped_dx[(triton.cdiv(K, BK), triton.cdiv(T, BM) + E)](
            _tiles(grad_y, BM, BN), _tiles(weight, 1, BK, BN), offsets, dx, N, K, E,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, BLOCK_E=triton.next_power_of_2(E), num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_w:
        dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(T // E))
        _grouped_dw[(triton.cdiv(K, BK), triton.cdiv(N, BN), E)](
            _tiles(x, BM, BK), _tiles(grad_y, BM, BN), offsets, dw, N, K,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 128, "E": 2, "K": 32, "N": 64},
    {"T": 171, "E": 5, "K": 24, "N": 35, "dtype": "float16"},
    {"T": 60, "E": 3, "K": 16, "N": 40, "dtype": "bfloat16"},
)
BENCH = ({"T": 32768, "E": 8, "K": 1024, "N": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(T, K, generator=g), torch.randn(E, K, N, generator=g))
    # The first expert gets most rows and, with more than two, the second none.
    cuts = torch.randint(T // 2, T + 1, (E - 1,), generator=g).sort().values
    if E > 2:
        cuts[1] = cuts[0]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([T]))).to(torch.int32)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return x, weight, offsets.to(device)


def reference(x, weight, offsets):
    cuts = offsets.tolist()
    return torch.cat([x[a:b] @ w for a, b, w in zip(cuts[:-1], cuts[1:], weight, strict=True)])
