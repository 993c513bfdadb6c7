"""Grouped conv2d NHWC, the group in the grid: taps and the few channels of a group are one axis of each product.

A group of 8 to 64 channels alone would leave most of a product's inner axis empty. So an inner index j = (tap, channel)
runs over all taps of the group, each index with its own shift of the pixel, and one product serves several taps. dx
contracts the same axis with flipped taps and output channels; in dweight j is the axis of rows, so that a program reads
a tile of dy once for all the taps it owns, and splits of the pixels meet as fp32 partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_grouped",
    "family": "conv",
    "op": "conv2d_grouped",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid", "halo", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_conv(
    X, Weight, Out, rows, H, W, HO, WO, x_n, x_h, x_w, x_c, w_tap, w_k, w_n,
    K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, FLIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # CHANNELS is K rounded up to a power of two: splitting j is a shift, and runs of channels stay vectors.
    group = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    top = m // WO % HO - PAD
    left = m % WO - PAD
    image = X + (m // WO // HO).to(tl.int64) * x_n + group.to(tl.int64) * K * x_c
    Weight += group * SIDE * SIDE * K * N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SIDE * SIDE * CHANNELS, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        tap = j // CHANNELS
        k = j % CHANNELS
        live = (tap < SIDE * SIDE) & (k < K)
        h = top[:, None] + (tap // SIDE)[None, :]
        w = left[:, None] + (tap % SIDE)[None, :]
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & live[None, :] & (m < rows)[:, None]
        x_at = image[:, None] + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w + k.to(tl.int64)[None, :] * x_c
        x = tl.load(x_at, mask=there, other=0.0)
        w_at = Weight + (SIDE * SIDE - 1 - tap if FLIP else tap)[:, None] * w_tap + k[:, None] * w_k + n[None, :] * w_n
        weight = tl.load(w_at, mask=live[:, None] & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, weight, acc)
    out_at = (m.to(tl.int64)[:, None] * tl.num_programs(1) + group) * N + n[None, :]
    tl.store(Out + out_at, acc, mask=(m[:, None] < rows) & (n[None, :] < N))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolve(x, weight, out, pad, flip):
    """`weight` is (groups, SIDE, SIDE, K, N) in any order of its last two axes; `out` is contiguous."""
    G, SIDE, _, K, N = weight.shape
    HO, WO = out.shape[1:3]
    rows = out.shape[0] * HO * WO
    CHANNELS = triton.next_power_of_2(K)
    BLOCK_M = _tile(rows, 128)
    _grouped_conv[(triton.cdiv(rows, BLOCK_M), G)](
        x, weight, out, rows, *x.shape[1:3], HO, WO, *x.stride(), *weight.stride()[2:],
        K=K, N=N, SIDE=SIDE, PAD=pad, FLIP=flip, BLOCK_M=BLOCK_M, BLOCK_N=_tile(N, 256),
        BLOCK_J=_tile(SIDE * SIDE * CHANNELS, 128 // x.element_size()), CHANNELS=CHANNELS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, pad):
    weight = weight.contiguous()
    G, SIDE, _, _, CO = weight.shape
    B, H, W, _ = x.shape
    y = torch.empty(B, H + 2 * pad - SIDE + 1, W + 2 * pad - SIDE + 1, G * CO, device=x.device, dtype=x.dtype)
    return _convolve(x, weight, y, pad, flip=False), (x, weight, pad)


# --- backward ---
@triton.jit
def _grouped_dweight(
    X, DY, Parts, rows, H, W, HO, WO, x_n, x_h, x_w, x_c, dy_m, dy_c, rows_each,
    CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    split = tl.program_id(2)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    n = tl.arange(0, BLOCK_N)
    tap = j // CHANNELS
    k = j % CHANNELS
    live = (tap < SIDE * SIDE) & (k < CI)
    x_channel = X + (group * CI + k).to(tl.int64) * x_c
    dy_channel = DY + (group * CO + n).to(tl.int64) * dy_c
    last = tl.minimum((split + 1) * rows_each, rows)
    acc = tl.zeros((BLOCK_J, BLOCK_N), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dy = tl.load(
            (m.to(tl.int64) * dy_m)[:, None] + dy_channel[None, :],
            mask=(m[:, None] < last) & (n[None, :] < CO),
            other=0.0,
        )
        h = (m // WO % HO - PAD)[None, :] + (tap // SIDE)[:, None]
        w = (m % WO - PAD)[None, :] + (tap % SIDE)[:, None]
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & live[:, None] & (m < last)[None, :]
        x_at = x_channel[:, None] + ((m // WO // HO).to(tl.int64) * x_n)[None, :]
        xt = tl.load(x_at + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w, mask=there, other=0.0)
        acc = tl.dot(xt, dy, acc)
    at = ((split * tl.num_programs(1) + group).to(tl.int64) * SIDE * SIDE + tap) * CI + k
    tl.store(Parts + at[:, None] * CO + n[None, :], acc, mask=live[:, None] & (n[None, :] < CO))


def backward(saved, grad_y, needs=None):
    x, weight, pad = saved
    need_x, need_w = needs or (True, True)
    G, SIDE, _, CI, CO = weight.shape
    B, HO, WO, _ = grad_y.shape
    dx = dweight = None
    if need_x:
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _convolve(grad_y, weight.transpose(3, 4), dx, SIDE - 1 - pad, flip=True)
    if need_w:
        rows = B * HO * WO
        # Pixels of dy in one axis: a view, unless the cotangent's axes lie askew.
        dy_rows = grad_y.flatten(0, 2)
        CHANNELS = triton.next_power_of_2(CI)
        BLOCK_J, BLOCK_M = _tile(SIDE * SIDE * CHANNELS, 128), _tile(rows, 128 // x.element_size())
        # Three small programs for each of 132 processors, but splits of at least eight row tiles.
        tiles = triton.cdiv(SIDE * SIDE * CHANNELS, BLOCK_J)
        splits = max(1, min(rows // (8 * BLOCK_M), 396 // (tiles * G)))
        rows_each = triton.cdiv(triton.cdiv(rows, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(rows, rows_each)
        parts = torch.empty(splits, G, SIDE, SIDE, CI, CO, device=x.device, dtype=torch.float32)
        _grouped_dweight[(tiles, G, splits)](
            x, dy_rows, parts, rows, *x.shape[1:3], HO, WO, *x.stride(), *dy_rows.stride(), rows_each,
            CI=CI, CO=CO, SIDE=SIDE, PAD=pad, BLOCK_M=BLOCK_M, BLOCK_N=_tile(CO, 256), BLOCK_J=BLOCK_J,
            CHANNELS=CHANNELS, num_warps=4, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 8, "G": 2, "CI": 8, "CO": 16, "SIDE": 3, "pad": 1},
    {"B": 2, "H": 9, "W": 11, "G": 3, "CI": 5, "CO": 6, "SIDE": 3, "pad": 1},
    {"B": 1, "H": 12, "W": 10, "G": 2, "CI": 16, "CO": 4, "SIDE": 5, "pad": 1, "dtype": "bfloat16"},
    {"B": 1, "H": 6, "W": 9, "G": 4, "CI": 2, "CO": 8, "SIDE": 2, "pad": 0, "dtype": "float16"},
)
BENCH = ({"B": 64, "H": 28, "W": 28, "G": 16, "CI": 32, "CO": 32, "SIDE": 3, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, H, W, G, CI, CO, SIDE, pad, dtype="float32", device="cpu", seed=0):
    if min(H, W) + 2 * pad < SIDE:
        raise ValueError("the window must fit into the padded image")
    if max(CI, CO) > 256:
        raise ValueError("a group has up to 256 channels")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, W, G * CI, generator=g)
    weight = torch.randn(G, SIDE, SIDE, CI, CO, generator=g) * (SIDE * SIDE * CI) ** -0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, pad


def reference(x, weight, pad):
    G, SIDE, _, CI, CO = weight.shape
    filters = weight.permute(0, 4, 3, 1, 2).reshape(G * CO, CI, SIDE, SIDE)
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), filters, padding=pad, groups=G)
    return y.permute(0, 2, 3, 1)
