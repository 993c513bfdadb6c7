"""Dense conv1d with stride and dilation: dx gathers only where t + pad - tap * dilation is a multiple of the stride.

y[o] = sum over taps of x[o stride - pad + tap dilation] W[tap], channels last. An input step meets only every
stride-th tap position, so a row tile of dx takes input steps of one residue modulo the stride: a tap then either
serves all rows of the tile or none, and taps that serve none are skipped as a whole instead of multiplying masked
zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv1d_dilated_stride",
    "family": "conv",
    "op": "conv1d",
    "schema": 1,
    "techniques": ("gather-form", "split-k", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _strided_conv_fwd(
    X, Weight, Y, T, T_OUT, CI, CO, TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    batch = tl.program_id(2).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in range(TAPS):
        t = o * STRIDE - PAD + tap * DILATION
        there = (o < T_OUT) & (t >= 0) & (t < T)
        for start in range(0, CI, BLOCK_K):
            c = start + k
            x_at = (batch * T + t[:, None]) * CI + c[None, :]
            x = tl.load(X + x_at, mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (tap * CI + c[:, None]) * CO + n[None, :]
            w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc = tl.dot(x, w, acc)
    y_at = (batch * T_OUT + o[:, None]) * CO + n[None, :]
    tl.store(Y + y_at, acc, mask=(o[:, None] < T_OUT) & (n[None, :] < CO))


def forward(x, weight, stride, dilation, pad):
    x, weight = x.contiguous(), weight.contiguous()
    B, T, CI = x.shape
    TAPS, _, CO = weight.shape
    out = (T + 2 * pad - dilation * (TAPS - 1) - 1) // stride + 1
    y = torch.empty(B, out, CO, device=x.device, dtype=x.dtype)
    _strided_conv_fwd[(triton.cdiv(out, 64), triton.cdiv(CO, 64), B)](
        x, weight, y, T, out, CI, CO, TAPS=TAPS, STRIDE=stride, DILATION=dilation, PAD=pad,
        BLOCK_M=64, BLOCK_N=64, BLOCK_K=128 // x.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, stride, dilation, pad)


# --- backward ---
@triton.jit
def _strided_conv_dx(
    DY, Weight, DX, T, T_OUT, CI, CO, dy_b, dy_t, dy_c,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    residue = tl.program_id(0) % STRIDE
    t = (tl.program_id(0) // STRIDE * BLOCK_M + tl.arange(0, BLOCK_M)) * STRIDE + residue
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    batch = tl.program_id(2).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in range(TAPS):
        # Alike for all rows of the tile. A negative remainder is not zero either, so the sign does not matter.
        if (residue + PAD - tap * DILATION) % STRIDE == 0:
            o = (t + PAD - tap * DILATION) // STRIDE
            there = (t < T) & (t + PAD - tap * DILATION >= 0) & (o < T_OUT)
            for start in range(0, CO, BLOCK_K):
                c = start + k
                dy_at = batch * dy_b + o.to(tl.int64)[:, None] * dy_t + c.to(tl.int64)[None, :] * dy_c
                dy = tl.load(DY + dy_at, mask=there[:, None] & (c[None, :] < CO), other=0.0)
                w_at = (tap * CI + n[None, :]) * CO + c[:, None]
                w = tl.load(Weight + w_at, mask=(c[:, None] < CO) & (n[None, :] < CI), other=0.0)
                acc = tl.dot(dy, w, acc)
    x_at = (batch * T + t[:, None]) * CI + n[None, :]
    tl.store(DX + x_at, acc, mask=(t[:, None] < T) & (n[None, :] < CI))


@triton.jit
def _strided_conv_dweight(
    X, DY, Parts, B, T, T_OUT, CI, CO, dy_b, dy_t, dy_c,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (input channel, output channel) of one tap, over every so many pieces of ROWS outputs of one sequence.
    column_tiles = tl.cdiv(CO, BLOCK_N)
    k = tl.program_id(0) // column_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    tap = tl.program_id(1)
    pieces = tl.cdiv(T_OUT, ROWS)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for piece in range(tl.program_id(2), B * pieces, tl.num_programs(2)):
        batch = (piece // pieces).to(tl.int64)
        first = piece % pieces * ROWS
        for start in range(first, tl.minimum(first + ROWS, T_OUT), BLOCK_M):
            o = start + tl.arange(0, BLOCK_M)
            t = o * STRIDE - PAD + tap * DILATION
            there = (o < T_OUT) & (t >= 0) & (t < T)
            x_at = (batch * T + t[None, :]) * CI + k[:, None]
            xt = tl.load(X + x_at, mask=there[None, :] & (k[:, None] < CI), other=0.0)
            dy_at = batch * dy_b + o.to(tl.int64)[:, None] * dy_t + n.to(tl.int64)[None, :] * dy_c
            dy = tl.load(DY + dy_at, mask=(o[:, None] < T_OUT) & (n[None, :] < CO), other=0.0)
            acc = tl.dot(xt, dy, acc)
    split = tl.program_id(2).to(tl.int64)
    at = ((split * tl.num_programs(1) + tap) * CI + k[:, None]) * CO + n[None, :]
    tl.store(Parts + at, acc, mask=(k[:, None] < CI) & (n[None, :] < CO))


def backward(saved, grad_y, needs=None):
    x, weight, stride, dilation, pad = saved
    need_x, need_w = needs or (True, True)
    B, T, CI = x.shape
    TAPS, _, CO = weight.shape
    out = grad_y.shape[1]
    inner = 128 // x.element_size()
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(x)
        # STRIDE residues, each with its tiles of 64 input steps.
        _strided_conv_dx[(stride * triton.cdiv(triton.cdiv(T, stride), 128), triton.cdiv(CI, 128), B)](
            grad_y, weight, dx, T, out, CI, CO, *grad_y.stride(),
            TAPS=TAPS, STRIDE=stride, DILATION=dilation, PAD=pad,
            BLOCK_M=128, BLOCK_N=128, BLOCK_K=inner, num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_w:
        # Two programs for each of 132 processors: more splits would only make more partials to write and read again.
        tiles = triton.cdiv(CI, 64) * triton.cdiv(CO, 64)
        splits = max(1, min(B * triton.cdiv(out, 512), 264 // (tiles * TAPS)))
        parts = torch.empty(splits, TAPS, CI, CO, device=x.device, dtype=torch.float32)
        _strided_conv_dweight[(tiles, TAPS, splits)](
            x, grad_y, parts, B, T, out, CI, CO, *grad_y.stride(), STRIDE=stride, DILATION=dilation, PAD=pad,
            ROWS=2048, BLOCK_M=inner, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "T": 64, "CI": 16, "CO": 32, "K": 3, "stride": 2, "dilation": 1, "pad": 1},
    {"B": 1, "T": 93, "CI": 18, "CO": 21, "K": 4, "stride": 3, "dilation": 2, "pad": 0},
    {"B": 1, "T": 40, "CI": 32, "CO": 16, "K": 3, "stride": 1, "dilation": 3, "pad": 3, "dtype": "bfloat16"},
    {"B": 1, "T": 19, "CI": 16, "CO": 16, "K": 2, "stride": 2, "dilation": 2, "pad": 1, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 4096, "CI": 256, "CO": 512, "K": 4, "stride": 2, "dilation": 1, "pad": 1, "dtype": "bfloat16"},)


def make_args(B, T, CI, CO, K, stride, dilation, pad, dtype="float32", device="cpu", seed=0):
    if T + 2 * pad <= dilation * (K - 1):
        raise ValueError("the dilated window must fit into the padded sequence")
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, CI, generator=g), torch.randn(K, CI, CO, generator=g) * (K * CI) ** -0.5)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return x, weight, stride, dilation, pad


def reference(x, weight, stride, dilation, pad):
    x, weight = x.transpose(1, 2), weight.permute(2, 1, 0)
    return torch.nn.functional.conv1d(x, weight, stride=stride, padding=pad, dilation=dilation).transpose(1, 2)
