"""Softmax over rows shorter than a warp, as of a router or a small window: hundreds of rows in one tile, one per line.

A program per row would leave most of its lanes idle and reach memory in pieces of a few dozen bytes; a tile of rows is
one dense stretch. Both passes reduce along axis 1, inside a warp. Rows of (B, T, E) are addressed by batch and row
strides, so that a cotangent that was permuted is read where it lies.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_multirow",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("multi-row-tile", "row-local", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, T, E)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _short_rows_fwd(X, Y, rows, T, E, x_b, x_t, x_e, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    # Rows are counted in 32 bits, elements in 64: a division of 64-bit numbers is a long sequence of instructions.
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    # Rows below the last read its logits again, which keeps them finite; nothing of them is stored.
    source = tl.minimum(r, rows - 1)
    at = X + (source // T).to(tl.int64) * x_b + (source % T).to(tl.int64) * x_t + e * x_e
    x = tl.load(at, mask=e < E, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1, keep_dims=True))
    tl.store(Y + r.to(tl.int64) * E + e, p / tl.sum(p, 1, keep_dims=True), mask=(r < rows) & (e < E))


def _tile(E):
    """Rows and columns of a tile of about 1024 elements."""
    BLOCK_E = triton.next_power_of_2(E)
    return max(1, 1024 // BLOCK_E), BLOCK_E


def forward(x):
    B, T, E = x.shape
    y = torch.empty(B, T, E, device=x.device, dtype=x.dtype)
    ROWS, BLOCK_E = _tile(E)
    _short_rows_fwd[(triton.cdiv(B * T, ROWS),)](x, y, B * T, T, E, *x.stride(), ROWS=ROWS, BLOCK_E=BLOCK_E)
    return y, (y,)


# --- backward ---
@triton.jit
def _short_rows_bwd(DY, Y, DX, rows, T, E, dy_b, dy_t, dy_e, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    mask = (r < rows) & (e < E)
    at = r.to(tl.int64) * E + e
    grad = DY + (r // T).to(tl.int64) * dy_b + (r % T).to(tl.int64) * dy_t + e * dy_e
    y = tl.load(Y + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    tl.store(DX + at, y * (dy - tl.sum(y * dy, 1, keep_dims=True)), mask=mask)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    B, T, E = y.shape
    dx = torch.empty_like(y)
    ROWS, BLOCK_E = _tile(E)
    _short_rows_bwd[(triton.cdiv(B * T, ROWS),)](
        grad_y, y, dx, B * T, T, E, *grad_y.stride(), ROWS=ROWS, BLOCK_E=BLOCK_E
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "T": 128, "E": 16, "dtype": "float16"},
    {"B": 3, "T": 101, "E": 10},
    {"B": 1, "T": 90, "E": 24, "dtype": "bfloat16"},
)
BENCH = ({"B": 256, "T": 8192, "E": 32, "dtype": "bfloat16"}, {"B": 64, "T": 16384, "E": 8, "dtype": "float32"})


def make_args(B, T, E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(B, T, E, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.softmax(x.float(), -1).to(x.dtype)
