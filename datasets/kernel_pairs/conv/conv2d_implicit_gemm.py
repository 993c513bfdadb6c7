"""Dense conv2d NHWC as implicit products: dx is the same kernel on dy, dweight splits the pixels of all images.

The pixels of all images are the rows of one product; its inner axis runs over (tap, channel chunk) in a single flat
loop, so that loads of the next tap are under way while the last chunk of this one is multiplied. For dx the taps are
flipped and the padding becomes SIDE - 1 - pad. dweight has few tiles, (tap, channel tiles), and very many rows: each
program adds one tile over one piece of the pixels, and the pieces meet as fp32 partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_implicit_gemm",
    "family": "conv",
    "op": "conv2d",
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
def _implicit_gemm(
    X, Weight, Out, rows, H, W, HO, WO, K, N, x_n, x_h, x_w, x_c, w_tap, w_k, w_n,
    SIDE: tl.constexpr, PAD: tl.constexpr, FLIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Pixels are counted in 32 bits, in which division is cheap; addresses take 64.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = m // WO
    top = row % HO - PAD
    left = m % WO - PAD
    image = X + (row // HO).to(tl.int64) * x_n
    chunks = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(SIDE * SIDE * chunks):
        tap = step // chunks
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        h = top + tap // SIDE
        w = left + tap % SIDE
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (m < rows)
        x_at = image + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w
        x = tl.load(x_at[:, None] + k.to(tl.int64)[None, :] * x_c, mask=there[:, None] & (k[None, :] < K), other=0.0)
        w_at = Weight + (SIDE * SIDE - 1 - tap if FLIP else tap) * w_tap + k[:, None] * w_k + n[None, :] * w_n
        acc = tl.dot(x, tl.load(w_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0), acc)
    tl.store(Out + m.to(tl.int64)[:, None] * N + n[None, :], acc, mask=(m[:, None] < rows) & (n[None, :] < N))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolve(x, weight, out, pad, flip):
    """`weight` is (SIDE, SIDE, K, N) in any order of its last two axes, `out` a contiguous (images, HO, WO, N)."""
    K, N = weight.shape[2:]
    HO, WO = out.shape[1:3]
    rows = out.shape[0] * HO * WO
    BLOCK_M, BLOCK_N = _tile(rows, 128), _tile(N, 128)
    _implicit_gemm[(triton.cdiv(rows, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, weight, out, rows, *x.shape[1:3], HO, WO, K, N, *x.stride(), *weight.stride()[1:],
        SIDE=weight.shape[0], PAD=pad, FLIP=flip,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(K, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, pad):
    weight = weight.contiguous()
    SIDE, _, _, CO = weight.shape
    B, H, W, _ = x.shape
    y = torch.empty(B, H + 2 * pad - SIDE + 1, W + 2 * pad - SIDE + 1, CO, device=x.device, dtype=x.dtype)
    return _convolve(x, weight, y, pad, flip=False), (x, weight, pad)


# --- backward ---
@triton.jit
def _implicit_dweight(
    X, DY, Parts, rows, H, W, HO, WO, CI, CO, x_n, x_h, x_w, x_c, dy_m, dy_c, rows_each,
    SIDE: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(CO, BLOCK_N)
    k = tl.program_id(0) // column_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    # Taps of one split stand side by side in the grid: they read the same pixels at the same time.
    tap = tl.program_id(1)
    split = tl.program_id(2)
    last = tl.minimum((split + 1) * rows_each, rows)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        row = m // WO
        h = row % HO + tap // SIDE - PAD
        w = m % WO + tap % SIDE - PAD
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (m < last)
        x_at = X + (row // HO).to(tl.int64) * x_n + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w
        xt = tl.load(x_at[None, :] + k.to(tl.int64)[:, None] * x_c, mask=there[None, :] & (k[:, None] < CI), other=0.0)
        dy_at = DY + m.to(tl.int64)[:, None] * dy_m + n.to(tl.int64)[None, :] * dy_c
        dy = tl.load(dy_at, mask=(m[:, None] < last) & (n[None, :] < CO), other=0.0)
        acc = tl.dot(xt, dy, acc)
    at = ((split * SIDE * SIDE + tap).to(tl.int64) * CI + k[:, None]) * CO + n[None, :]
    tl.store(Parts + at, acc, mask=(k[:, None] < CI) & (n[None, :] < CO))


def backward(saved, grad_y, needs=None):
    x, weight, pad = saved
    need_x, need_w = needs or (True, True)
    SIDE, _, CI, CO = weight.shape
    B, HO, WO, _ = grad_y.shape
    dx = dweight = None
    if need_x:
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _convolve(grad_y, weight.transpose(2, 3), dx, SIDE - 1 - pad, flip=True)
    if need_w:
        rows = B * HO * WO
        # Pixels of dy in one axis: a view, unless the cotangent's axes lie askew.
        dy_rows = grad_y.flatten(0, 2)
        BLOCK_K, BLOCK_N, BLOCK_M = _tile(CI, 128), _tile(CO, 128), _tile(rows, 128 // x.element_size())
        # Two programs for each of 132 processors, but splits of at least eight row tiles.
        tiles = triton.cdiv(CI, BLOCK_K) * triton.cdiv(CO, BLOCK_N)
        splits = max(1, min(rows // (8 * BLOCK_M), 264 // (tiles * SIDE * SIDE)))
        rows_each = triton.cdiv(triton.cdiv(rows, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(rows, rows_each)
        parts = torch.empty(splits, SIDE, SIDE, CI, CO, device=x.device, dtype=torch.float32)
        _implicit_dweight[(tiles, SIDE * SIDE, splits)](
            x, dy_rows, parts, rows, *x.shape[1:3], HO, WO, CI, CO, *x.stride(), *dy_rows.stride(), rows_each,
            SIDE=SIDE, PAD=pad, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 8, "CI": 16, "CO": 32, "SIDE": 3, "pad": 1},
    {"B": 3, "H": 9, "W": 11, "CI": 18, "CO": 21, "SIDE": 3, "pad": 1},
    {"B": 1, "H": 12, "W": 10, "CI": 16, "CO": 16, "SIDE": 5, "pad": 1, "dtype": "bfloat16"},
    {"B": 1, "H": 7, "W": 9, "CI": 32, "CO": 16, "SIDE": 2, "pad": 0, "dtype": "float16"},
)
BENCH = ({"B": 64, "H": 56, "W": 56, "CI": 128, "CO": 128, "SIDE": 3, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, H, W, CI, CO, SIDE, pad, dtype="float32", device="cpu", seed=0):
    if min(H, W) + 2 * pad < SIDE:
        raise ValueError("the window must fit into the padded image")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, W, CI, generator=g)
    weight = torch.randn(SIDE, SIDE, CI, CO, generator=g) * (SIDE * SIDE * CI) ** -0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, pad


def reference(x, weight, pad):
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), padding=pad)
    return y.permute(0, 2, 3, 1)
