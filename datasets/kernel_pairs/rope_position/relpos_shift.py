"""Relative shift of Transformer-XL scores, y[i, j] = x[i, S - 1 - i + j]: a pure index map, undone by its inverse.

Row i of y is a window of S columns in row i of x, which moves one to the left from row to row. The backward is a
gather, too: a program owns a piece of dx and reads the cotangent that the window put there, or stores the zero of a
column that no window showed. Every element of dx is written once, without a fill beforehand.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "relpos_shift",
    "family": "rope_position",
    "op": "relative_shift",
    "schema": 1,
    "techniques": ("gather-form", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _shift_fwd(X, Y, H, S, x_b, x_h, x_i, x_r, ROWS: tl.constexpr, COLS: tl.constexpr, tiles):
    i = ((tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS))[:, None]
    j = ((tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS))[None, :]
    matrix = tl.program_id(1)
    source = X + (matrix // H).to(tl.int64) * x_b + (matrix % H).to(tl.int64) * x_h
    mask = (i < S) & (j < S)
    r = S - 1 - i + j
    x = tl.load(source + i.to(tl.int64) * x_i + r.to(tl.int64) * x_r, mask=mask, other=0.0)
    tl.store(Y + (matrix.to(tl.int64) * S + i) * S + j, x, mask=mask)


def _tile(S, width):
    COLS = max(16, min(512, triton.next_power_of_2(width)))
    ROWS = max(1, min(triton.next_power_of_2(S), 2048 // COLS))
    return ROWS, COLS, triton.cdiv(width, COLS)


def forward(x):
    B, H, S, W = x.shape
    if W != 2 * S - 1:
        raise ValueError(f"{S} rows have {2 * S - 1} relative positions, not {W}")
    y = torch.empty(B, H, S, S, device=x.device, dtype=x.dtype)
    ROWS, COLS, tiles = _tile(S, S)
    _shift_fwd[(triton.cdiv(S, ROWS) * tiles, B * H)](x, y, H, S, *x.stride(), ROWS=ROWS, COLS=COLS, tiles=tiles)
    return y, ()


# --- backward ---
@triton.jit
def _shift_bwd(DY, DX, H, S, dy_b, dy_h, dy_i, dy_j, ROWS: tl.constexpr, COLS: tl.constexpr, tiles):
    i = ((tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS))[:, None]
    r = ((tl.program_id(0) % tiles) * COLS + tl.arange(0, COLS))[None, :]
    matrix = tl.program_id(1)
    source = DY + (matrix // H).to(tl.int64) * dy_b + (matrix % H).to(tl.int64) * dy_h
    width = 2 * S - 1
    j = r - (S - 1 - i)
    seen = (i < S) & (r < width) & (j >= 0) & (j < S)
    dy = tl.load(source + i.to(tl.int64) * dy_i + j.to(tl.int64) * dy_j, mask=seen, other=0.0)
    tl.store(DX + (matrix.to(tl.int64) * S + i) * width + r, dy, mask=(i < S) & (r < width))


def backward(saved, grad_y, needs=None):
    B, H, S, _ = grad_y.shape
    width = 2 * S - 1
    dx = torch.empty(B, H, S, width, device=grad_y.device, dtype=grad_y.dtype)
    ROWS, COLS, tiles = _tile(S, width)
    _shift_bwd[(triton.cdiv(S, ROWS) * tiles, B * H)](
        grad_y, dx, H, S, *grad_y.stride(), ROWS=ROWS, COLS=COLS, tiles=tiles, num_warps=1
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "S": 32, "dtype": "float16"},
    {"B": 2, "H": 1, "S": 45},
    {"B": 1, "H": 3, "S": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "S": 1024, "dtype": "bfloat16"},)


def make_args(B, H, S, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, H, S, 2 * S - 1, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    B, H, S, W = x.shape
    # One more column, and rows that begin one element later each: the usual reshape of padded scores.
    wide = torch.nn.functional.pad(x, (1, 0)).reshape(B, H, W + 1, S)
    return wide[:, :, 1:].reshape(B, H, S, W)[..., :S]
