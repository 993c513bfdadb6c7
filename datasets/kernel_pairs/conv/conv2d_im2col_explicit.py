"""Conv2d NHWC by an explicit im2col matrix and plain products: dx folds it back by a gather instead of atomics.

The columns, one row per output pixel and one number per (tap, channel), are not kept: the backward unfolds x again,
takes dweight = columns^T dy, then lets dcolumns = dy W^T overwrite the same buffer. Folding turns the overlapping
scatter around: a program owns input pixels, and for each tap asks which output pixel, if any, looked at them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_im2col_explicit",
    "family": "conv",
    "op": "conv2d",
    "schema": 1,
    "techniques": ("gather-form", "recompute", "in-place", "split-k", "two-stage-partials"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _unfold(
    X, Columns, rows, H, W, HO, WO, C, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tap = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    h = m // WO % HO * STRIDE - PAD + tap // SIDE
    w = m % WO * STRIDE - PAD + tap % SIDE
    there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (m < rows)
    x_at = ((m // WO // HO * H + h).to(tl.int64) * W + w) * C
    x = tl.load(X + x_at[:, None] + c[None, :], mask=there[:, None] & (c[None, :] < C), other=0.0)
    out_at = (m.to(tl.int64) * tl.num_programs(1) + tap) * C
    tl.store(Columns + out_at[:, None] + c[None, :], x, mask=(m[:, None] < rows) & (c[None, :] < C))


@triton.jit
def _product_split(
    A, B, Out, M, N, K, a_m, a_k, b_k, b_n, k_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Out[split] (M, N) = A B over k_each terms of the inner axis.
    split = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.minimum((split + 1) * k_each, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(split * k_each, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(A + m[:, None] * a_m + k[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < last), other=0.0)
        b = tl.load(B + k[:, None] * b_k + n[None, :] * b_n, mask=(k[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(Out + (split * M + m[:, None]) * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _unfolded(x, side, stride, pad, HO, WO):
    B, H, W, C = x.shape
    rows = B * HO * WO
    columns = torch.empty(rows, side * side * C, device=x.device, dtype=x.dtype)
    BLOCK_C = min(128, triton.next_power_of_2(C))
    BLOCK_M = min(4096 // BLOCK_C, triton.next_power_of_2(rows))
    _unfold[(triton.cdiv(rows, BLOCK_M), side * side, triton.cdiv(C, BLOCK_C))](
        x, columns, rows, H, W, HO, WO, C, SIDE=side, STRIDE=stride, PAD=pad,
        BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return columns


def _multiply(a, b, out, k_each):
    """out (splits, M, N) = a (M, K) @ b (K, N), `k_each` terms of the inner axis per split."""
    (M, K), N = a.shape, b.shape[1]
    BLOCK_M, BLOCK_N = _tile(M, 128), _tile(N, 128)
    _product_split[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N), triton.cdiv(K, k_each))](
        a, b, out, M, N, K, *a.stride(), *b.stride(), k_each,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(K, 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip


def forward(x, weight, stride, pad):
    x, weight = x.contiguous(), weight.contiguous()
    B, H, W, _ = x.shape
    SIDE, _, CI, CO = weight.shape
    HO, WO = ((size + 2 * pad - SIDE) // stride + 1 for size in (H, W))
    y = torch.empty(B, HO, WO, CO, device=x.device, dtype=x.dtype)
    columns = _unfolded(x, SIDE, stride, pad, HO, WO)
    _multiply(columns, weight.view(SIDE * SIDE * CI, CO), y, SIDE * SIDE * CI)
    return y, (x, weight, stride, pad)


# --- backward ---
@triton.jit
def _fold(
    DColumns, DX, pixels, H, W, HO, WO, C, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image = m // W // H
    h = m // W % H + PAD
    w = m % W + PAD
    dx = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for kh in range(SIDE):
        for kw in tl.static_range(SIDE):
            oh = (h - kh) // STRIDE
            ow = (w - kw) // STRIDE
            looked = (h >= kh) & (oh < HO) & (w >= kw) & (ow < WO) & (m < pixels)
            looked = looked & ((h - kh) % STRIDE == 0) & ((w - kw) % STRIDE == 0)
            at = (((image * HO + oh).to(tl.int64) * WO + ow) * SIDE * SIDE + kh * SIDE + kw) * C
            dx += tl.load(DColumns + at[:, None] + c[None, :], mask=looked[:, None] & (c[None, :] < C), other=0.0)
    tl.store(DX + m.to(tl.int64)[:, None] * C + c[None, :], dx, mask=(m[:, None] < pixels) & (c[None, :] < C))


def backward(saved, grad_y, needs=None):
    x, weight, stride, pad = saved
    need_x, need_w = needs or (True, True)
    B, H, W, CI = x.shape
    SIDE, _, _, CO = weight.shape
    HO, WO = grad_y.shape[1:3]
    rows, terms = B * HO * WO, SIDE * SIDE * CI
    # Rows of the products are pixels: one axis, for which the cotangent must be dense.
    grad_y = grad_y.contiguous().view(rows, CO)
    dx = dweight = None
    if need_w:
        columns = _unfolded(x, SIDE, stride, pad, HO, WO)
        tiles = triton.cdiv(terms, _tile(terms, 128)) * triton.cdiv(CO, _tile(CO, 128))
        k_each = triton.cdiv(triton.cdiv(rows, max(1, min(rows // 512, 264 // tiles))), 64) * 64
        parts = torch.empty(triton.cdiv(rows, k_each), SIDE, SIDE, CI, CO, device=x.device, dtype=torch.float32)
        _multiply(columns.t(), grad_y, parts, k_each)
        dweight = parts.sum(0).to(weight.dtype)
    else:
        columns = torch.empty(rows, terms, device=x.device, dtype=x.dtype)
    if need_x:
        # The columns of x have served: their gradient takes the buffer.
        _multiply(grad_y, weight.view(terms, CO).t(), columns, CO)
        dx = torch.empty_like(x)
        BLOCK_C = min(128, triton.next_power_of_2(CI))
        BLOCK_M = min(2048 // BLOCK_C, triton.next_power_of_2(B * H * W))
        _fold[(triton.cdiv(B * H * W, BLOCK_M), triton.cdiv(CI, BLOCK_C))](
            columns, dx, B * H * W, H, W, HO, WO, CI, SIDE=SIDE, STRIDE=stride, PAD=pad,
            BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4,
        )  # fmt: skip
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 8, "CI": 16, "CO": 32, "SIDE": 3, "stride": 1, "pad": 1},
    {"B": 3, "H": 9, "W": 11, "CI": 18, "CO": 21, "SIDE": 3, "stride": 2, "pad": 1},
    {"B": 1, "H": 12, "W": 10, "CI": 16, "CO": 16, "SIDE": 4, "stride": 3, "pad": 2, "dtype": "bfloat16"},
    {"B": 1, "H": 7, "W": 9, "CI": 32, "CO": 16, "SIDE": 1, "stride": 2, "pad": 0, "dtype": "float16"},
)
BENCH = ({"B": 32, "H": 56, "W": 56, "CI": 64, "CO": 128, "SIDE": 3, "stride": 1, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, H, W, CI, CO, SIDE, stride, pad, dtype="float32", device="cpu", seed=0):
    if min(H, W) + 2 * pad < SIDE:
        raise ValueError("the window must fit into the padded image")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, W, CI, generator=g)
    weight = torch.randn(SIDE, SIDE, CI, CO, generator=g) * (SIDE * SIDE * CI) ** -0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, stride, pad


def reference(x, weight, stride, pad):
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), stride=stride, padding=pad)
    return y.permute(0, 2, 3, 1)
