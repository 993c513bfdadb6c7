"""Grouped product by persistent programs that find their problem themselves; dW of hot experts is cut into chunks.

Rows are sorted by expert, and only the device knows how many each has. Every program keeps the running count of units
per expert in registers and walks through unit numbers with a fixed stride; the expert of a unit is the number of
experts that end before it. For forward and dX a unit is a tile of the output. For dW it is a tile over at most CHUNK
rows: an expert with half of all tokens becomes many units instead of one long tail. Chunks of one expert meet by fp32
atomics; an only chunk just stores.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "grouped_gemm_persistent",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("persistent-grid", "varlen", "split-k", "atomics", "strided-cotangent"),
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
def _persistent_dw(
    X, DY, Offsets, DW, N, K, E, x_m, x_k, dy_m, dy_n, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    units = (end - begin + CHUNK - 1) // CHUNK
    after = tl.cumsum(units, 0)
    columns = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(K, BLOCK_K) * columns
    # Tiles of one chunk are neighbours in time: they share its rows in L2.
    for number in range(tl.program_id(0), tl.sum(units, 0) * tiles, tl.num_programs(0)):
        expert, first, last = _unit_rows(number // tiles, begin, end, after, units, e, CHUNK)
        tile = number % tiles
        k = (tile // columns).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        n = (tile % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for start in range(first, last, BLOCK_M):
            m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
            live = m < last
            xt = tl.load(X + k[:, None] * x_k + m[None, :] * x_m, mask=(k[:, None] < K) & live[None, :], other=0.0)
            dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=live[:, None] & (n[None, :] < N), other=0.0)
            acc = tl.dot(xt, dy, acc)
        out = DW + (expert.to(tl.int64) * K + k[:, None]) * N + n[None, :]
        inside = (k[:, None] < K) & (n[None, :] < N)
        if tl.sum(tl.where(e == expert, units, 0), 0) == 1:
            tl.store(out, acc, mask=inside)
        else:
            tl.atomic_add(out, acc, mask=inside, sem="relaxed")


def backward(saved, grad_y, needs=(True, True)):
    x, weight, offsets = saved
    E, K, N = weight.shape
    dx = _rows(grad_y, weight.transpose(1, 2), offsets) if needs[0] else None
    dw = None
    if needs[1]:
        # Zeros also for experts without rows, which are no unit.
        total = torch.zeros(E, K, N, device=weight.device, dtype=torch.float32)
        _persistent_dw[(_processors(x),)](
            x, grad_y, offsets, total, N, K, E, *x.stride(), *grad_y.stride(),
            CHUNK=2048 if x.shape[0] >= 4096 else 64, BLOCK_M=256 // x.element_size() if x.shape[0] >= 4096 else 32,
            BLOCK_N=_side(N), BLOCK_K=_side(K), BLOCK_E=triton.next_power_of_2(E), num_warps=8, num_stages=3,
        )  # fmt: skip
        dw = total.to(weight.dtype)
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 128, "E": 2, "K": 32, "N": 64},
    {"T": 371, "E": 5, "K": 24, "N": 150},
    {"T": 160, "E": 3, "K": 16, "N": 40, "dtype": "bfloat16"},
    {"T": 90, "E": 1, "K": 20, "N": 30, "dtype": "float16"},
)
BENCH = ({"T": 16384, "E": 16, "K": 1024, "N": 2048, "dtype": "bfloat16"},)


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
