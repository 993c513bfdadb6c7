"""Learned step size quantisation, y = s * round(clamp(x / s)): one scalar gradient that all elements contribute to.

Inside the range dy/ds = round(v) - v with v = x / s, at a clamp it is the level that v was clamped to; the sum over all
elements is scaled by 1 / sqrt(size * high), which balances the updates of step and weights (Esser et al., 2020). A
fixed grid walks the tensor and keeps the sum in registers; one number of each program goes to the final sum.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "fakequant_lsq_scale",
    "family": "quant",
    "op": "fake_quantize",
    "schema": 1,
    "techniques": ("straight-through", "scalar-gradient", "persistent-grid", "two-stage-partials", "recompute"),
    "saves": (),
    "grads": ("x", "step"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _lsq_fwd(X, Step, Y, size, low, high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(Step).to(tl.float32)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    # Correctly rounded division: which level an element falls to must not hang on an approximate quotient.
    level = libdevice.rint(tl.minimum(tl.maximum(tl.div_rn(x, step), low), high))
    tl.store(Y + i, level * step, mask=i < size)


def forward(x, step, bits=8):
    x = x.contiguous()
    low, high = -float(1 << (bits - 1)), float((1 << (bits - 1)) - 1)
    y = torch.empty_like(x)
    _lsq_fwd[(triton.cdiv(x.numel(), 1024),)](x, step, y, x.numel(), low, high, BLOCK=1024)
    return y, (x, step, low, high)


# --- backward ---
@triton.jit
def _lsq_bwd(DY, X, Step, DX, Parts, size, low, high, grad_scale, BLOCK: tl.constexpr):
    step = tl.load(Step).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    # A 64-bit start makes every offset 64-bit.
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        i = start + lane
        x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
        dy = tl.load(DY + i, mask=i < size, other=0.0).to(tl.float32)
        v = tl.div_rn(x, step)
        clamped = tl.minimum(tl.maximum(v, low), high)
        # The bounds themselves count as inside, as in torch.clamp.
        inside = v == clamped
        total += dy * (libdevice.rint(clamped) - tl.where(inside, v, 0.0))
        tl.store(DX + i, tl.where(inside, dy, 0.0), mask=i < size)
    tl.store(Parts + tl.program_id(0), tl.sum(total, 0) * grad_scale)


def backward(saved, grad_y, needs=None):
    x, step, low, high = saved
    size = x.numel()
    dx = torch.empty_like(x)
    BLOCK = 2048 if size >= 1 << 16 else 256
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = min(triton.cdiv(size, BLOCK), 4 * processors)
    parts = torch.empty(programs, device=x.device, dtype=torch.float32)
    _lsq_bwd[(programs,)](
        grad_y.contiguous(), x, step, dx, parts, size, low, high, (size * high) ** -0.5, BLOCK=BLOCK, num_warps=8
    )
    return dx, parts.sum(0, keepdim=True).to(step.dtype)


# --- check ---
SWEEP = (
    {"M": 16, "N": 128, "dtype": "float16"},
    {"M": 37, "N": 61, "bits": 4},
    {"M": 8, "N": 96, "bits": 3, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 8192, "bits": 4, "dtype": "bfloat16"},)


def make_args(M, N, bits=8, dtype="float32", device="cpu", seed=0):
    if bits < 2:
        raise ValueError("one bit has no level above zero, and so no scale for the gradient of the step")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g)
    # About one element in twenty lies beyond the last level.
    step = torch.full((1,), 1.93 / (1 << (bits - 1)))
    return x.to(device=device, dtype=getattr(torch, dtype)), step.to(device), bits


def reference(x, step, bits=8):
    level = (x.float() / step).clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).round()
    return (level * step).to(x.dtype)


def surrogate(x, step, bits=8):
    high = (1 << (bits - 1)) - 1
    scale = (x.numel() * high) ** -0.5
    step = step * scale + (step - step * scale).detach()
    v = (x / step).clamp(-high - 1, high)
    return ((v + (v.round() - v).detach()) * step).to(x.dtype)
