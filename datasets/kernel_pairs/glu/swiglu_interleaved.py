"""SwiGLU of a packed tensor whose columns alternate gate, up, gate, up: pairs part and meet again in registers.

With strides of two either operand would drag both through memory; split and join keep every access dense, and a program
reads and writes each byte of x and dx once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_interleaved",
    "family": "glu",
    "op": "swiglu",
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
def _swiglu_pairs_fwd(X, Y, D, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    lane = 2 * first + tl.arange(0, 2 * BLOCK)
    pair = tl.load(X + row * x_row + lane, mask=lane < 2 * D, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pair, (BLOCK, 2)))
    d = first + tl.arange(0, BLOCK)
    tl.store(Y + row * D + d, gate * tl.sigmoid(gate) * up, mask=d < D)


def _columns(D):
    return max(32, min(1024, triton.next_power_of_2(D)))


def forward(x):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, D = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, D, device=x.device, dtype=x.dtype)
    BLOCK = _columns(D)
    _swiglu_pairs_fwd[(M, triton.cdiv(D, BLOCK))](x, y, D, x.stride(0), BLOCK=BLOCK)
    return y, (x,)


# --- backward ---
@triton.jit
def _swiglu_pairs_bwd(DY, X, DX, D, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    d = first + tl.arange(0, BLOCK)
    dy = tl.load(DY + row * dy_row + d.to(tl.int64) * dy_col, mask=d < D, other=0.0).to(tl.float32)
    lane = 2 * first + tl.arange(0, 2 * BLOCK)
    pair = tl.load(X + row * x_row + lane, mask=lane < 2 * D, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pair, (BLOCK, 2)))
    s = tl.sigmoid(gate)
    act = gate * s
    # silu' = s + gate s (1 - s), written with the activation that the other half needs as well.
    dpair = tl.join(dy * up * (s + act * (1.0 - s)), dy * act)
    tl.store(DX + row * 2 * D + lane, tl.reshape(dpair, (2 * BLOCK,)), mask=lane < 2 * D)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    M, D = x.shape[0], x.shape[1] // 2
    dx = torch.empty(M, 2 * D, device=x.device, dtype=x.dtype)
    BLOCK = _columns(D)
    _swiglu_pairs_bwd[(M, triton.cdiv(D, BLOCK))](
        grad_y, x, dx, D, x.stride(0), grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = ({"M": 6, "D": 64, "dtype": "float16"}, {"M": 5, "D": 77}, {"M": 4, "D": 96, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "D": 14336, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, 2 * D, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    gate, up = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
