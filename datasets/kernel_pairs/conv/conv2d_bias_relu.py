"""3x3 conv2d NHWC with bias and ReLU: the saved output masks dy while both products load it; dbias rides on dweight.

y = relu(conv(x, W) + bias), padding 1. No masked copy of dy is written: wherever a tile of dy is loaded the same tile
of y comes along, and dy counts where y > 0. dx is the product with flipped taps. A dweight program owns the three taps
of one kernel row, which share the masked tile, over one piece of the pixels; the programs of the first row and of the
first channel tile also sum that tile to dbias. Pieces meet as fp32 partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_bias_relu",
    "family": "conv",
    "op": "conv2d_bias_relu",
    "schema": 1,
    "techniques": ("prologue-fusion", "saved-output", "split-k", "two-stage-partials", "owner-grid"),
    "saves": ("y: fp32 or bf16 or fp16 (B, H, W, CO)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bias_relu_conv(
    X, Weight, Bias, Y, pixels, H, W, CI, CO,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = m // W % H
    w = m % W
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in range(9):
        down = tap // 3 - 1
        right = tap % 3 - 1
        there = (h + down >= 0) & (h + down < H) & (w + right >= 0) & (w + right < W) & (m < pixels)
        # A shift of the window is a shift of the pixel's number, as long as it stays in the image.
        at = (m + down * W + right).to(tl.int64) * CI
        for start in range(0, CI, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(X + at[:, None] + k[None, :], mask=there[:, None] & (k[None, :] < CI), other=0.0)
            w_at = (tap * CI + k[:, None]) * CO + n[None, :]
            z = tl.dot(x, tl.load(Weight + w_at, mask=(k[:, None] < CI) & (n[None, :] < CO), other=0.0), z)
    z += tl.load(Bias + n, mask=n < CO, other=0.0).to(tl.float32)[None, :]
    y_at = m.to(tl.int64)[:, None] * CO + n[None, :]
    tl.store(Y + y_at, tl.maximum(z, 0.0), mask=(m[:, None] < pixels) & (n[None, :] < CO))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    B, H, W, CI = x.shape
    CO = weight.shape[3]
    y = torch.empty(B, H, W, CO, device=x.device, dtype=x.dtype)
    pixels = B * H * W
    BLOCK_M, BLOCK_N = _tile(pixels, 128), _tile(CO, 128)
    _bias_relu_conv[(triton.cdiv(pixels, BLOCK_M), triton.cdiv(CO, BLOCK_N))](
        x, weight, bias, y, pixels, H, W, CI, CO,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(CI, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, bias, y)


# --- backward ---
@triton.jit
def _relu_conv_dx(
    DY, Y, Weight, DX, pixels, H, W, CI, CO, dy_n, dy_h, dy_w, dy_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = m // W % H
    w = m % W
    dy_pixel = (m // W // H).to(tl.int64) * dy_n + h.to(tl.int64) * dy_h + w.to(tl.int64) * dy_w
    chunks = tl.cdiv(CO, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(9 * chunks):
        tap = step // chunks
        down = 1 - tap // 3
        right = 1 - tap % 3
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        there = (h + down >= 0) & (h + down < H) & (w + right >= 0) & (w + right < W) & (m < pixels)
        live = there[:, None] & (k[None, :] < CO)
        dy_at = DY + dy_pixel + down.to(tl.int64) * dy_h + right.to(tl.int64) * dy_w
        dy = tl.load(dy_at[:, None] + k.to(tl.int64)[None, :] * dy_c, mask=live, other=0.0)
        y = tl.load(Y + ((m + down * W + right).to(tl.int64) * CO)[:, None] + k[None, :], mask=live, other=0.0)
        dz = tl.where(y > 0.0, dy, 0.0).to(Weight.dtype.element_ty)
        w_at = (tap * CI + n[None, :]) * CO + k[:, None]
        acc = tl.dot(dz, tl.load(Weight + w_at, mask=(k[:, None] < CO) & (n[None, :] < CI), other=0.0), acc)
    tl.store(DX + m.to(tl.int64)[:, None] * CI + n[None, :], acc, mask=(m[:, None] < pixels) & (n[None, :] < CI))


@triton.jit
def _relu_conv_dparams(
    X, DY, Y, Parts, pixels, H, W, CI, CO, dy_m, dy_c, pixels_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (k, n) of the taps left, middle and right of one kernel row, over the pixels of one split.
    column_tiles = tl.cdiv(CO, BLOCK_N)
    input_tile = tl.program_id(0) // column_tiles
    k = input_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    kernel_row = tl.program_id(1)
    down = kernel_row - 1
    split = tl.program_id(2)
    last = tl.minimum((split + 1) * pixels_each, pixels)
    left = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    middle = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    right = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * pixels_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        h = m // W % H
        w = m % W
        live = (m[:, None] < last) & (n[None, :] < CO)
        dy_at = m.to(tl.int64)[:, None] * dy_m + n.to(tl.int64)[None, :] * dy_c
        dy = tl.load(DY + dy_at, mask=live, other=0.0)
        y = tl.load(Y + m.to(tl.int64)[:, None] * CO + n[None, :], mask=live, other=0.0)
        dz = tl.where(y > 0.0, dy, 0.0).to(X.dtype.element_ty)
        dbias += tl.sum(dz.to(tl.float32), 0)
        there = (h + down >= 0) & (h + down < H) & (m < last)
        x_at = X + ((m + down * W).to(tl.int64) * CI)[None, :] + k[:, None]
        x = tl.load(x_at - CI, mask=(there & (w > 0))[None, :] & (k[:, None] < CI), other=0.0)
        left = tl.dot(x, dz, left)
        x = tl.load(x_at, mask=there[None, :] & (k[:, None] < CI), other=0.0)
        middle = tl.dot(x, dz, middle)
        x = tl.load(x_at + CI, mask=(there & (w + 1 < W))[None, :] & (k[:, None] < CI), other=0.0)
        right = tl.dot(x, dz, right)
    # A split's partials: nine matrices (CI, CO), then one row for dbias.
    Parts += split.to(tl.int64) * (9 * CI + 1) * CO
    tile = (k[:, None] < CI) & (n[None, :] < CO)
    at = Parts + (kernel_row * 3 * CI + k[:, None]) * CO + n[None, :]
    tl.store(at, left, mask=tile)
    tl.store(at + CI * CO, middle, mask=tile)
    tl.store(at + 2 * CI * CO, right, mask=tile)
    if (kernel_row == 0) & (input_tile == 0):
        tl.store(Parts + 9 * CI * CO + n, dbias, mask=n < CO)


def backward(saved, grad_y, needs=None):
    x, weight, bias, y = saved
    need_x, need_w, need_b = needs or (True, True, True)
    B, H, W, CI = x.shape
    CO = weight.shape[3]
    pixels = B * H * W
    inner = 128 // x.element_size()
    dx = dweight = dbias = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_M, BLOCK_N = _tile(pixels, 128), _tile(CI, 128)
        _relu_conv_dx[(triton.cdiv(pixels, BLOCK_M), triton.cdiv(CI, BLOCK_N))](
            grad_y, y, weight, dx, pixels, H, W, CI, CO, *grad_y.stride(),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(CO, inner // 2), num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_w or need_b:
        # Pixels of dy in one axis: a view, unless the cotangent's axes lie askew.
        dy_rows = grad_y.flatten(0, 2)
        BLOCK_K, BLOCK_N, BLOCK_M = _tile(CI, 64), _tile(CO, 64), _tile(pixels, inner)
        # Two programs for each of 132 processors, but splits of at least eight row tiles.
        tiles = triton.cdiv(CI, BLOCK_K) * triton.cdiv(CO, BLOCK_N)
        splits = max(1, min(pixels // (8 * BLOCK_M), 264 // (3 * tiles)))
        pixels_each = triton.cdiv(triton.cdiv(pixels, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(pixels, pixels_each)
        parts = torch.empty(splits, 9 * CI + 1, CO, device=x.device, dtype=torch.float32)
        _relu_conv_dparams[(tiles, 3, splits)](
            x, dy_rows, y, parts, pixels, H, W, CI, CO, *dy_rows.stride(), pixels_each,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
        totals = parts.sum(0)
        dweight, dbias = totals[:-1].view(weight.shape).to(weight.dtype), totals[-1].to(bias.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 8, "CI": 16, "CO": 32},
    {"B": 3, "H": 9, "W": 11, "CI": 18, "CO": 21},
    {"B": 1, "H": 12, "W": 5, "CI": 16, "CO": 16, "dtype": "bfloat16"},
    {"B": 2, "H": 1, "W": 9, "CI": 8, "CO": 16, "dtype": "float16"},
)
BENCH = ({"B": 64, "H": 56, "W": 56, "CI": 128, "CO": 128, "dtype": "bfloat16"},)


def make_args(B, H, W, CI, CO, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(B, H, W, CI, generator=g), torch.randn(CO, generator=g) * 0.5
    weight = torch.randn(3, 3, CI, CO, generator=g) * (9 * CI) ** -0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias):
    z = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), bias, padding=1)
    return torch.relu(z).permute(0, 2, 3, 1)
