"""Transposed 4x4 conv2d of stride 2, NHWC, by the four parity classes of output pixels, in which it is a 2x2 conv.

Pixels (2q + p) of one axis meet taps 1 - p + 2i at inputs q + p - i, i = 0, 1: with (p, i) given along both axes all
accesses are dense in q, and no tap is wasted on a pixel it cannot reach. The forward's program owns pixels of one
class. dx visits, class by class, the four places of dy that an input pixel went to. A dweight program owns the four
taps of one class, which share each tile of that class's dy and see x shifted by at most one pixel; pieces of the pixels
meet as fp32 partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_transposed_up2",
    "family": "conv",
    "op": "conv_transpose2d",
    "schema": 1,
    "techniques": ("gather-form", "split-k", "two-stage-partials", "owner-grid", "halo", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _up2_fwd(
    X, Weight, Y, pixels, H, W, CI, CO, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_h = tl.program_id(2) // 2
    p_w = tl.program_id(2) % 2
    h = m // W % H
    w = m % W
    chunks = tl.cdiv(CI, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(4 * chunks):
        i = step // chunks // 2
        j = step // chunks % 2
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        from_h = h + (p_h - i)
        from_w = w + (p_w - j)
        there = (from_h >= 0) & (from_h < H) & (from_w >= 0) & (from_w < W) & (m < pixels)
        x_at = (m + (p_h - i) * W + (p_w - j)).to(tl.int64) * CI
        x = tl.load(X + x_at[:, None] + k[None, :], mask=there[:, None] & (k[None, :] < CI), other=0.0)
        tap = (1 - p_h + 2 * i) * 4 + (1 - p_w + 2 * j)
        w_at = (tap * CI + k[:, None]) * CO + n[None, :]
        acc = tl.dot(x, tl.load(Weight + w_at, mask=(k[:, None] < CI) & (n[None, :] < CO), other=0.0), acc)
    y_at = ((m // W * 2 + p_h).to(tl.int64) * 2 * W + 2 * w + p_w) * CO
    tl.store(Y + y_at[:, None] + n[None, :], acc, mask=(m[:, None] < pixels) & (n[None, :] < CO))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    B, H, W, CI = x.shape
    CO = weight.shape[3]
    pixels = B * H * W
    y = torch.empty(B, 2 * H, 2 * W, CO, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = _tile(pixels, 128), _tile(CO, 128)
    _up2_fwd[(triton.cdiv(pixels, BLOCK_M), triton.cdiv(CO, BLOCK_N), 4)](
        x, weight, y, pixels, H, W, CI, CO,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(CI, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight)


# --- backward ---
@triton.jit
def _up2_dx(
    DY, Weight, DX, pixels, H, W, CI, CO, dy_n, dy_h, dy_w, dy_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = m // W % H
    w = m % W
    image = DY + (m // W // H).to(tl.int64) * dy_n
    chunks = tl.cdiv(CO, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(16 * chunks):
        # Bits of the tap's number: the class (p_h, p_w), and which of its two taps along each axis (i, j).
        place = step // chunks
        p_h = place // 8
        p_w = place // 4 % 2
        i = place // 2 % 2
        j = place % 2
        k = step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
        q_h = h + (i - p_h)
        q_w = w + (j - p_w)
        there = (q_h >= 0) & (q_h < H) & (q_w >= 0) & (q_w < W) & (m < pixels)
        dy_at = image + (2 * q_h + p_h).to(tl.int64) * dy_h + (2 * q_w + p_w).to(tl.int64) * dy_w
        dy_at = dy_at[:, None] + k.to(tl.int64)[None, :] * dy_c
        dy = tl.load(dy_at, mask=there[:, None] & (k[None, :] < CO), other=0.0)
        tap = (1 - p_h + 2 * i) * 4 + (1 - p_w + 2 * j)
        w_at = (tap * CI + n[None, :]) * CO + k[:, None]
        acc = tl.dot(dy, tl.load(Weight + w_at, mask=(k[:, None] < CO) & (n[None, :] < CI), other=0.0), acc)
    tl.store(DX + m.to(tl.int64)[:, None] * CI + n[None, :], acc, mask=(m[:, None] < pixels) & (n[None, :] < CI))


@triton.jit
def _shifted(X, m, h, w, k, down, right, last, H, W, CI):
    """Channels k, as rows, of the pixels `down` and `right` of pixels m; zero outside the image."""
    there = (h + down >= 0) & (h + down < H) & (w + right >= 0) & (w + right < W) & (m < last)
    at = X + ((m + down * W + right).to(tl.int64) * CI)[None, :] + k[:, None]
    return tl.load(at, mask=there[None, :] & (k[:, None] < CI), other=0.0)


@triton.jit
def _up2_dweight(
    X, DY, Parts, pixels, H, W, CI, CO, dy_n, dy_h, dy_w, dy_c, pixels_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(CO, BLOCK_N)
    k = tl.program_id(0) // column_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    p_h = tl.program_id(1) // 2
    p_w = tl.program_id(1) % 2
    split = tl.program_id(2)
    last = tl.minimum((split + 1) * pixels_each, pixels)
    near_near = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    near_far = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    far_near = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    far_far = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(split * pixels_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        h = m // W % H
        w = m % W
        dy_at = (2 * h + p_h).to(tl.int64) * dy_h + (2 * w + p_w).to(tl.int64) * dy_w
        dy_at = DY + (dy_at + (m // W // H).to(tl.int64) * dy_n)[:, None] + n.to(tl.int64)[None, :] * dy_c
        dy = tl.load(dy_at, mask=(m[:, None] < last) & (n[None, :] < CO), other=0.0)
        near_near = tl.dot(_shifted(X, m, h, w, k, p_h, p_w, last, H, W, CI), dy, near_near)
        near_far = tl.dot(_shifted(X, m, h, w, k, p_h, p_w - 1, last, H, W, CI), dy, near_far)
        far_near = tl.dot(_shifted(X, m, h, w, k, p_h - 1, p_w, last, H, W, CI), dy, far_near)
        far_far = tl.dot(_shifted(X, m, h, w, k, p_h - 1, p_w - 1, last, H, W, CI), dy, far_far)
    tap = (1 - p_h) * 4 + 1 - p_w
    at = Parts + ((split * 16 + tap).to(tl.int64) * CI + k[:, None]) * CO + n[None, :]
    tile = (k[:, None] < CI) & (n[None, :] < CO)
    tl.store(at, near_near, mask=tile)
    tl.store(at + 2 * CI * CO, near_far, mask=tile)
    tl.store(at + 8 * CI * CO, far_near, mask=tile)
    tl.store(at + 10 * CI * CO, far_far, mask=tile)


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    B, H, W, CI = x.shape
    CO = weight.shape[3]
    pixels = B * H * W
    inner = 128 // x.element_size()
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_M, BLOCK_N = _tile(pixels, 128), _tile(CI, 128)
        _up2_dx[(triton.cdiv(pixels, BLOCK_M), triton.cdiv(CI, BLOCK_N))](
            grad_y, weight, dx, pixels, H, W, CI, CO, *grad_y.stride(),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(CO, inner), num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_w:
        BLOCK_K, BLOCK_N, BLOCK_M = _tile(CI, 64), _tile(CO, 64), _tile(pixels, inner // 2)
        # Two programs for each of 132 processors, but splits of at least eight row tiles.
        tiles = triton.cdiv(CI, BLOCK_K) * triton.cdiv(CO, BLOCK_N)
        splits = max(1, min(pixels // (8 * BLOCK_M), 264 // (4 * tiles)))
        pixels_each = triton.cdiv(triton.cdiv(pixels, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(pixels, pixels_each)
        parts = torch.empty(splits, 4, 4, CI, CO, device=x.device, dtype=torch.float32)
        _up2_dweight[(tiles, 4, splits)](
            x, grad_y, parts, pixels, H, W, CI, CO, *grad_y.stride(), pixels_each,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 8, "CI": 16, "CO": 32},
    {"B": 3, "H": 9, "W": 5, "CI": 18, "CO": 21},
    {"B": 1, "H": 6, "W": 7, "CI": 32, "CO": 16, "dtype": "bfloat16"},
    {"B": 2, "H": 1, "W": 9, "CI": 8, "CO": 16, "dtype": "float16"},
)
BENCH = ({"B": 32, "H": 32, "W": 32, "CI": 256, "CO": 128, "dtype": "bfloat16"},)


def make_args(B, H, W, CI, CO, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, H, W, CI, generator=g), torch.randn(4, 4, CI, CO, generator=g) * (4 * CI) ** -0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    y = torch.nn.functional.conv_transpose2d(x.permute(0, 3, 1, 2), weight.permute(2, 3, 0, 1), stride=2, padding=1)
    return y.permute(0, 2, 3, 1)
