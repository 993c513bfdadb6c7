"""First-order recurrence y_t = a_t y_{t-1} + x_t by associative scan; the adjoint is the same scan run from the end."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scan_first_order",
    "family": "ssm_rnn",
    "op": "linear_recurrence",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, L, C)",),
    "grads": ("a", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _compose(a1, b1, a2, b2):
    """The affine map y -> a2 (a1 y + b1) + b2."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _scan_fwd(A, X, Y, L, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    carry = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, L, BLOCK_L):
        t = start + tl.arange(0, BLOCK_L)
        mask = (t[:, None] < L) & (c[None, :] < C)
        at = (b * L + t[:, None]) * C + c[None, :]
        a = tl.load(A + at, mask=mask, other=1.0).to(tl.float32)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        decay, local = tl.associative_scan((a, x), 0, _compose)
        y = local + decay * carry[None, :]
        tl.store(Y + at, y, mask=mask)
        carry = tl.sum(tl.where((tl.arange(0, BLOCK_L) == BLOCK_L - 1)[:, None], y, 0.0), 0)


def forward(a, x):
    a, x = a.contiguous(), x.contiguous()
    B, L, C = x.shape
    y = torch.empty_like(x)
    BLOCK_C = min(32, triton.next_power_of_2(C))
    _scan_fwd[(B, triton.cdiv(C, BLOCK_C))](a, x, y, L, C, BLOCK_L=32, BLOCK_C=BLOCK_C)
    return y, (a, y)


# --- backward ---
@triton.jit
def _scan_bwd(DY, A, Y, DA, DX, L, C, dy_b, dy_t, dy_c, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    # g_t = dy_t + a_{t+1} g_{t+1} is dx_t, and da_t = g_t y_{t-1}.
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    carry = tl.zeros((BLOCK_C,), tl.float32)
    tiles = tl.cdiv(L, BLOCK_L)
    # One warp holds a tile: the scan stays in its lanes, and the copies of tiles to come run ahead of it.
    for i in tl.range(0, tiles, num_stages=3):
        # Rows of a tile lie in it from late to early: a scan backwards would exchange all of them first.
        t = (tiles - i) * BLOCK_L - 1 - tl.arange(0, BLOCK_L)
        live = c[None, :] < C
        mask = (t[:, None] < L) & live
        at = (b * L + t[:, None]) * C + c[None, :]
        # The coefficient of the step after: a shifted load, which may reach into the tile treated before.
        a_next = tl.load(A + at + C, mask=(t[:, None] + 1 < L) & live, other=1.0).to(tl.float32)
        y_prev = tl.load(Y + at - C, mask=mask & (t[:, None] > 0), other=0.0).to(tl.float32)
        dy = tl.load(DY + b * dy_b + t[:, None] * dy_t + c[None, :] * dy_c, mask=mask, other=0.0).to(tl.float32)
        decay, local = tl.associative_scan((a_next, dy), 0, _compose)
        g = local + decay * carry[None, :]
        tl.store(DX + at, g, mask=mask)
        tl.store(DA + at, g * y_prev, mask=mask)
        carry = tl.sum(tl.where((tl.arange(0, BLOCK_L) == BLOCK_L - 1)[:, None], g, 0.0), 0)


def backward(saved, grad_y, needs=None):
    a, y = saved
    B, L, C = y.shape
    da, dx = torch.empty_like(a), torch.empty_like(y)
    BLOCK_C = min(64, triton.next_power_of_2(C))
    _scan_bwd[(B, triton.cdiv(C, BLOCK_C))](
        grad_y, a, y, da, dx, L, C, *grad_y.stride(),
        BLOCK_L=32, BLOCK_C=BLOCK_C, num_warps=1,
    )  # fmt: skip
    return da, dx


# --- check ---
SWEEP = (
    {"B": 2, "L": 64, "C": 16},
    {"B": 1, "L": 45, "C": 21, "dtype": "float16"},
    {"B": 1, "L": 32, "C": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "L": 2048, "C": 4096, "dtype": "float32"},)


def make_args(B, L, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, x = torch.sigmoid(torch.randn(B, L, C, generator=g)), torch.randn(B, L, C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, x))


def reference(a, x):
    # Scan by doubling: after each turn every step has taken in twice as many steps before it.
    decay, y = a.float(), x.float()
    reach = 1
    while reach < x.shape[1]:
        y = torch.cat((y[:, :reach], y[:, reach:] + decay[:, reach:] * y[:, :-reach]), 1)
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    return y.to(x.dtype)
