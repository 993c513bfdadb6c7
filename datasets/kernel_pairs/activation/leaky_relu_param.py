"""PReLU with a slope for each channel of (N, C, H, W): the slope's gradient sums dy * x over the negative elements.

A program owns a chunk of one plane (n, c), so that its slope is one scalar and its share of the gradient one number.
The partials lie as (N, C, chunks): what is left to sum is a tensor smaller than the planes by their size.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "leaky_relu_param",
    "family": "activation",
    "op": "prelu",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "recompute"),
    "saves": (),
    "grads": ("x", "slope"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _prelu_fwd(X, Slope, Y, C, HW, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(Slope + plane % C).to(tl.float32)
    x = tl.load(X + plane * HW + p, mask=p < HW, other=0.0).to(tl.float32)
    tl.store(Y + plane * HW + p, tl.where(x > 0, x, slope * x), mask=p < HW)


def _chunk(HW):
    """A plane in as few chunks of at most 4096 as possible, with little masked off at the end."""
    return min(4096, triton.next_power_of_2(HW))


def forward(x, slope):
    x, slope = x.contiguous(), slope.contiguous()
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    BLOCK = _chunk(H * W)
    _prelu_fwd[(N * C, triton.cdiv(H * W, BLOCK))](
        x, slope, y, C, H * W, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512))
    )
    return y, (x, slope)


# --- backward ---
@triton.jit
def _prelu_bwd(DY, X, Slope, DX, Parts, C, HW, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(Slope + plane % C).to(tl.float32)
    x = tl.load(X + plane * HW + p, mask=p < HW, other=0.0).to(tl.float32)
    dy = tl.load(DY + plane * HW + p, mask=p < HW, other=0.0).to(tl.float32)
    tl.store(DX + plane * HW + p, tl.where(x > 0, dy, slope * dy), mask=p < HW)
    # Masked lanes hold x = 0 and add nothing.
    tl.store(Parts + plane * tl.num_programs(1) + tl.program_id(1), tl.sum(dy * tl.minimum(x, 0.0), 0))


def backward(saved, grad_y, needs=None):
    x, slope = saved
    N, C, H, W = x.shape
    BLOCK = _chunk(H * W)
    chunks = triton.cdiv(H * W, BLOCK)
    dx = torch.empty_like(x)
    parts = torch.empty(N, C, chunks, device=x.device, dtype=torch.float32)
    # A cotangent in channels-last order would be read one element per sector: one copy is cheaper.
    _prelu_bwd[(N * C, chunks)](
        grad_y.contiguous(), x, slope, dx, parts, C, H * W, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512))
    )
    return dx, parts.sum((0, 2)).to(slope.dtype)


# --- check ---
SWEEP = (
    {"N": 2, "C": 4, "H": 8, "W": 16, "dtype": "float16"},
    {"N": 3, "C": 5, "H": 11, "W": 9},
    {"N": 1, "C": 2, "H": 70, "W": 65, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "C": 256, "H": 56, "W": 56, "dtype": "bfloat16"},)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, slope = torch.randn(N, C, H, W, generator=g), 0.1 + 0.3 * torch.rand(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, slope))


def reference(x, slope):
    return torch.nn.functional.prelu(x.float(), slope.float()).to(x.dtype)
