"""LayerNorm that keeps its output instead of its input: the backward rebuilds xhat as (y - bias) / gain.

The next layer keeps y anyway, so x and mean need not stay alive. A gain near zero could not be inverted, so the forward
itself keeps gains away from it: |weight| below `floor` counts as `floor`, with weight's sign, and has gradient zero.
The rounding of y returns in xhat divided by the gain, which is small beside that of dx as long as biases are not large.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_recompute",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("saved-output", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gain(w, floor):
    """Weight moved away from zero: at least `floor` in size, with its sign."""
    return tl.where(w < 0.0, tl.minimum(w, -floor), tl.maximum(w, floor))


@triton.jit
def _ln_invertible_fwd(X, W, B, Y, Rstd, N, eps, floor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    x = tl.load(X + row * N + n, mask=live, other=0.0).to(tl.float32)
    gain = _gain(tl.load(W + n, mask=live, other=0.0).to(tl.float32), floor)
    b = tl.load(B + n, mask=live, other=0.0).to(tl.float32)
    centred = tl.where(live, x - tl.sum(x, 0) / N, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / N + eps)
    tl.store(Rstd + row, rstd)
    tl.store(Y + row * N + n, centred * rstd * gain + b, mask=live)


def forward(x, weight, bias, floor=1e-2, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _ln_invertible_fwd[(M,)](
        x, weight, bias, y, rstd, N, eps, floor, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return y, (y, rstd, weight, bias, floor)


# --- backward ---
@triton.jit
def _both_sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_invertible_bwd(
    DY, Y, Rstd, W, B, DX, Parts, M, N, dy_row, dy_col, rows_each, floor, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    live = n < N
    w = tl.load(W + n, mask=live, other=1.0).to(tl.float32)
    b = tl.load(B + n, mask=live, other=0.0).to(tl.float32)
    gain = _gain(w, floor)
    # One division for each column instead of one for each element.
    inverse = 1.0 / gain
    acc_w = tl.zeros((BLOCK,), tl.float32)
    acc_b = tl.zeros((BLOCK,), tl.float32)
    # One program of 16 warps fits: rows are copied three turns ahead of their use.
    for row in tl.range(pid * rows_each, tl.minimum((pid + 1) * rows_each, M), num_stages=STAGES):
        rstd = tl.load(Rstd + row)
        y = tl.load(Y + row * N + n, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_row + n * dy_col, mask=live, other=0.0).to(tl.float32)
        xhat = (y - b) * inverse
        acc_w += dy * xhat
        acc_b += dy
        dxhat = dy * gain
        c1, c2 = tl.reduce((dxhat * xhat, dxhat), 0, _both_sums)
        tl.store(DX + row * N + n, (dxhat - c2 / N - xhat * (c1 / N)) * rstd, mask=live)
    # Where the floor held, y does not depend on the weight.
    tl.store(Parts + 2 * pid * N + n, tl.where(tl.abs(w) < floor, 0.0, acc_w), mask=live)
    tl.store(Parts + (2 * pid + 1) * N + n, acc_b, mask=live)


def backward(saved, grad_y, needs=None):
    y, rstd, weight, bias, floor = saved
    M, N = y.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(1, min(16, BLOCK // 256))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    rows_each = max(2, triton.cdiv(M, 132 * 16 // warps))
    programs = triton.cdiv(M, rows_each)
    dx = torch.empty_like(y)
    parts = torch.empty(programs, 2, N, device=y.device, dtype=torch.float32)
    _ln_invertible_bwd[(programs,)](
        grad_y, y, rstd, weight, bias, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each, floor,
        STAGES=8 if BLOCK * y.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias.to(bias.dtype)


# --- check ---
SWEEP = ({"M": 6, "N": 64}, {"M": 13, "N": 91, "dtype": "float16"}, {"M": 8, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 32768, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(M, N, generator=g) + 0.5, torch.randn(N, generator=g) * 0.1
    weight = torch.rand(N, generator=g) + 0.5
    # Some gains are negative, and some below the floor.
    weight[::7] *= -1.0
    weight[3::11] *= 1e-3
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, floor=1e-2, eps=1e-5):
    w = weight.float()
    gain = torch.where(w < 0, w.clamp(max=-floor), w.clamp(min=floor))
    return torch.nn.functional.layer_norm(x.float(), (x.shape[1],), gain, bias.float(), eps).to(x.dtype)
