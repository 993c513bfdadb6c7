"""RMSNorm with gain 1 + weight, applied in fp32 before the one rounding at the end (the order that Gemma uses).

Nothing is rounded between x and y, so the backward may rebuild the unrounded xhat from x: dweight sums dy * xhat in
fp32, and dx sees dy * (1 + weight). The offset is a constant: it is in dx, not in dweight. Bands of rows meet in one
fp32 row by atomics, one value per column from each program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_offset_gemma",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("recompute", "atomics", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gemma_norm_fwd(X, W, Y, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    ok = n < N
    x = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32)
    gain = 1.0 + tl.load(W + n, mask=ok, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * gain
    tl.store(Y + row * N + n, y.to(Y.dtype.element_ty), mask=ok)


def forward(x, weight, eps=1e-6):
    x = x.contiguous()
    N = x.shape[-1]
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(N)
    _gemma_norm_fwd[(x.numel() // N,)](x, weight, y, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, eps)


# --- backward ---
@triton.jit
def _add_two_sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _gemma_norm_bwd(
    DY, X, W, DX, DW, R, S, N, dy_b, dy_s, dy_n, eps, rows_each,
    NEED_W: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    ok = n < N
    gain = 1.0 + tl.load(W + n, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    # While a row waits for its sums, the next two are copied.
    for row in tl.range(band * rows_each, tl.minimum((band + 1) * rows_each, R), num_stages=STAGES):
        x = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row // S * dy_b + row % S * dy_s + n * dy_n, mask=ok, other=0.0).to(tl.float32)
        dxhat = dy * gain
        # 1/rms is a common factor of the second sum: both run in one reduction over x itself.
        squares, along = tl.reduce((x * x, dxhat * x), 0, _add_two_sums)
        inv = tl.rsqrt(squares / N + eps)
        xhat = x * inv
        if NEED_W:
            dw += dy * xhat
        dx = inv * (dxhat - xhat * (inv * along / N))
        tl.store(DX + row * N + n, dx.to(DX.dtype.element_ty), mask=ok)
    if NEED_W:
        tl.atomic_add(DW + n, dw, mask=ok, sem="relaxed")


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    S, N = x.shape[1:]
    R = x.numel() // N
    need_w = needs is None or needs[1]
    BLOCK = triton.next_power_of_2(N)
    warps = max(2, min(16, BLOCK // 512))
    # One wave: 512 threads for each of 132 processors. Half the programs of twice as many threads, half the atomics.
    rows_each = max(2, triton.cdiv(R, 132 * max(1, 16 // warps)))
    dx = torch.empty_like(x)
    dw = torch.zeros(N, device=x.device, dtype=torch.float32)
    _gemma_norm_bwd[(triton.cdiv(R, rows_each),)](
        grad_y, x, weight, dx, dw, R, S, N, *grad_y.stride(), eps, rows_each,
        NEED_W=need_w, STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return dx, dw.to(weight.dtype) if need_w else None


# --- check ---
SWEEP = (
    {"B": 2, "S": 3, "N": 64},
    {"B": 3, "S": 5, "N": 85, "dtype": "float16"},
    {"B": 2, "S": 4, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "N": 3072, "dtype": "bfloat16"},)


def make_args(B, S, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Weights are kept around zero: the gain is 1 + weight.
    x, weight = torch.randn(B, S, N, generator=g) * 1.5, torch.randn(N, generator=g) * 0.2
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight, eps=1e-6):
    xf = x.float()
    normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)
