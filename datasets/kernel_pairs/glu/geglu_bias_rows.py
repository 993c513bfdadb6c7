"""GEGLU with a bias on gate and up: both halves of dx and both halves of dbias come out of one walk down the rows.

A program owns the same columns of both halves, since they share dy. It walks its rows tile by tile, writes dx, and
keeps both column sums in registers; at the end they are one row of partials, laid out like the bias: gate first, then
up.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "geglu_bias_rows",
    "family": "glu",
    "op": "geglu",
    "schema": 1,
    "techniques": ("two-stage-partials", "recompute", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _geglu_bias_fwd(X, Bias, Y, M, D, x_row, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    mask = (m < M) & (d < D)
    gate = tl.load(X + m * x_row + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(X + m * x_row + D + d, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(Bias + d, mask=d < D, other=0.0).to(tl.float32)
    up += tl.load(Bias + D + d, mask=d < D, other=0.0).to(tl.float32)
    cdf = 0.5 + 0.5 * tl.math.erf(gate * 0.7071067811865476)
    tl.store(Y + m * D + d, gate * cdf * up, mask=mask)


def forward(x, bias):
    if x.stride(1) != 1:
        x = x.contiguous()
    bias = bias.contiguous()
    M, D = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, D, device=x.device, dtype=x.dtype)
    _geglu_bias_fwd[(triton.cdiv(M, 16), triton.cdiv(D, 128))](x, bias, y, M, D, x.stride(0), BLOCK_M=16, BLOCK_D=128)
    return y, (x, bias)


# --- backward ---
@triton.jit
def _geglu_bias_bwd(
    DY, X, Bias, DX, Parts, M, D, steps, x_row, dy_row, dy_col, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < D
    gate_bias = tl.load(Bias + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    up_bias = tl.load(Bias + D + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    gate_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    up_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for step in range(steps):
        m = ((tl.program_id(0) * steps + step).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (m < M) & inside[None, :]
        dy = tl.load(DY + m * dy_row + d[None, :].to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(X + m * x_row + d[None, :], mask=mask, other=0.0).to(tl.float32) + gate_bias
        up = tl.load(X + m * x_row + D + d[None, :], mask=mask, other=0.0).to(tl.float32) + up_bias
        cdf = 0.5 + 0.5 * tl.math.erf(gate * 0.7071067811865476)
        pdf = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        # dy is zero beyond the borders, and with it what those lanes add to the sums.
        d_gate = dy * up * (cdf + gate * pdf)
        d_up = dy * gate * cdf
        out = DX + m * (2 * D) + d[None, :]
        tl.store(out, d_gate, mask=mask)
        tl.store(out + D, d_up, mask=mask)
        gate_sum += d_gate
        up_sum += d_up
    part = Parts + tl.program_id(0) * (2 * D) + d
    tl.store(part, tl.sum(gate_sum, 0), mask=inside)
    tl.store(part + D, tl.sum(up_sum, 0), mask=inside)


def backward(saved, grad_y, needs=None):
    x, bias = saved
    M, D = x.shape[0], x.shape[1] // 2
    BLOCK_M, BLOCK_D = 8, 128
    tiles, columns = triton.cdiv(M, BLOCK_M), triton.cdiv(D, BLOCK_D)
    # Around sixteen programs for each of 132 processors; the longer a walk, the fewer rows of partials.
    steps = max(2, triton.cdiv(tiles * columns, 16 * 132))
    strips = triton.cdiv(tiles, steps)
    dx = torch.empty(M, 2 * D, device=x.device, dtype=x.dtype)
    parts = torch.empty(strips, 2 * D, device=x.device, dtype=torch.float32)
    _geglu_bias_bwd[(strips, columns)](
        grad_y, x, bias, dx, parts, M, D, steps, x.stride(0), grad_y.stride(0), grad_y.stride(1),
        BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=8,
    )  # fmt: skip
    return dx, parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = ({"M": 32, "D": 128, "dtype": "float16"}, {"M": 43, "D": 75}, {"M": 16, "D": 96, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "D": 8192, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(M, 2 * D, generator=g), torch.randn(2 * D, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, bias))


def reference(x, bias):
    gate, up = (x.float() + bias.float()).chunk(2, -1)
    return (torch.nn.functional.gelu(gate) * up).to(x.dtype)
