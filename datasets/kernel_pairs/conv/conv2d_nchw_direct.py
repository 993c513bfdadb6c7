"""Direct conv2d NCHW: loops over taps stand outside the products, whose columns are pixels of a plane.

y[co, p] = sum over taps of W[tap] (co, ci) x[ci, p + tap]. A program owns a tile of output channels and a patch of
pixels of one image; within a tap both operands are plain tiles, and a shift moves the patch. dx is the same with
flipped taps and transposed W[tap]. For dweight a program owns one tap and walks image rows of its group of images: a
row that the tap shifts out of the image is skipped as a whole, in the others pixels are the summed axis of dy x^T.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_nchw_direct",
    "family": "conv",
    "op": "conv2d",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid", "halo", "strided-cotangent"),
    "saves": ("taps: fp32 or bf16 or fp16 (SIDE, SIDE, CO, CI)",),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _direct_conv(
    X, Taps, Out, K, N, H, W, HO, WO, x_n, x_c, x_h, x_w, t_o, t_k,
    SIDE: tl.constexpr, PAD: tl.constexpr, FLIP: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(WO, PATCH_W)
    patches = tl.cdiv(HO, PATCH_H) * across
    image = (tl.program_id(0) // patches).to(tl.int64)
    patch = tl.program_id(0) % patches
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    p = tl.arange(0, PATCH_H * PATCH_W)
    oh = patch // across * PATCH_H + p // PATCH_W
    ow = patch % across * PATCH_W + p % PATCH_W
    X += image * x_n
    acc = tl.zeros((BLOCK_O, PATCH_H * PATCH_W), tl.float32)
    for tap in range(SIDE * SIDE):
        h = oh - PAD + tap // SIDE
        w = ow - PAD + tap % SIDE
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W)
        x_at = X + h.to(tl.int64) * x_h + w.to(tl.int64) * x_w
        t_at = Taps + (SIDE * SIDE - 1 - tap if FLIP else tap) * N * K
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            weights = tl.load(t_at + o[:, None] * t_o + k[None, :] * t_k, (o[:, None] < N) & (k[None, :] < K), 0.0)
            x = tl.load(x_at[None, :] + k.to(tl.int64)[:, None] * x_c, there[None, :] & (k[:, None] < K), 0.0)
            acc = tl.dot(weights, x, acc)
    out_at = (image * N + o[:, None]) * HO * WO + oh[None, :] * WO + ow[None, :]
    tl.store(Out + out_at, acc, mask=(o[:, None] < N) & (oh[None, :] < HO) & (ow[None, :] < WO))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolve(x, taps, out, pad, flip):
    """`taps` is (SIDE, SIDE, N, K) in any order of its last two axes, `out` a contiguous (images, N, HO, WO)."""
    B, N, HO, WO = out.shape
    K = x.shape[1]
    PATCH_W = _tile(WO, 32)
    PATCH_H = max(1, min(128 // PATCH_W, triton.next_power_of_2(HO)))
    BLOCK_O = _tile(N, 128)
    _direct_conv[(B * triton.cdiv(HO, PATCH_H) * triton.cdiv(WO, PATCH_W), triton.cdiv(N, BLOCK_O))](
        x, taps, out, K, N, *x.shape[2:], HO, WO, *x.stride(), taps.stride(2), taps.stride(3),
        SIDE=taps.shape[0], PAD=pad, FLIP=flip, BLOCK_O=BLOCK_O, BLOCK_K=_tile(K, 128 // x.element_size()),
        PATCH_H=PATCH_H, PATCH_W=PATCH_W, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, pad):
    # One matrix per tap: in the order of torch the channels of a tap would lie SIDE * SIDE numbers apart.
    taps = weight.permute(2, 3, 0, 1).contiguous()
    SIDE, _, CO, _ = taps.shape
    B, _, H, W = x.shape
    y = torch.empty(B, CO, H + 2 * pad - SIDE + 1, W + 2 * pad - SIDE + 1, device=x.device, dtype=x.dtype)
    return _convolve(x, taps, y, pad, flip=False), (x, taps, pad)


# --- backward ---
@triton.jit
def _direct_dweight(
    X, DY, Parts, B, CI, CO, H, W, HO, WO, x_n, x_c, x_h, x_w, dy_n, dy_c, dy_h, dy_w, images_each,
    SIDE: tl.constexpr, PAD: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    input_tiles = tl.cdiv(CI, BLOCK_K)
    o = tl.program_id(0) // input_tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.program_id(0) % input_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    tap = tl.program_id(1)
    group = tl.program_id(2)
    # Output rows whose input row, shifted by the tap, exists.
    shift = tap // SIDE - PAD
    top = tl.maximum(0, -shift)
    bottom = tl.minimum(HO, H - shift)
    first = group * images_each
    images = tl.minimum(images_each, B - first)
    dy_rows = DY + o.to(tl.int64) * dy_c
    x_rows = X + k.to(tl.int64) * x_c
    acc = tl.zeros((BLOCK_O, BLOCK_K), tl.float32)
    # Rows of all images of the group, cut into runs of pixels, in one flat loop.
    runs = tl.cdiv(WO, RUN)
    for step in range(images * (bottom - top) * runs):
        ow = step % runs * RUN + tl.arange(0, RUN)
        oh = top + step // runs % (bottom - top)
        image = (first + step // runs // (bottom - top)).to(tl.int64)
        w = ow + tap % SIDE - PAD
        dy_at = dy_rows + image * dy_n + oh.to(tl.int64) * dy_h
        dy = tl.load(dy_at[:, None] + ow.to(tl.int64)[None, :] * dy_w, (o[:, None] < CO) & (ow[None, :] < WO), 0.0)
        x_at = x_rows + image * x_n + (oh + shift).to(tl.int64) * x_h
        there = (w >= 0) & (w < W) & (ow < WO)
        x = tl.load(x_at[None, :] + w.to(tl.int64)[:, None] * x_w, there[:, None] & (k[None, :] < CI), 0.0)
        acc = tl.dot(dy, x, acc)
    at = Parts + ((group * SIDE * SIDE + tap).to(tl.int64) * CO + o[:, None]) * CI + k[None, :]
    tl.store(at, acc, mask=(o[:, None] < CO) & (k[None, :] < CI))


def backward(saved, grad_y, needs=None):
    x, taps, pad = saved
    need_x, need_w = needs or (True, True)
    SIDE, _, CO, CI = taps.shape
    B, _, HO, WO = grad_y.shape
    dx = dweight = None
    if need_x:
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _convolve(grad_y, taps.transpose(2, 3), dx, SIDE - 1 - pad, flip=True)
    if need_w:
        BLOCK_O, BLOCK_K = _tile(CO, 128), _tile(CI, 128)
        # One program for each of 132 processors: more groups of images would only add partials.
        tiles = triton.cdiv(CO, BLOCK_O) * triton.cdiv(CI, BLOCK_K)
        groups = max(1, min(B, 132 // (tiles * SIDE * SIDE)))
        images_each = triton.cdiv(B, groups)
        groups = triton.cdiv(B, images_each)
        parts = torch.empty(groups, SIDE, SIDE, CO, CI, device=x.device, dtype=torch.float32)
        _direct_dweight[(tiles, SIDE * SIDE, groups)](
            x, grad_y, parts, B, CI, CO, *x.shape[2:], HO, WO, *x.stride(), *grad_y.stride(), images_each,
            SIDE=SIDE, PAD=pad, BLOCK_O=BLOCK_O, BLOCK_K=BLOCK_K, RUN=_tile(WO, 128 // x.element_size()),
            num_warps=8, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(taps.dtype).permute(2, 3, 0, 1)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "CI": 16, "CO": 32, "H": 8, "W": 8, "SIDE": 3, "pad": 1},
    {"B": 3, "CI": 18, "CO": 21, "H": 9, "W": 19, "SIDE": 3, "pad": 1},
    {"B": 1, "CI": 16, "CO": 16, "H": 12, "W": 10, "SIDE": 5, "pad": 1, "dtype": "bfloat16"},
    {"B": 1, "CI": 32, "CO": 16, "H": 7, "W": 9, "SIDE": 2, "pad": 0, "dtype": "float16"},
)
BENCH = ({"B": 32, "CI": 128, "CO": 128, "H": 64, "W": 64, "SIDE": 3, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, CI, CO, H, W, SIDE, pad, dtype="float32", device="cpu", seed=0):
    if min(H, W) + 2 * pad < SIDE:
        raise ValueError("the window must fit into the padded image")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, CI, H, W, generator=g)
    weight = torch.randn(CO, CI, SIDE, SIDE, generator=g) * (SIDE * SIDE * CI) ** -0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, pad


def reference(x, weight, pad):
    return torch.nn.functional.conv2d(x, weight, padding=pad)
