"""Causal depthwise conv1d, channels last: lanes are channels, time is walked with a sliding window in registers.

y[t] = silu(bias + sum over taps of w[tap] x[t - (W - 1 - tap)]) for windows of up to four taps. A program owns a
channel tile of one chunk of time. The backward walks forwards too: it slides a window of x to rebuild z, and a window
of unfinished dx, to which each dz adds its shares; each x and dy is read once, but for the steps behind the chunk that
dx reaches into. The sums of dweight and dbias stay in registers and leave as one row per sequence and chunk.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "causal_conv1d_channel_last",
    "family": "conv",
    "op": "causal_conv1d",
    "schema": 1,
    "techniques": ("column-owner", "halo", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _tap(Weight, d, live, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of the input LAG steps ago; zero beyond the window."""
    return tl.load(Weight + d * WIDTH + (WIDTH - 1 - LAG), mask=live & (LAG < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _step(X, base, t, T, D, live):
    """Channels of step t, zero before the sequence and behind it."""
    return tl.load(X + base + t * D, mask=live & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@triton.jit
def _channel_last_fwd(X, Weight, Bias, Y, T, D, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    start = tl.program_id(1) * CHUNK
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < D
    base = tl.program_id(2).to(tl.int64) * T * D + d
    w0 = _tap(Weight, d, live, 0, WIDTH)
    w1 = _tap(Weight, d, live, 1, WIDTH)
    w2 = _tap(Weight, d, live, 2, WIDTH)
    w3 = _tap(Weight, d, live, 3, WIDTH)
    bias = tl.load(Bias + d, mask=live, other=0.0).to(tl.float32)
    x1 = _step(X, base, start - 1, T, D, live)
    x2 = _step(X, base, start - 2, T, D, live)
    x3 = _step(X, base, start - 3, T, D, live)
    for t in range(start, tl.minimum(start + CHUNK, T)):
        x0 = _step(X, base, t, T, D, live)
        z = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        tl.store(Y + base + t * D, z * tl.sigmoid(z), mask=live)
        x3 = x2
        x2 = x1
        x1 = x0


def _tiles(T, D):
    # Two bytes or four for each of 256 channels: whole cache lines. Chunks are long against the three steps of halo.
    return min(64, triton.next_power_of_2(T)), min(256, max(32, triton.next_power_of_2(D)))


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    B, T, D = x.shape
    CHUNK, BLOCK_D = _tiles(T, D)
    y = torch.empty_like(x)
    _channel_last_fwd[(triton.cdiv(D, BLOCK_D), triton.cdiv(T, CHUNK), B)](
        x, weight, bias, y, T, D, CHUNK=CHUNK, WIDTH=weight.shape[1], BLOCK_D=BLOCK_D, num_warps=2
    )
    return y, (x, weight, bias)


# --- backward ---
@triton.jit
def _four_steps(X, DY, base, first, end, D, dy_t, live):
    xs = ()
    dys = ()
    for step in tl.static_range(4):
        t = first + step
        here = live & (t < end)
        xs += (tl.load(X + base + t * D, mask=here, other=0.0),)
        dys += (tl.load(DY + tl.cast(t, tl.int64) * dy_t, mask=here, other=0.0),)
    return xs, dys


@triton.jit
def _channel_last_bwd(
    DY, X, Weight, Bias, DX, Parts, T, D, dy_b, dy_t, dy_d,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, T)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < D
    batch = tl.program_id(2).to(tl.int64)
    base = batch * T * D + d
    DY += batch * dy_b + d.to(tl.int64) * dy_d
    w0 = _tap(Weight, d, live, 0, WIDTH)
    w1 = _tap(Weight, d, live, 1, WIDTH)
    w2 = _tap(Weight, d, live, 2, WIDTH)
    w3 = _tap(Weight, d, live, 3, WIDTH)
    bias = tl.load(Bias + d, mask=live, other=0.0).to(tl.float32)
    x1 = _step(X, base, start - 1, T, D, live)
    x2 = _step(X, base, start - 2, T, D, live)
    x3 = _step(X, base, start - 3, T, D, live)
    none = tl.zeros((BLOCK_D,), tl.float32)
    dx1, dx2, dx3 = none, none, none
    dw0, dw1, dw2, dw3, dbias = none, none, none, none, none
    # Four steps are read while the four before them are worked on: walked one by one, each would wait for memory.
    needed = tl.minimum(stop + WIDTH - 1, T)
    xs, dys = _four_steps(X, DY, base, start, needed, D, dy_t, live)
    for first in range(start, stop + WIDTH - 1, 4):
        next_xs, next_dys = _four_steps(X, DY, base, first + 4, needed, D, dy_t, live)
        for step in tl.static_range(4):
            t = first + step
            x0 = xs[step].to(tl.float32)
            z = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            gate = libdevice.fast_dividef(tl.full(z.shape, 1.0, tl.float32), 1.0 + tl.exp2(-1.4426950408889634 * z))
            dz0 = dys[step].to(tl.float32) * gate * (1.0 + z * (1.0 - gate))
            # Unfinished dx of the last steps: dz0 adds its share to each, and completes the oldest.
            if WIDTH == 4:
                dx = dx3 + w3 * dz0
            elif WIDTH == 3:
                dx = dx2 + w2 * dz0
            else:
                dx = dx1 + w1 * dz0
            done = t - (WIDTH - 1)
            tl.store(DX + base + done * D, dx, mask=live & (done >= start) & (done < stop))
            # Steps behind the chunk count for the next chunk's sums.
            own = tl.where(t < stop, dz0, 0.0)
            dw0 += own * x0
            dw1 += own * x1
            dw2 += own * x2
            dw3 += own * x3
            dbias += own
            x3 = x2
            x2 = x1
            x1 = x0
            dx3 = dx2 + w2 * dz0
            dx2 = dx1 + w1 * dz0
            dx1 = w0 * dz0
        xs, dys = next_xs, next_dys
    # Rows of the partials: bias, then the taps from the newest input to the oldest.
    row = Parts + (batch * tl.num_programs(1) + chunk) * (WIDTH + 1) * D + d
    tl.store(row, dbias, mask=live)
    tl.store(row + D, dw0, mask=live)
    tl.store(row + 2 * D, dw1, mask=live)
    tl.store(row + 3 * D, dw2, mask=live & (WIDTH > 2))
    tl.store(row + 4 * D, dw3, mask=live & (WIDTH > 3))


def backward(saved, grad_y, needs=None):
    x, weight, bias = saved
    B, T, D = x.shape
    WIDTH = weight.shape[1]
    CHUNK, BLOCK_D = _tiles(T, D)
    chunks = triton.cdiv(T, CHUNK)
    dx = torch.empty_like(x)
    parts = torch.empty(B, chunks, WIDTH + 1, D, device=x.device, dtype=torch.float32)
    _channel_last_bwd[(triton.cdiv(D, BLOCK_D), chunks, B)](
        grad_y, x, weight, bias, dx, parts, T, D, *grad_y.stride(),
        CHUNK=CHUNK, WIDTH=WIDTH, BLOCK_D=BLOCK_D, num_warps=2,
    )  # fmt: skip
    totals = parts.sum((0, 1))
    return dx, totals[1:].flip(0).t().to(weight.dtype), totals[0].to(bias.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "T": 20, "D": 32, "W": 4},
    {"B": 1, "T": 85, "D": 21, "W": 3},
    {"B": 1, "T": 19, "D": 16, "W": 2, "dtype": "bfloat16"},
    {"B": 1, "T": 12, "D": 16, "W": 4, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 2048, "D": 4096, "W": 4, "dtype": "bfloat16"},)


def make_args(B, T, D, W, dtype="float32", device="cpu", seed=0):
    if not 2 <= W <= 4:
        raise ValueError("the window has two to four taps")
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, D, generator=g), torch.randn(D, W, generator=g) * 0.5, torch.randn(D, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias):
    D, W = weight.shape
    padded = torch.nn.functional.pad(x.float().transpose(1, 2), (W - 1, 0))
    z = torch.nn.functional.conv1d(padded, weight.float()[:, None, :], bias.float(), groups=D)
    return torch.nn.functional.silu(z).transpose(1, 2).to(x.dtype)
