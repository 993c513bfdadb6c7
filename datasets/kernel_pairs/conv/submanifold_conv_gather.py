"""Sparse 3x3x3 convolution by a kernel map: gather, multiply, scatter, tap by tap, and back with the two lists swapped.

The kernel map lists pairs (source voxel, target voxel) sorted by tap: y[target] += x[source] W[tap]. A program owns a
tile of pairs of one tap, found from the offsets of the taps in the list, so that one launch serves them all; voxels
meet by atomics in an fp32 buffer. dx is the same launch with sources and targets swapped and W transposed. For dweight
each tap's pairs are cut into equal pieces, with rows of x and dy gathered as the operands; the pieces meet as fp32
partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "submanifold_conv_gather",
    "family": "conv",
    "op": "submanifold_conv3d",
    "schema": 1,
    "techniques": ("atomics", "split-k", "two-stage-partials", "varlen", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tap_products(
    Rows, From, To, Offsets, Weight, Out, TAPS, K, N, row, col, w_k, w_n,
    TAP_LANES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tiles are dealt out tap by tap; the last tile of a tap may be short, and the last programs may find none.
    lane = tl.arange(0, TAP_LANES)
    first = tl.load(Offsets + lane, mask=lane < TAPS, other=0)
    last = tl.load(Offsets + lane + 1, mask=lane < TAPS, other=0)
    tiles = tl.cdiv(last - first, BLOCK_P)
    ends = tl.cumsum(tiles, 0)
    tap = tl.sum(((ends <= tl.program_id(0)) & (lane < TAPS)).to(tl.int32), 0)
    own = lane == tap
    tile = tl.program_id(0) - tl.sum(tl.where(own, ends - tiles, 0), 0)
    p = tl.sum(tl.where(own, first, 0), 0) + tile * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < tl.sum(tl.where(own, last, 0), 0)
    if tap < TAPS:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        source = tl.load(From + p, mask=live, other=0).to(tl.int64)
        target = tl.load(To + p, mask=live, other=0).to(tl.int64)
        acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            rows_at = source[:, None] * row + k.to(tl.int64)[None, :] * col
            rows = tl.load(Rows + rows_at, mask=live[:, None] & (k[None, :] < K), other=0.0)
            w_at = tap * K * N + k[:, None] * w_k + n[None, :] * w_n
            weight = tl.load(Weight + w_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
            acc = tl.dot(rows, weight, acc)
        out_at = Out + target[:, None] * N + n[None, :]
        tl.atomic_add(out_at, acc, mask=live[:, None] & (n[None, :] < N), sem="relaxed")


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _scatter(rows, come_from, go_to, offsets, weight):
    """Sum of rows[come_from] @ weight[tap] at rows go_to; `weight` is (TAPS, K, N), its last two axes in any order."""
    TAPS, K, N = weight.shape
    out = torch.zeros(rows.shape[0], N, device=rows.device, dtype=torch.float32)
    BLOCK_P, BLOCK_N = _tile(come_from.numel(), 128), _tile(N, 128)
    # No tap leaves more than one short tile.
    _tap_products[(triton.cdiv(come_from.numel(), BLOCK_P) + TAPS, triton.cdiv(N, BLOCK_N))](
        rows, come_from, go_to, offsets, weight, out, TAPS, K, N, *rows.stride(), weight.stride(1), weight.stride(2),
        TAP_LANES=triton.next_power_of_2(TAPS), BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N,
        BLOCK_K=_tile(K, 128 // rows.element_size()), num_warps=8, num_stages=2,
    )  # fmt: skip
    return out.to(rows.dtype)


def forward(x, weight, sources, targets, offsets):
    weight = weight.contiguous()
    return _scatter(x, sources, targets, offsets, weight), (x, weight, sources, targets, offsets)


# --- backward ---
@triton.jit
def _tap_dweight(
    X, DY, Sources, Targets, Offsets, Parts, CI, CO, x_row, x_col, dy_row, dy_col,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(CO, BLOCK_N)
    k = tl.program_id(0) // column_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    tap = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(Offsets + tap)
    last = tl.load(Offsets + tap + 1)
    # Equal pieces of whatever this tap has: the centre pairs every voxel with itself, others have far fewer.
    each = tl.cdiv(tl.cdiv(last - first, tl.num_programs(2)), BLOCK_P) * BLOCK_P
    begin = first + split * each
    end = tl.minimum(begin + each, last)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        source = tl.load(Sources + p, mask=p < end, other=0).to(tl.int64)
        target = tl.load(Targets + p, mask=p < end, other=0).to(tl.int64)
        x_at = source[None, :] * x_row + k.to(tl.int64)[:, None] * x_col
        x = tl.load(X + x_at, mask=(p[None, :] < end) & (k[:, None] < CI), other=0.0)
        dy_at = target[:, None] * dy_row + n.to(tl.int64)[None, :] * dy_col
        dy = tl.load(DY + dy_at, mask=(p[:, None] < end) & (n[None, :] < CO), other=0.0)
        acc = tl.dot(x, dy, acc)
    at = ((split * tl.num_programs(1) + tap).to(tl.int64) * CI + k[:, None]) * CO + n[None, :]
    tl.store(Parts + at, acc, mask=(k[:, None] < CI) & (n[None, :] < CO))


def backward(saved, grad_y, needs=None):
    x, weight, sources, targets, offsets = saved
    need_x, need_w = needs or (True, True)
    TAPS, CI, CO = weight.shape
    dx = _scatter(grad_y, targets, sources, offsets, weight.transpose(1, 2)) if need_x else None
    if not need_w:
        return dx, None
    BLOCK_K, BLOCK_N = _tile(CI, 64), _tile(CO, 64)
    BLOCK_P = _tile(sources.numel(), 128 // x.element_size())
    # Many short pieces, since taps differ in length, but eight tiles for each on the average.
    tiles = triton.cdiv(CI, BLOCK_K) * triton.cdiv(CO, BLOCK_N)
    splits = max(1, min(sources.numel() // (8 * BLOCK_P * TAPS), 792 // (tiles * TAPS)))
    parts = torch.empty(splits, TAPS, CI, CO, device=x.device, dtype=torch.float32)
    _tap_dweight[(tiles, TAPS, splits)](
        x, grad_y, sources, targets, offsets, parts, CI, CO, *x.stride(), *grad_y.stride(),
        BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"V": 48, "EDGE": 5, "CI": 16, "CO": 16},
    {"V": 93, "EDGE": 7, "CI": 18, "CO": 21},
    {"V": 20, "EDGE": 3, "CI": 32, "CO": 16, "dtype": "bfloat16"},
    {"V": 9, "EDGE": 4, "CI": 8, "CO": 16, "dtype": "float16"},
)
BENCH = ({"V": 200000, "EDGE": 100, "CI": 64, "CO": 64, "dtype": "bfloat16"},)


def make_args(V, EDGE, CI, CO, dtype="float32", device="cpu", seed=0):
    if V > EDGE**3:
        raise ValueError("there are EDGE ** 3 cells for V voxels")
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(V, CI, generator=g), torch.randn(27, CI, CO, generator=g) * (27 * CI) ** -0.5)
    # Voxels in random order in a cube with an empty rim; which voxel is at each of the 27 places around each?
    cells = torch.randperm(EDGE**3, generator=g)[:V]
    place = torch.stack((cells // EDGE**2, cells // EDGE % EDGE, cells % EDGE)) + 1
    voxel = torch.full((EDGE + 2,) * 3, -1)
    voxel[tuple(place)] = torch.arange(V)
    around = torch.cartesian_prod(*(torch.arange(-1, 2),) * 3).t()
    found = voxel[tuple(place[:, None, :] + around[:, :, None])]
    tap, targets = (found >= 0).nonzero(as_tuple=True)
    sources = found[tap, targets]
    offsets = torch.searchsorted(tap, torch.arange(28))
    lists = (t.to(device=device, dtype=torch.int32) for t in (sources, targets, offsets))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), *lists


def reference(x, weight, sources, targets, offsets):
    y = torch.zeros(x.shape[0], weight.shape[2], device=x.device, dtype=torch.float32)
    bounds = offsets.tolist()
    for tap in range(weight.shape[0]):
        pairs = slice(bounds[tap], bounds[tap + 1])
        y.index_add_(0, targets[pairs], (x[sources[pairs]] @ weight[tap]).float())
    return y.to(x.dtype)
