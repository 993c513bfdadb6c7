"""LocalMamba's windowed order inside the scan: a gated recurrence visits an image by windows, nothing is permuted.

h_t = f_t h_(t-1) + x_t, where t counts windows row by row, and inside a window its rows. Windows at the right and lower
border are cut. x, f and y keep the layout of the image, channels last: order is a question of addresses, and a window
is one tile (steps, channels). The forward keeps y and the state that enters each window, in fp32. Backwards the windows
come in reverse order, each with a reverse scan: dx_t = g_t = dy_t + f_(t+1) g_(t+1), df_t = g_t h_(t-1). The steps
before and after are neighbours in the window's order, hence looked up under its map, not at a constant distance.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "local_window_scan",
    "family": "ssm_rnn",
    "op": "windowed_linear_recurrence",
    "schema": 1,
    "techniques": (
        "reverse-scan", "inverse-map", "checkpointed-states", "saved-output", "column-owner", "strided-cotangent",
    ),
    "saves": ("y: fp32 or bf16 or fp16 (B, H, W, C)", "entering: fp32 (B, windows, C)"),
    "grads": ("x", "f"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _then(decay1, added1, decay2, added2):
    # Step 1, then step 2, of h -> decay h + added.
    return decay1 * decay2, decay2 * added1 + added2


@triton.jit
def _window(number, across, H, W, SIDE: tl.constexpr):
    """First row and column of a window, its width, and its number of steps, less than SIDE^2 at the borders."""
    top = number // across * SIDE
    left = number % across * SIDE
    wide = tl.minimum(SIDE, W - left)
    return top, left, wide, wide * tl.minimum(SIDE, H - top)


@triton.jit
def _place(step, top, left, wide):
    """Row and column of the steps of a window. The division is one for a row of the tile."""
    return top + step // wide, left + step % wide


@triton.jit
def _window_scan_fwd(
    X, F, Y, Entering, H, W, C, across, windows, SIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    step = tl.arange(0, BLOCK_T)
    last = (step == BLOCK_T - 1)[:, None]
    state = tl.zeros((BLOCK_C,), tl.float32)
    for number in range(windows):
        tl.store(Entering + (batch * windows + number) * C + c, state, mask=c < C)
        top, left, wide, steps = _window(number, across, H, W, SIDE)
        h, w = _place(step, top, left, wide)
        at = ((batch * H + h) * W + w)[:, None] * C + c[None, :]
        inside = (step < steps)[:, None] & (c[None, :] < C)
        # Behind a cut window's end the state is kept.
        f = tl.load(F + at, mask=inside, other=1.0).to(tl.float32)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        total, local = tl.associative_scan((f, x), 0, _then)
        states = local + total * state[None, :]
        tl.store(Y + at, states, mask=inside)
        state = tl.sum(tl.where(last, states, 0.0), 0)


def _tile(side):
    return {"SIDE": side, "BLOCK_T": triton.next_power_of_2(side * side), "BLOCK_C": 32, "num_warps": 4}


def forward(x, f, side=8):
    # x, f, y (B, H, W, C).
    x, f = x.contiguous(), f.contiguous()
    B, H, W, C = x.shape
    across = triton.cdiv(W, side)
    windows = across * triton.cdiv(H, side)
    y = torch.empty_like(x)
    entering = torch.empty(B, windows, C, device=x.device, dtype=torch.float32)
    tile = _tile(side)
    _window_scan_fwd[(triton.cdiv(C, 32), B)](x, f, y, entering, H, W, C, across, windows, **tile)
    return y, (f, y, entering, side)


# --- backward ---
@triton.jit
def _window_scan_bwd(
    DY, F, Y, Entering, DX, DF, H, W, C, across, windows, dy_b, dy_h, dy_w, dy_c,
    SIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (c < C)[None, :]
    step = tl.arange(0, BLOCK_T)
    first = (step == 0)[:, None]
    source = DY + batch * dy_b + c[None, :].to(tl.int64) * dy_c
    # What the windows behind ask of this one's last state, decayed by their first step already.
    carry = tl.zeros((BLOCK_C,), tl.float32)
    for back in range(windows):
        number = windows - 1 - back
        top, left, wide, steps = _window(number, across, H, W, SIDE)
        h, w = _place(step, top, left, wide)
        at = ((batch * H + h) * W + w)[:, None] * C + c[None, :]
        inside = (step < steps)[:, None] & live
        dy_at = source + (h.to(tl.int64) * dy_h + w.to(tl.int64) * dy_w)[:, None]
        dy = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
        f = tl.load(F + at, mask=inside, other=1.0).to(tl.float32)
        h, w = _place(step + 1, top, left, wide)
        after = ((batch * H + h) * W + w)[:, None] * C + c[None, :]
        f_after = tl.load(F + after, mask=(step + 1 < steps)[:, None] & live, other=1.0).to(tl.float32)
        h, w = _place(tl.maximum(step - 1, 0), top, left, wide)
        before = ((batch * H + h) * W + w)[:, None] * C + c[None, :]
        h_before = tl.load(Y + before, mask=inside & (step > 0)[:, None], other=0.0).to(tl.float32)
        entering = tl.load(Entering + (batch * windows + number) * C + c, mask=c < C, other=0.0)
        h_before = tl.where(first, entering[None, :], h_before)
        total, local = tl.associative_scan((f_after, dy), 0, _then, reverse=True)
        g = local + total * carry[None, :]
        tl.store(DX + at, g, mask=inside)
        tl.store(DF + at, g * h_before, mask=inside)
        carry = tl.sum(tl.where(first, f * g, 0.0), 0)


def backward(saved, grad_y, needs=None):
    f, y, entering, side = saved
    B, H, W, C = y.shape
    across, windows = triton.cdiv(W, side), entering.shape[1]
    dx, df = torch.empty_like(y), torch.empty_like(f)
    _window_scan_bwd[(triton.cdiv(C, 32), B)](
        grad_y, f, y, entering, dx, df, H, W, C, across, windows, *grad_y.stride(), **_tile(side)
    )
    return dx, df


# --- check ---
SWEEP = (
    {"B": 2, "H": 8, "W": 12, "C": 16, "side": 4},
    {"B": 1, "H": 11, "W": 19, "C": 37, "side": 5},
    {"B": 1, "H": 9, "W": 8, "C": 8, "side": 4, "dtype": "bfloat16"},
    {"B": 1, "H": 6, "W": 7, "C": 4, "side": 3, "dtype": "float16"},
)
BENCH = ({"B": 64, "H": 56, "W": 56, "C": 384, "side": 8, "dtype": "bfloat16"},)


def make_args(B, H, W, C, side, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, f = torch.randn(B, H, W, C, generator=g), torch.sigmoid(torch.randn(B, H, W, C, generator=g) + 2.0)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, f)), side


def reference(x, f, side=8):
    B, H, W, C = x.shape
    row, column = (torch.arange(size, device=x.device) for size in (H, W))
    # Steps of all windows before, in rows of windows and to the left, then those inside the window.
    top, left = row // side * side, column // side * side
    high, wide = (H - top).clamp(max=side), (W - left).clamp(max=side)
    order = (top * W)[:, None] + left * high[:, None] + (row - top)[:, None] * wide + column - left
    source = torch.empty(H * W, device=x.device, dtype=torch.long).scatter_(
        0, order.flatten(), torch.arange(H * W, device=x.device)
    )
    decay, y = f.float().view(B, H * W, C)[:, source], x.float().view(B, H * W, C)[:, source]
    # Scan by doubling: after each turn every step has taken in twice as many steps before it.
    reach = 1
    while reach < H * W:
        y = torch.cat((y[:, :reach], y[:, reach:] + decay[:, reach:] * y[:, :-reach]), 1)
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    return y[:, order.flatten()].view(B, H, W, C).to(x.dtype)
