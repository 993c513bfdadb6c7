"""SwiGLU of one packed (M, 2D) tensor: gate and up lie side by side, so both halves of dx go into one buffer."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_packed",
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
def _swiglu_packed_fwd(X, Y, D, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = d < D
    gate = tl.load(X + row * x_row + d, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_row + D + d, mask=keep, other=0.0).to(tl.float32)
    tl.store(Y + row * D + d, gate * tl.sigmoid(gate) * up, mask=keep)


def forward(x):
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, D = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, D, device=x.device, dtype=x.dtype)
    BLOCK = max(128, min(1024, triton.next_power_of_2(D)))
    _swiglu_packed_fwd[(M, triton.cdiv(D, BLOCK))](x, y, D, x.stride(0), BLOCK=BLOCK)
    return y, (x,)


# --- backward ---
@triton.jit
def _swiglu_packed_bwd(DY, X, DX, D, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = d < D
    dy = tl.load(DY + row * dy_row + d * dy_col, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(X + row * x_row + d, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_row + D + d, mask=keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    out = DX + row * 2 * D + d
    tl.store(out, dy * up * s * (1.0 + gate * (1.0 - s)), mask=keep)
    tl.store(out + D, dy * gate * s, mask=keep)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    M, D = x.shape[0], x.shape[1] // 2
    dx = torch.empty(M, 2 * D, device=x.device, dtype=x.dtype)
    BLOCK = max(128, min(1024, triton.next_power_of_2(D)))
    _swiglu_packed_bwd[(M, triton.cdiv(D, BLOCK))](
        grad_y, x, dx, D, x.stride(0), grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = ({"M": 6, "D": 128}, {"M": 5, "D": 77, "dtype": "float16"}, {"M": 4, "D": 192, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "D": 11008, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, 2 * D, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
