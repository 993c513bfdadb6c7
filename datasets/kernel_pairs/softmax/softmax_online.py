"""Softmax over rows longer than a block: running maximum and sum, only the log-sum-exp saved, y recomputed from x."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_online",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("two-pass", "saved-lse", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _online_softmax_fwd(X, Y, Lse, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Every lane keeps its own maximum and sum, so that the loop holds no reduction across lanes.
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + lane
        x = tl.load(X + row * N + c, mask=c < N, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing yet holds -inf; its correction would be inf - inf.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
        top = higher
    peak = tl.max(top, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    tl.store(Lse + row, lse)
    for start in range(0, N, BLOCK):
        c = start + lane
        x = tl.load(X + row * N + c, mask=c < N, other=-float("inf")).to(tl.float32)
        tl.store(Y + row * N + c, tl.exp(x - lse), mask=c < N)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = max(32, min(4096, triton.next_power_of_2(N) // 4))
    _online_softmax_fwd[(M,)](x, y, lse, N, BLOCK=BLOCK, num_warps=max(1, BLOCK // 512))
    return y, (x, lse)


# --- backward ---
@triton.jit
def _online_softmax_bwd(DY, X, Lse, DX, N, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lse = tl.load(Lse + row)
    dot = tl.zeros((BLOCK,), tl.float32)
    # Copies run ahead in both walks. They fill the shared memory of a processor: one row at a time is under way on it,
    # so that what the walks of all rows share still fits L2 in good part.
    for start in tl.range(0, N, BLOCK, num_stages=5):
        c = start + lane
        x = tl.load(X + row * N + c, mask=c < N, other=-float("inf")).to(tl.float32)
        dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
        dot += dy * tl.exp(x - lse)
    mean = tl.sum(dot, 0)
    # Last tile first: what the first loop read most recently is still in cache.
    for i in tl.range(tl.cdiv(N, BLOCK), num_stages=5):
        c = (tl.cdiv(N, BLOCK) - 1 - i) * BLOCK + lane
        x = tl.load(X + row * N + c, mask=c < N, other=-float("inf")).to(tl.float32)
        dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
        tl.store(DX + row * N + c, tl.exp(x - lse) * (dy - mean), mask=c < N)


def backward(saved, grad_y, needs=None):
    x, lse = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK = max(32, min(16384 // x.element_size(), triton.next_power_of_2(N) // 4))
    _online_softmax_bwd[(M,)](
        grad_y, x, lse, dx, N, grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK, num_warps=max(1, BLOCK // 256)
    )
    return dx


# --- check ---
SWEEP = ({"M": 3, "N": 128}, {"M": 5, "N": 200, "dtype": "float16"}, {"M": 2, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 1024, "N": 65536, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((3 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    xf = x.float()
    return torch.exp(xf - torch.logsumexp(xf, -1, keepdim=True)).to(x.dtype)
