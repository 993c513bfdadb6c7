"""Scaled causal softmax of square score matrices: blocks that the mask removes are never read, in either direction.

Row r of every matrix has r + 1 live columns. Loops over columns end with the block that holds the diagonal; the blocks
beyond are filled with zeros in a loop that only writes. Blocks are short, so that little more than half is read. The
diagonal is cut in registers: in the masks of loads it would leave no two elements that surely go together, and every
access would be one of two bytes. Long rows start first.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_causal_scaled",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("causal-bounds", "two-pass", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, T, T)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _zero_tail(Row, live, T, BLOCK: tl.constexpr):
    """Zeros from the first block that has no live column."""
    for start in range(tl.cdiv(live, BLOCK) * BLOCK, T, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(Row + c, tl.zeros((BLOCK,), tl.float32), mask=c < T)


@triton.jit
def _causal_softmax_fwd(X, Y, T, scale, x_b, x_r, BLOCK: tl.constexpr):
    r = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    live = r + 1
    lane = tl.arange(0, BLOCK)
    source = X + b * x_b + r.to(tl.int64) * x_r
    target = Y + (b * T + r) * T
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, live, BLOCK):
        c = start + lane
        x = tl.load(source + c, mask=c < T, other=0.0).to(tl.float32) * scale
        x = tl.where(c < live, x, -float("inf"))
        higher = tl.maximum(top, x)
        # A lane that has seen nothing yet holds -inf; its correction would be inf - inf.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
        top = higher
    peak = tl.max(top, 0)
    norm = 1.0 / tl.sum(total * tl.exp(top - peak), 0)
    for start in range(0, live, BLOCK):
        c = start + lane
        x = tl.load(source + c, mask=c < T, other=0.0).to(tl.float32) * scale
        x = tl.where(c < live, x, -float("inf"))
        tl.store(target + c, tl.exp(x - peak) * norm, mask=c < T)
    _zero_tail(target, live, T, BLOCK)


def _block(T):
    return max(32, min(1024, triton.next_power_of_2(T) // 4))


def forward(x, scale):
    if x.stride(2) != 1:
        x = x.contiguous()
    B, T, _ = x.shape
    y = torch.empty(B, T, T, device=x.device, dtype=x.dtype)
    BLOCK = _block(T)
    _causal_softmax_fwd[(T, B)](
        x, y, T, scale, x.stride(0), x.stride(1), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256))
    )
    return y, (y, scale)


# --- backward ---
@triton.jit
def _causal_softmax_bwd(DY, Y, DX, T, scale, dy_b, dy_r, dy_c, BLOCK: tl.constexpr):
    r = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    live = r + 1
    lane = tl.arange(0, BLOCK)
    grad = DY + b * dy_b + r.to(tl.int64) * dy_r
    row = (b * T + r) * T
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, live, BLOCK, num_stages=3):
        c = start + lane
        # Beyond the diagonal y is zero, but dy may be anything.
        y = tl.load(Y + row + c, mask=c < T, other=0.0).to(tl.float32)
        dy = tl.load(grad + c.to(tl.int64) * dy_c, mask=c < T, other=0.0).to(tl.float32)
        dot += tl.where(c < live, y * dy, 0.0)
    mean = tl.sum(dot, 0)
    for start in range(0, live, BLOCK):
        c = start + lane
        y = tl.load(Y + row + c, mask=c < T, other=0.0).to(tl.float32)
        dy = tl.load(grad + c.to(tl.int64) * dy_c, mask=c < T, other=0.0).to(tl.float32)
        tl.store(DX + row + c, tl.where(c < live, scale * y * (dy - mean), 0.0), mask=c < T)
    _zero_tail(DX + row, live, T, BLOCK)


def backward(saved, grad_y, needs=None):
    y, scale = saved
    B, T, _ = y.shape
    dx = torch.empty_like(y)
    BLOCK = _block(T)
    _causal_softmax_bwd[(T, B)](
        grad_y, y, dx, T, scale, *grad_y.stride(), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256))
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "T": 64, "scale": 0.5, "dtype": "float16"},
    {"B": 1, "T": 101, "scale": 0.25},
    {"B": 1, "T": 72, "scale": 0.125, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "T": 2048, "scale": 0.125, "dtype": "bfloat16"},)


def make_args(B, T, scale, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(B, T, T, generator=g)).to(device=device, dtype=getattr(torch, dtype)), scale


def reference(x, scale):
    T = x.shape[1]
    keep = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    return torch.softmax((x.float() * scale).masked_fill(~keep, -float("inf")), -1).to(x.dtype)
