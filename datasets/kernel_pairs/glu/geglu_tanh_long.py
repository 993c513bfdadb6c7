"""Tanh GEGLU of very wide packed rows: every offset is 64-bit, and one grid axis carries rows and column tiles alike.

A row of 2 * D can pass 2**31 elements alone, so that columns are counted in 64 bits and not only rows. Column tiles of
such rows do not fit the second grid axis, which ends at 65,535: the first one is split into row and tile by division.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "geglu_tanh_long",
    "family": "glu",
    "op": "geglu",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _place(tiles, BLOCK: tl.constexpr):
    """Row and columns of this program, both 64-bit: the first factor decides the width of all that follows."""
    pid = tl.program_id(0)
    return (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _tanh(u):
    # exp of a number that is not positive cannot overflow; the sign is put back afterwards.
    t = tl.exp(-2.0 * tl.abs(u))
    size = (1.0 - t) / (1.0 + t)
    return tl.where(u < 0, -size, size)


@triton.jit
def _geglu_long_fwd(X, Y, D, tiles, x_row, BLOCK: tl.constexpr):
    row, d = _place(tiles, BLOCK)
    gate = tl.load(X + row * x_row + d, mask=d < D, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_row + D + d, mask=d < D, other=0.0).to(tl.float32)
    u = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
    tl.store(Y + row * D + d, 0.5 * gate * (1.0 + _tanh(u)) * up, mask=d < D)


def _block(D):
    return max(64, min(2048, triton.next_power_of_2(D)))


def forward(x):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, D = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, D, device=x.device, dtype=x.dtype)
    BLOCK = _block(D)
    tiles = triton.cdiv(D, BLOCK)
    _geglu_long_fwd[(M * tiles,)](x, y, D, tiles, x.stride(0), BLOCK=BLOCK, num_warps=8)
    return y, (x,)


# --- backward ---
@triton.jit
def _geglu_long_bwd(DY, X, DX, D, tiles, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    row, d = _place(tiles, BLOCK)
    dy = tl.load(DY + row * dy_row + d * dy_col, mask=d < D, other=0.0).to(tl.float32)
    gate = tl.load(X + row * x_row + d, mask=d < D, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_row + D + d, mask=d < D, other=0.0).to(tl.float32)
    square = gate * gate
    th = _tanh(0.7978845608028654 * gate * (1.0 + 0.044715 * square))
    act = 0.5 * gate * (1.0 + th)
    du = 0.7978845608028654 * (1.0 + 0.134145 * square)
    slope = 0.5 * (1.0 + th) + 0.5 * gate * (1.0 - th * th) * du
    # The distance between the halves of dx is D, which is 64-bit only once a 64-bit offset is added to it.
    out = DX + row * 2 * D + d
    tl.store(out, dy * up * slope, mask=d < D)
    tl.store(out + D, dy * act, mask=d < D)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    M, D = x.shape[0], x.shape[1] // 2
    dx = torch.empty(M, 2 * D, device=x.device, dtype=x.dtype)
    BLOCK = _block(D)
    tiles = triton.cdiv(D, BLOCK)
    _geglu_long_bwd[(M * tiles,)](
        grad_y, x, dx, D, tiles, x.stride(0), grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK, num_warps=8
    )
    return dx


# --- check ---
SWEEP = ({"M": 2, "D": 512, "dtype": "float16"}, {"M": 3, "D": 2077}, {"M": 1, "D": 4100, "dtype": "bfloat16"})
BENCH = ({"M": 4, "D": 33554432, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, 2 * D, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)
