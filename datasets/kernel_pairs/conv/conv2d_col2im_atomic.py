"""Conv2d NCHW with the columns formed in registers: each tile of dcolumns is scattered into fp32 dx by atomics.

The weight is used as it lies in memory, (CO, CI taps), and y[b] = W columns[b], where row (ci, tap) of the columns is
plane ci shifted by the tap. Nothing of that matrix is stored: forward and dweight gather its tiles while they multiply.
dx is the scatter of W^T dy, one atomic add for each (channel, tap, output pixel). It needs no memory but the image in
fp32, and no question which outputs looked at a pixel. A gather adds in registers instead: it wins where windows overlap
much, atomics where strides leave few taps to a pixel. Without overlap no two adds meet.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_col2im_atomic",
    "family": "conv",
    "op": "conv2d",
    "schema": 1,
    "techniques": ("atomics", "split-k", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _look(r, p, H, W, WO, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr):
    """Where row r = (channel, tap) of the columns looks for output pixel p: place in the image, and whether inside."""
    tap = r % (SIDE * SIDE)
    h = p // WO * STRIDE - PAD + tap // SIDE
    w = p % WO * STRIDE - PAD + tap % SIDE
    return (r // (SIDE * SIDE) * H + h) * W + w, (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def _columns_fwd(
    X, Weight, Y, H, W, HO, WO, R, CO, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(HO * WO, BLOCK_P)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    X += image * (R // (SIDE * SIDE)) * H * W
    acc = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        weights = tl.load(Weight + o[:, None] * R + r[None, :], mask=(o[:, None] < CO) & (r[None, :] < R), other=0.0)
        at, inside = _look(r[:, None], p[None, :], H, W, WO, SIDE, STRIDE, PAD)
        columns = tl.load(X + at, mask=inside & (r[:, None] < R) & (p[None, :] < HO * WO), other=0.0)
        acc = tl.dot(weights, columns, acc)
    y_at = (image * CO + o[:, None]) * HO * WO + p[None, :]
    tl.store(Y + y_at, acc, mask=(o[:, None] < CO) & (p[None, :] < HO * WO))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def forward(x, weight, stride, pad):
    x, weight = x.contiguous(), weight.contiguous()
    B, CI, H, W = x.shape
    CO, _, SIDE, _ = weight.shape
    HO, WO = ((size + 2 * pad - SIDE) // stride + 1 for size in (H, W))
    y = torch.empty(B, CO, HO, WO, device=x.device, dtype=x.dtype)
    R = CI * SIDE * SIDE
    BLOCK_O, BLOCK_P = _tile(CO, 128), _tile(HO * WO, 128)
    _columns_fwd[(B * triton.cdiv(HO * WO, BLOCK_P), triton.cdiv(CO, BLOCK_O))](
        x, weight, y, H, W, HO, WO, R, CO, SIDE=SIDE, STRIDE=stride, PAD=pad,
        BLOCK_O=BLOCK_O, BLOCK_P=BLOCK_P, BLOCK_R=_tile(R, 32), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, stride, pad)


# --- backward ---
@triton.jit
def _scatter_dx(
    DY, Weight, DX, H, W, HO, WO, R, CO, dy_n, dy_c, dy_h, dy_w,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(HO * WO, BLOCK_P)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    pixel = DY + image * dy_n + (p // WO).to(tl.int64) * dy_h + (p % WO).to(tl.int64) * dy_w
    dcolumns = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    for start in range(0, CO, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        weights = tl.load(Weight + o[None, :] * R + r[:, None], mask=(o[None, :] < CO) & (r[:, None] < R), other=0.0)
        dy_at = pixel[None, :] + o.to(tl.int64)[:, None] * dy_c
        dy = tl.load(dy_at, mask=(o[:, None] < CO) & (p[None, :] < HO * WO), other=0.0)
        dcolumns = tl.dot(weights, dy, dcolumns)
    at, inside = _look(r[:, None], p[None, :], H, W, WO, SIDE, STRIDE, PAD)
    DX += image * (R // (SIDE * SIDE)) * H * W
    tl.atomic_add(DX + at, dcolumns, mask=inside & (r[:, None] < R) & (p[None, :] < HO * WO), sem="relaxed")


@triton.jit
def _columns_dweight(
    X, DY, Parts, B, H, W, HO, WO, R, CO, dy_n, dy_c, dy_h, dy_w, images_each,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * images_each
    tiles = tl.cdiv(HO * WO, BLOCK_P)
    channel = DY + o.to(tl.int64) * dy_c
    acc = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
    for step in range(tl.minimum(images_each, B - first) * tiles):
        image = (first + step // tiles).to(tl.int64)
        p = step % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        dy_at = image * dy_n + (p // WO).to(tl.int64) * dy_h + (p % WO).to(tl.int64) * dy_w
        dy = tl.load(channel[:, None] + dy_at[None, :], mask=(o[:, None] < CO) & (p[None, :] < HO * WO), other=0.0)
        at, inside = _look(r[None, :], p[:, None], H, W, WO, SIDE, STRIDE, PAD)
        image_x = X + image * (R // (SIDE * SIDE)) * H * W
        columns = tl.load(image_x + at, mask=inside & (r[None, :] < R) & (p[:, None] < HO * WO), other=0.0)
        acc = tl.dot(dy, columns, acc)
    out_at = (tl.program_id(2).to(tl.int64) * CO + o[:, None]) * R + r[None, :]
    tl.store(Parts + out_at, acc, mask=(o[:, None] < CO) & (r[None, :] < R))


def backward(saved, grad_y, needs=None):
    x, weight, stride, pad = saved
    need_x, need_w = needs or (True, True)
    B, CI, H, W = x.shape
    CO, _, SIDE, _ = weight.shape
    HO, WO = grad_y.shape[2:]
    R = CI * SIDE * SIDE
    dx = dweight = None
    if need_x:
        image = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        BLOCK_R, BLOCK_P = _tile(R, 64), _tile(HO * WO, 128)
        _scatter_dx[(B * triton.cdiv(HO * WO, BLOCK_P), triton.cdiv(R, BLOCK_R))](
            grad_y, weight, image, H, W, HO, WO, R, CO, *grad_y.stride(), SIDE=SIDE, STRIDE=stride, PAD=pad,
            BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P, BLOCK_O=_tile(CO, 128 // x.element_size()), num_warps=8, num_stages=3,
        )  # fmt: skip
        dx = image.to(x.dtype)
    if need_w:
        BLOCK_O, BLOCK_R = _tile(CO, 128), _tile(R, 64)
        # Two programs for each of 132 processors.
        tiles = triton.cdiv(CO, BLOCK_O) * triton.cdiv(R, BLOCK_R)
        images_each = triton.cdiv(B, max(1, min(B, 264 // tiles)))
        groups = triton.cdiv(B, images_each)
        parts = torch.empty(groups, CO, CI, SIDE, SIDE, device=x.device, dtype=torch.float32)
        _columns_dweight[(triton.cdiv(CO, BLOCK_O), triton.cdiv(R, BLOCK_R), groups)](
            x, grad_y, parts, B, H, W, HO, WO, R, CO, *grad_y.stride(), images_each, SIDE=SIDE, STRIDE=stride, PAD=pad,
            BLOCK_O=BLOCK_O, BLOCK_R=BLOCK_R, BLOCK_P=_tile(HO * WO, 32), num_warps=8, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "CI": 4, "CO": 32, "H": 8, "W": 8, "SIDE": 3, "stride": 1, "pad": 1},
    {"B": 3, "CI": 7, "CO": 21, "H": 9, "W": 19, "SIDE": 3, "stride": 2, "pad": 1},
    {"B": 1, "CI": 3, "CO": 16, "H": 12, "W": 10, "SIDE": 4, "stride": 4, "pad": 0, "dtype": "bfloat16"},
    {"B": 1, "CI": 16, "CO": 8, "H": 7, "W": 9, "SIDE": 2, "stride": 1, "pad": 1, "dtype": "float16"},
)
BENCH = ({"B": 64, "CI": 64, "CO": 128, "H": 56, "W": 56, "SIDE": 3, "stride": 2, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, CI, CO, H, W, SIDE, stride, pad, dtype="float32", device="cpu", seed=0):
    if min(H, W) + 2 * pad < SIDE:
        raise ValueError("the window must fit into the padded image")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, CI, H, W, generator=g)
    weight = torch.randn(CO, CI, SIDE, SIDE, generator=g) * (SIDE * SIDE * CI) ** -0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, stride, pad


def reference(x, weight, stride, pad):
    return torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad)
