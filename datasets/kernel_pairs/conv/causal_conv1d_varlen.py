"""Causal depthwise conv1d over packed sequences with initial states: programs own packed tokens, whatever the borders.

y[t] = sum over taps of w[tap] x[t - (W - 1 - tap)]; steps before a sequence's first token come from its state. A token
finds its sequence by bisection of cu_seqlens, so that sequences of any length load the device evenly and the host
reads no length. The backward masks steps past the sequence's end for dx, leaves dweight as one partial per token tile,
and gives the few rows of dstate a launch of their own.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "causal_conv1d_varlen",
    "family": "conv",
    "op": "causal_conv1d",
    "schema": 1,
    "techniques": ("varlen", "halo", "gather-form", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "state"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sequence_of(CuSeqlens, t, S, STEPS: tl.constexpr):
    """The sequence s with cu_seqlens[s] <= t < cu_seqlens[s + 1], for t below the number of tokens."""
    low = tl.zeros_like(t)
    high = low + S
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(CuSeqlens + middle) <= t
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _shifted_input(X, State, sequence, t, begin, d, D, live, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """The input SHIFT steps before each t: a token of the same sequence, or a row of its initial state."""
    past = t - SHIFT
    token = past >= begin
    x = tl.load(X + past.to(tl.int64)[:, None] * D + d[None, :], mask=token[:, None] & live, other=0.0)
    if SHIFT > 0:
        row = sequence.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1 + past - begin)
        before = tl.load(State + row[:, None] * D + d[None, :], mask=(past < begin)[:, None] & live, other=0.0)
        x = tl.where(token[:, None], x, before)
    return x.to(tl.float32)


@triton.jit
def _varlen_conv_fwd(
    X, Weight, State, CuSeqlens, Y, T, D, S,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (t[:, None] < T) & (d[None, :] < D)
    sequence = _sequence_of(CuSeqlens, tl.minimum(t, T - 1), S, STEPS)
    begin = tl.load(CuSeqlens + sequence)
    y = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tap in tl.static_range(WIDTH):
        w = tl.load(Weight + d * WIDTH + tap, mask=d < D, other=0.0).to(tl.float32)
        y += w[None, :] * _shifted_input(X, State, sequence, t, begin, d, D, live, WIDTH - 1 - tap, WIDTH)
    tl.store(Y + t.to(tl.int64)[:, None] * D + d[None, :], y, mask=live)


def _tiles(T, D):
    # Wide in channels, which are contiguous; small problems take small tiles.
    return min(32, triton.next_power_of_2(T)), min(128, max(16, triton.next_power_of_2(D)))


def forward(x, weight, state, cu_seqlens):
    x, weight, state = x.contiguous(), weight.contiguous(), state.contiguous()
    (T, D), WIDTH, S = x.shape, weight.shape[1], cu_seqlens.numel() - 1
    BLOCK_T, BLOCK_D = _tiles(T, D)
    y = torch.empty_like(x)
    _varlen_conv_fwd[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        x, weight, state, cu_seqlens, y, T, D, S,
        WIDTH=WIDTH, STEPS=S.bit_length(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=8,
    )  # fmt: skip
    return y, (x, weight, state, cu_seqlens)


# --- backward ---
@triton.jit
def _varlen_conv_bwd(
    DY, X, Weight, State, CuSeqlens, DX, Parts, T, D, S, dy_t, dy_d,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (t[:, None] < T) & (d[None, :] < D)
    sequence = _sequence_of(CuSeqlens, tl.minimum(t, T - 1), S, STEPS)
    begin = tl.load(CuSeqlens + sequence)
    end = tl.load(CuSeqlens + sequence + 1)
    source = DY + t.to(tl.int64)[:, None] * dy_t + d.to(tl.int64)[None, :] * dy_d
    dy = tl.load(source, mask=live, other=0.0).to(tl.float32)
    dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for ahead in tl.static_range(WIDTH):
        # Tap WIDTH - 1 - ahead joins a token to the output `ahead` steps later, and an output to that input.
        w = tl.load(Weight + d * WIDTH + (WIDTH - 1 - ahead), mask=d < D, other=0.0).to(tl.float32)
        reached = live & (t + ahead < end)[:, None]
        dx += w[None, :] * tl.load(source + ahead * dy_t, mask=reached, other=0.0).to(tl.float32)
        share = tl.sum(dy * _shifted_input(X, State, sequence, t, begin, d, D, live, ahead, WIDTH), 0)
        tl.store(Parts + (tile * WIDTH + WIDTH - 1 - ahead) * D + d, share, mask=d < D)
    tl.store(DX + t.to(tl.int64)[:, None] * D + d[None, :], dx, mask=live)


@triton.jit
def _state_bwd(DY, Weight, CuSeqlens, DState, D, dy_t, dy_d, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    # One row of one state: it reaches the first row + 1 outputs of its sequence, as far as there are so many.
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(CuSeqlens + sequence)
    end = tl.load(CuSeqlens + sequence + 1)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for tap in tl.static_range(WIDTH):
        t = begin + row - tap
        reached = (tap <= row) & (t < end) & (d < D)
        w = tl.load(Weight + d * WIDTH + tap, mask=d < D, other=0.0).to(tl.float32)
        total += w * tl.load(DY + t.to(tl.int64) * dy_t + d.to(tl.int64) * dy_d, mask=reached, other=0.0).to(tl.float32)
    tl.store(DState + (sequence * (WIDTH - 1) + row) * D + d, total, mask=d < D)


def backward(saved, grad_y, needs=None):
    x, weight, state, cu_seqlens = saved
    _, _, need_state = needs or (True, True, True)
    (T, D), WIDTH, S = x.shape, weight.shape[1], cu_seqlens.numel() - 1
    BLOCK_T, BLOCK_D = _tiles(T, D)
    tiles, columns = triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D)
    dx = torch.empty_like(x)
    parts = torch.empty(tiles, WIDTH, D, device=x.device, dtype=torch.float32)
    _varlen_conv_bwd[(tiles, columns)](
        grad_y, x, weight, state, cu_seqlens, dx, parts, T, D, S, *grad_y.stride(),
        WIDTH=WIDTH, STEPS=S.bit_length(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=8,
    )  # fmt: skip
    dstate = None
    if need_state:
        dstate = torch.empty_like(state)
        _state_bwd[(S, WIDTH - 1, columns)](
            grad_y, weight, cu_seqlens, dstate, D, *grad_y.stride(), WIDTH=WIDTH, BLOCK_D=BLOCK_D, num_warps=1
        )
    return dx, parts.sum(0).t().to(weight.dtype), dstate


# --- check ---
SWEEP = (
    {"T": 96, "S": 4, "D": 32, "W": 4},
    {"T": 77, "S": 6, "D": 19, "W": 3},
    {"T": 50, "S": 3, "D": 16, "W": 4, "dtype": "bfloat16"},
    {"T": 20, "S": 12, "D": 16, "W": 4, "dtype": "float16"},
)
BENCH = ({"T": 16384, "S": 24, "D": 4096, "W": 4, "dtype": "bfloat16"},)


def make_args(T, S, D, W, dtype="float32", device="cpu", seed=0):
    if W < 2:
        raise ValueError("a convolution of one tap has no state")
    g = torch.Generator().manual_seed(seed)
    x, weight, state = (torch.randn(*size, generator=g) for size in ((T, D), (D, W), (S, W - 1, D)))
    # Random cuts: some sequences are shorter than the window, some may be empty.
    cuts = torch.randint(0, T + 1, (S - 1,), generator=g).sort().values
    cu_seqlens = torch.cat((torch.tensor([0]), cuts, torch.tensor([T]))).to(device=device, dtype=torch.int32)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, state)), cu_seqlens


def reference(x, weight, state, cu_seqlens):
    # Every sequence behind its state, so that taps are slices; outputs that reach over a border are cut out again.
    W, lengths = weight.shape[1], cu_seqlens.diff().tolist()
    rows = [part for pair in zip(state.unbind(0), x.split(lengths), strict=True) for part in pair]
    joined = torch.cat(rows).float()
    n = joined.shape[0] - (W - 1)
    y = sum(weight.float()[:, tap] * joined[tap : tap + n] for tap in range(W))
    cuts = [size for length in lengths for size in (length, W - 1)][:-1]
    return torch.cat(y.split(cuts)[::2]).to(x.dtype)
