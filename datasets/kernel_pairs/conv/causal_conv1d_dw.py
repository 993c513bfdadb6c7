"""Depthwise causal conv1d with bias and SiLU: dx gathers the next few dz, dweight and dbias leave as chunk partials.

Time is the contiguous axis, so that the taps of a step are shifted copies of one row. A shifted row begins at no border
of a word: its loads are as narrow as an element, and for 16-bit data there are many. They come out of L1, and are the
price of a kernel without a window of state; with channels last every value can be read once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "causal_conv1d_dw",
    "family": "conv",
    "op": "causal_conv1d",
    "schema": 1,
    "techniques": ("halo", "gather-form", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _causal_conv_fwd(X, W, Bias, Y, D, T, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr):
    # One program: one channel of one sequence, BLOCK_T steps. The shifted loads of the taps meet in L1.
    row = tl.program_id(0).to(tl.int64)
    d = row % D
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    z = tl.zeros((BLOCK_T,), tl.float32) + tl.load(Bias + d).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        past = t + (tap + 1 - WIDTH)
        x = tl.load(X + row * T + past, mask=(past >= 0) & (past < T), other=0.0).to(tl.float32)
        z += x * tl.load(W + d * WIDTH + tap).to(tl.float32)
    tl.store(Y + row * T + t, z * tl.sigmoid(z), mask=t < T)


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    B, D, T = x.shape
    y = torch.empty_like(x)
    BLOCK_T = min(1024, max(16, triton.next_power_of_2(T)))
    _causal_conv_fwd[(B * D, triton.cdiv(T, BLOCK_T))](
        x, weight, bias, y, D, T, WIDTH=weight.shape[1], BLOCK_T=BLOCK_T, num_warps=4
    )
    return y, (x, weight, bias)


# --- backward ---
@triton.jit
def _causal_conv_bwd(
    DY, X, W, Bias, DX, Parts, D, T, dy_b, dy_d, dy_t, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, SLOTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = row % D
    chunk = tl.program_id(1)
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    DY += row // D * dy_b + d * dy_d
    bias = tl.load(Bias + d).to(tl.float32)
    slot = tl.arange(0, SLOTS)
    sums = tl.zeros((SLOTS,), tl.float32)
    dx = tl.zeros((BLOCK_T,), tl.float32)
    # x[t] reaches z[t + ahead] through one tap each: dz of the next WIDTH - 1 steps is rebuilt here, also past the
    # chunk's end, so that no program waits for another. Equal loads of different turns are merged by the compiler.
    for ahead in tl.static_range(WIDTH):
        z = tl.zeros((BLOCK_T,), tl.float32) + bias
        for tap in tl.static_range(WIDTH):
            past = t + (ahead + tap + 1 - WIDTH)
            x = tl.load(X + row * T + past, mask=(past >= 0) & (past < T), other=0.0).to(tl.float32)
            z += x * tl.load(W + d * WIDTH + tap).to(tl.float32)
        future = t + ahead
        dy = tl.load(DY + future.to(tl.int64) * dy_t, mask=future < T, other=0.0).to(tl.float32)
        gate = tl.sigmoid(z)
        dz = dy * gate * (1.0 + z * (1.0 - gate))
        dx += dz * tl.load(W + d * WIDTH + (WIDTH - 1 - ahead)).to(tl.float32)
        # x[t] dz[t + ahead] is tap WIDTH - 1 - ahead's share; the last slot holds dbias.
        x = tl.load(X + row * T + t, mask=t < T, other=0.0).to(tl.float32)
        sums += tl.where(slot == WIDTH - 1 - ahead, tl.sum(x * dz, 0), 0.0)
        if ahead == 0:
            sums += tl.where(slot == WIDTH, tl.sum(dz, 0), 0.0)
    tl.store(DX + row * T + t, dx, mask=t < T)
    part = (row * tl.num_programs(1) + chunk) * (WIDTH + 1)
    tl.store(Parts + part + slot, sums, mask=slot <= WIDTH)


def backward(saved, grad_y, needs=None):
    x, weight, bias = saved
    B, D, T = x.shape
    WIDTH = weight.shape[1]
    BLOCK_T = min(1024, max(16, triton.next_power_of_2(T)))
    chunks = triton.cdiv(T, BLOCK_T)
    dx = torch.empty_like(x)
    parts = torch.empty(B, D, chunks, WIDTH + 1, device=x.device, dtype=torch.float32)
    _causal_conv_bwd[(B * D, chunks)](
        grad_y, x, weight, bias, dx, parts, D, T, *grad_y.stride(),
        WIDTH=WIDTH, BLOCK_T=BLOCK_T, SLOTS=triton.next_power_of_2(WIDTH + 1), num_warps=4,
    )  # fmt: skip
    totals = parts.sum((0, 2))
    return dx, totals[:, :WIDTH].to(weight.dtype), totals[:, WIDTH].to(bias.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "D": 3, "T": 64, "W": 4},
    {"B": 1, "D": 2, "T": 1061, "W": 3, "dtype": "float16"},
    {"B": 2, "D": 4, "T": 50, "W": 4, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "D": 4096, "T": 2048, "W": 4, "dtype": "bfloat16"},)


def make_args(B, D, T, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, D, T, generator=g), torch.randn(D, W, generator=g) * 0.5, torch.randn(D, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias):
    D, W = weight.shape
    padded = torch.nn.functional.pad(x.float(), (W - 1, 0))
    z = torch.nn.functional.conv1d(padded, weight.float()[:, None, :], bias.float(), groups=D)
    return torch.nn.functional.silu(z).to(x.dtype)
