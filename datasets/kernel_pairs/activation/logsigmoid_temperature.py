"""Log-sigmoid over a temperature, log(sigmoid(x)) / t: stable as a minimum and a log1p, with sigmoid(-x) / t behind it.

min(x, 0) - log1p(exp(-|x|)) is finite for all finite x. The derivative is written with the same exp(-|x|), which keeps
its relative precision in the tail where 1 - sigmoid(x) would round to zero.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "logsigmoid_temperature",
    "family": "activation",
    "op": "logsigmoid",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _logsigmoid_fwd(X, Y, M, N, inverse, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    x = tl.load(X + m * x_row + n.to(tl.int64) * x_col, mask=mask, other=0.0).to(tl.float32)
    y = (tl.minimum(x, 0.0) - libdevice.log1p(tl.exp(-tl.abs(x)))) * inverse
    tl.store(Y + m * N + n, y, mask=mask)


def _grid(M, N):
    """Grid and tile: 2048 elements, in as few rows as their length allows."""
    BLOCK = max(32, min(2048, triton.next_power_of_2(N)))
    ROWS = 2048 // BLOCK
    return (triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK)), ROWS, BLOCK


def forward(x, temperature):
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    grid, ROWS, BLOCK = _grid(M, N)
    _logsigmoid_fwd[grid](x, y, M, N, 1.0 / temperature, x.stride(0), x.stride(1), ROWS=ROWS, BLOCK=BLOCK)
    return y, (x, temperature)


# --- backward ---
@triton.jit
def _logsigmoid_bwd(DY, X, DX, M, N, inverse, dy_row, dy_col, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    wide = n.to(tl.int64)
    x = tl.load(X + m * x_row + wide * x_col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + m * dy_row + wide * dy_col, mask=mask, other=0.0).to(tl.float32)
    t = tl.exp(-tl.abs(x))
    complement = tl.where(x < 0, 1.0, t) / (1.0 + t)
    tl.store(DX + m * N + n, dy * complement * inverse, mask=mask)


def backward(saved, grad_y, needs=None):
    x, temperature = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    grid, ROWS, BLOCK = _grid(M, N)
    _logsigmoid_bwd[grid](grad_y, x, dx, M, N, 1.0 / temperature, *grad_y.stride(), *x.stride(), ROWS=ROWS, BLOCK=BLOCK)
    return dx


# --- check ---
SWEEP = (
    {"M": 16, "N": 128, "temperature": 0.5, "dtype": "float16"},
    {"M": 9, "N": 203, "temperature": 2.0},
    {"M": 6, "N": 256, "temperature": 1.25, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "temperature": 0.7, "dtype": "bfloat16"},)


def make_args(M, N, temperature, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)), temperature


def reference(x, temperature):
    return (torch.nn.functional.logsigmoid(x.float()) / temperature).to(x.dtype)
