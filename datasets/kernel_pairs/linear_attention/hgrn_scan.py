"""HGRN's gated recurrence h_t = f_t h_(t - 1) + (1 - f_t) x_t, f = sigmoid(z): an elementwise scan and its reverse.

Channels are independent, time is scanned in parallel inside a tile, and tiles pass one row on. The output is the
state: the backward reads h_(t - 1) from it and recomputes the gates from z, so nothing is saved. With dh_t = dy_t +
f_(t + 1) dh_(t + 1), one reverse scan of the same kind gives

    dx_t = (1 - f_t) dh_t,    dz_t = f_t (1 - f_t) dh_t (h_(t - 1) - x_t)
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hgrn_scan",
    "family": "linear_attention",
    "op": "gated_scan",
    "schema": 1,
    "techniques": ("reverse-scan", "column-owner", "saved-output", "recompute", "strided-cotangent"),
    "saves": ("h: fp32 or bf16 (B, T, C)",),
    "grads": ("x", "z"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _compose(f1, h1, f2, h2):
    # First step 1, then step 2, of h -> f h + added.
    return f1 * f2, f2 * h1 + h2


@triton.jit
def _hgrn_fwd(X, Z, Y, T, C, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * T * C
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    last = tl.arange(0, BLOCK_T)[:, None] == BLOCK_T - 1
    h = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = base + t[:, None] * C + c[None, :]
        inside = (t[:, None] < T) & (c[None, :] < C)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        f = tl.sigmoid(tl.load(Z + at, mask=inside, other=0.0).to(tl.float32))
        passed, added = tl.associative_scan((f, (1.0 - f) * x), 0, _compose)
        states = added + passed * h[None, :]
        tl.store(Y + at, states, mask=inside)
        h = tl.sum(tl.where(last, states, 0.0), 0)


def _tiles(T):
    """(BLOCK_T, BLOCK_C): rows of 32 channels fill a sector in every dtype, and leave many programs."""
    return (16 if T <= 128 else 64), 32


def forward(x, z):
    x, z = x.contiguous(), z.contiguous()
    B, T, C = x.shape
    h = torch.empty_like(x)
    BLOCK_T, BLOCK_C = _tiles(T)
    _hgrn_fwd[(triton.cdiv(C, BLOCK_C), B)](x, z, h, T, C, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=4)
    return h, (x, z, h)


# --- backward ---
@triton.jit
def _hgrn_bwd(DY, X, Z, Y, DX, DZ, T, C, dy_b, dy_t, dy_c, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    base = batch * T * C
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    DY += batch * dy_b + c[None, :].to(tl.int64) * dy_c
    first = tl.arange(0, BLOCK_T)[:, None] == 0
    # The gradient that later tiles ask of this one's last state, decayed already.
    carry = tl.zeros((BLOCK_C,), tl.float32)
    tiles = tl.cdiv(T, BLOCK_T)
    for back in range(tiles):
        t = (tiles - 1 - back) * BLOCK_T + tl.arange(0, BLOCK_T)
        at = base + t[:, None] * C + c[None, :]
        inside = (t[:, None] < T) & (c[None, :] < C)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        f = tl.sigmoid(tl.load(Z + at, mask=inside, other=0.0).to(tl.float32))
        before = tl.load(Y + at - C, mask=inside & (t[:, None] > 0), other=0.0).to(tl.float32)
        dy = tl.load(DY + t[:, None].to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
        # Inside the tile a state reaches the next one through that one's gate; past its end the carry has it.
        border = t[:, None] % BLOCK_T == BLOCK_T - 1
        after_in = (t[:, None] + 1 < T) & (c[None, :] < C) & (~border)
        after = tl.sigmoid(tl.load(Z + at + C, mask=after_in, other=0.0).to(tl.float32))
        passed, added = tl.associative_scan((tl.where(border, 1.0, after), dy), 0, _compose, reverse=True)
        dh = added + passed * carry[None, :]
        tl.store(DX + at, (1.0 - f) * dh, mask=inside)
        tl.store(DZ + at, f * (1.0 - f) * dh * (before - x), mask=inside)
        carry = tl.sum(tl.where(first, f * dh, 0.0), 0)


def backward(saved, grad_h, needs=None):
    x, z, h = saved
    B, T, C = x.shape
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    BLOCK_T, BLOCK_C = _tiles(T)
    _hgrn_bwd[(triton.cdiv(C, BLOCK_C), B)](
        grad_h, x, z, h, dx, dz, T, C, *grad_h.stride(), BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=4
    )
    return dx, dz


# --- check ---
SWEEP = (
    {"B": 1, "T": 48, "C": 64},
    {"B": 2, "T": 43, "C": 37},
    {"B": 2, "T": 27, "C": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "T": 2048, "C": 1024, "dtype": "bfloat16"},)


def make_args(B, T, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, z = torch.randn(B, T, C, generator=g), torch.randn(B, T, C, generator=g) + 1.0
    return tuple(a.to(device=device, dtype=getattr(torch, dtype)) for a in (x, z))


def reference(x, z):
    # Chunks of 64 steps: running sums of what was added, with the decay since the chunk's begin taken out.
    T = x.shape[1]
    size = 64 if T > 256 else 16
    pad = torch.nn.functional.pad
    gate = pad(torch.nn.functional.logsigmoid(z.float()), (0, 0, 0, -T % size)).unflatten(1, (-1, size)).cumsum(2)
    added = pad(x.float() * torch.sigmoid(-z.float()), (0, 0, 0, -T % size)).unflatten(1, (-1, size))
    own = gate.exp() * (added * (-gate).exp()).cumsum(2)
    passed, h, before = gate[:, :, -1].exp(), torch.zeros_like(own[:, 0, 0]), []
    for chunk in range(own.shape[1]):
        before.append(h)
        h = passed[:, chunk] * h + own[:, chunk, -1]
    return (own + gate.exp() * torch.stack(before, 1)[:, :, None]).flatten(1, 2)[:, :T].to(x.dtype)
