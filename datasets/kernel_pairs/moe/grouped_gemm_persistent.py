"""Grouped product by persistent programs that find their problem themselves, for rows and for weights.

Rows are sorted by expert, and only the device knows how many each has. Every program keeps the running count of units
per expert in registers and walks through unit numbers with a fixed stride; the expert of a unit is the number of
experts that end before it. For forward and dX a unit is a tile of rows. For dW it is a tile of one expert's weight,
over all of the expert's rows: neighbours in the order of units are tiles of one expert, so that those of an expert with
half of all tokens fall to different programs, a long one to each.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "grouped_gemm_persistent",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("persistent-grid", "varlen"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _unit_rows(unit, begin, end, after, units, e, size):
    """Expert of a unit, and the first and one past the last row that it covers: pieces of `size` rows per expert."""
    expert = tl.sum((after <= unit).to(tl.int32), 0)
    mine = e == expert
    piece = unit - tl.sum(tl.where(mine, after - units, 0), 0)
    first = tl.sum(tl.where(mine, begin, 0), 0) + piece * size
    last = tl.minimum(first + size, tl.sum(tl.where(mine, end, 0), 0))
    return expert, first, last


@triton.jit
def _persistent_rows(
    L, W, Offsets, OUT, N, K, E, l_m, l_k, w_e, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    units = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(units, 0)
    columns = tl.cdiv(N, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    for tile in range(tl.program_id(0), tl.sum(units, 0) * columns, tl.num_programs(0)):
        expert, first, last = _unit_rows(tile // columns, begin, end, after, units, e, BLOCK_M)
        m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        n = (tile % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        l_at = L + m[:, None] * l_m + k[None, :] * l_k
        w_at = W + expert.to(tl.int64) * w_e + k[:, None] * w_k + n[None, :] * w_n
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for left in range(K, 0, -BLOCK_K):
            x = tl.load(l_at, mask=(m[:, None] < last) & (k[None, :] < left), other=0.0)
            w = tl.load(w_at, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
            acc = tl.dot(x, w, acc)
            l_at += BLOCK_K * l_k
            w_at += BLOCK_K * w_k
        tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < last) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _processors(tensor):
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 5


def _rows(left, weight, offsets):
    (T, K), (E, _, N) = left.shape, weight.shape
    out = torch.empty(T, N, device=left.device, dtype=left.dtype)
    _persistent_rows[(_processors(left),)](
        left, weight, offsets, out, N, K, E, *left.stride(), *weight.stride(),
        BLOCK_M=128 if T >= 64 * E else 32, BLOCK_N=_side(N), BLOCK_K=_side(K, 128 // left.element_size()),
        BLOCK_E=triton.next_power_of_2(E), num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, offsets):
    # Rows offsets[e] to offsets[e + 1] of x belong to expert e.
    return _rows(x, weight, offsets), (x, weight, offsets)


# --- backward ---
@triton.jit
def _persistent_dx(
    DY, W, Offsets, DX, N, K, E,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    units = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(units, 0)
    columns = tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tl.sum(units, 0) * columns, tl.num_programs(0)):
        expert, first, last = _unit_rows(tile // columns, begin, end, after, units, e, BLOCK_M)
        m, k = first.to(tl.int32), tile % columns * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        # Rows of the next expert are read past `last`, and not stored.
        for n in range(0, N, BLOCK_N):
            w = tl.reshape(W.load([expert, k, n]), (BLOCK_K, BLOCK_N))
            acc = tl.dot(DY.load([m, n]), w.T, acc)
        rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
        tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < last) & (cols[None, :] < K))


@triton.jit
def _persistent_dw(X, DY, Offsets, DW, N, K, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    columns = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(K, BLOCK_K) * columns
    for unit in range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        expert, tile = unit // tiles, unit % tiles
        first = tl.load(Offsets + expert).to(tl.int32)
        last = tl.load(Offsets + expert + 1).to(tl.int32)
        k, n = tile // columns * BLOCK_K, tile % columns * BLOCK_N
        acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        whole = first + (last - first) // BLOCK_M * BLOCK_M
        for m in range(first, whole, BLOCK_M):
            acc = tl.dot(X.load([m, k]).T, DY.load([m, n]), acc)
        if whole < last:
            # The last step shares its rows with the next expert, whose rows are cleared in both operands.
            own = (whole + tl.arange(0, BLOCK_M))[:, None] < last
            x = tl.where(own, X.load([whole, k]), 0.0)
            acc = tl.dot(x.T, tl.where(own, DY.load([whole, n]), 0.0), acc)
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


def backward(saved, grad_y, needs=(True, True)):
    x, weight, offsets = saved
    T, (E, K, N) = x.shape[0], weight.shape
    depth = 128 // x.element_size()
    dx = dw = None
    if needs[0]:
        dx = torch.empty(T, K, device=x.device, dtype=x.dtype)
        BM, BK, BN = min(128, _up(T // E)), min(256, _up(K)), min(depth, _up(N))
        _persistent_dx[(_processors(x),)](
            _tiles(grad_y, BM, BN), _tiles(weight, 1, BK, BN), offsets, dx, N, K, E,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, BLOCK_E=triton.next_power_of_2(E), num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(T // E))
        _persistent_dw[(_processors(x),)](
            _tiles(x, BM, BK), _tiles(grad_y, BM, BN), offsets, dw, N, K, E,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 128, "E": 2, "K": 32, "N": 64},
    {"T": 371, "E": 5, "K": 24, "N": 150},
    {"T": 160, "E": 3, "K": 16, "N": 40, "dtype": "bfloat16"},
    {"T": 90, "E": 1, "K": 20, "N": 30, "dtype": "float16"},
)
BENCH = ({"T": 32768, "E": 16, "K": 2048, "N": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(T, K, generator=g), torch.randn(E, K, N, generator=g) * K**-0.5
    # The first expert is hot: it gets half of the rows at least. With more than two, the second gets none.
    cuts = torch.randint(T // 2, T + 1, (E - 1,), generator=g).sort().values
    if E > 2:
        cuts[1] = cuts[0]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([T]))).to(torch.int32)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, offsets.to(device)


def reference(x, weight, offsets):
    cuts = offsets.tolist()
    return torch.cat([x[a:b] @ w for a, b, w in zip(cuts[:-1], cuts[1:], weight, strict=True)])
