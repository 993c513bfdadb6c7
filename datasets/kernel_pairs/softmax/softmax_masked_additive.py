"""Softmax of attention scores plus a bias that all heads share: the bias gradient is the sum of dx over the heads.

A program owns one query row of one batch and walks its heads. The bias row is loaded once, and its gradient grows in
registers beside the dx rows that it is the sum of: no atomics, no second pass over dx, and a fixed order of summation.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_masked_additive",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("broadcast-reduction", "head-reduction", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, H, S, T)",),
    "grads": ("scores", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _biased_softmax_fwd(X, Bias, Y, H, S, T, x_b, x_h, x_s, b_b, b_s, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK)
    bias = tl.load(Bias + b * b_b + s * b_s + t, mask=t < T, other=-float("inf")).to(tl.float32)
    for head in range(H):
        h = head.to(tl.int64)
        x = tl.load(X + b * x_b + h * x_h + s * x_s + t, mask=t < T, other=0.0).to(tl.float32) + bias
        e = tl.exp(x - tl.max(x, 0))
        tl.store(Y + ((b * H + h) * S + s) * T + t, e / tl.sum(e, 0), mask=t < T)


def _warps(BLOCK):
    return max(1, min(16, BLOCK // 256))


def forward(scores, bias):
    scores = scores if scores.stride(3) == 1 else scores.contiguous()
    bias = bias if bias.stride(3) == 1 else bias.contiguous()
    B, H, S, T = scores.shape
    y = torch.empty(B, H, S, T, device=scores.device, dtype=scores.dtype)
    BLOCK = triton.next_power_of_2(T)
    _biased_softmax_fwd[(S, B)](
        scores, bias, y, H, S, T, *scores.stride()[:3], bias.stride(0), bias.stride(2),
        BLOCK=BLOCK, num_warps=_warps(BLOCK),
    )  # fmt: skip
    return y, (y, bias.dtype)


# --- backward ---
@triton.jit
def _biased_softmax_bwd(
    DY, Y, DX, DBias, H, S, T, dy_b, dy_h, dy_s, dy_t, NEED_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    s = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for head in range(H):
        h = head.to(tl.int64)
        at = ((b * H + h) * S + s) * T + t
        y = tl.load(Y + at, mask=t < T, other=0.0).to(tl.float32)
        dy = tl.load(DY + b * dy_b + h * dy_h + s * dy_s + t.to(tl.int64) * dy_t, mask=t < T, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, 0))
        tl.store(DX + at, dx, mask=t < T)
        dbias += dx
    if NEED_BIAS:
        tl.store(DBias + (b * S + s) * T + t, dbias, mask=t < T)


def backward(saved, grad_y, needs=None):
    y, bias_dtype = saved
    _, need_bias = needs or (True, True)
    B, H, S, T = y.shape
    dx = torch.empty_like(y)
    dbias = torch.empty(B, 1, S, T, device=y.device, dtype=bias_dtype) if need_bias else None
    BLOCK = triton.next_power_of_2(T)
    _biased_softmax_bwd[(S, B)](
        grad_y, y, dx, dbias, H, S, T, *grad_y.stride(), NEED_BIAS=need_bias, BLOCK=BLOCK, num_warps=_warps(BLOCK)
    )
    return dx, dbias


# --- check ---
SWEEP = (
    {"B": 1, "H": 3, "S": 16, "T": 64, "dtype": "float16"},
    {"B": 2, "H": 2, "S": 7, "T": 45},
    {"B": 1, "H": 4, "S": 8, "T": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "S": 1024, "T": 1024, "dtype": "bfloat16"},)


def make_args(B, H, S, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    scores, bias = 2 * torch.randn(B, H, S, T, generator=g), torch.randn(B, 1, S, T, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (scores, bias))


def reference(scores, bias):
    return torch.softmax(scores.float() + bias.float(), -1).to(scores.dtype)
