"""LayerNorm whose forward merges (mean, squares, count) triples in one reduction; the backward has its two plain sums.

The combine function is Chan's merge of two sets of samples, so a row needs one reduction instead of two in sequence.
Padded lanes enter with count 0. Nothing of the tree of merges returns in the backward: the derivative of mean and
variance is the same however they were summed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_welford",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("closed-form", "multi-row-tile", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _merge(mean_a, squares_a, count_a, mean_b, squares_b, count_b):
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    delta = mean_b - mean_a
    return mean_a + delta * share, squares_a + squares_b + delta * delta * count_a * share, count


@triton.jit
def _ln_welford_fwd(X, W, B, Y, Mean, Rstd, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    count = (n < N).to(tl.float32)
    mean, squares, _ = tl.reduce((x, tl.zeros_like(x), count), 0, _merge)
    rstd = tl.rsqrt(squares / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, (x - mean) * rstd * w + b, mask=n < N)


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK = triton.next_power_of_2(N)
    _ln_welford_fwd[(M,)](x, weight, bias, y, mean, rstd, N, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 256)))
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_two_sums_bwd(
    DY, X, W, Mean, Rstd, DX, Parts, M, N, dy_m, dy_n, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # ROWS rows at a time: one reduction, of pairs, serves them all, while the next two tiles are copied.
    n = tl.arange(0, BLOCK)[None, :]
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        m = start + tl.arange(0, ROWS)[:, None]
        ok = (m < M) & (n < N)
        x = tl.load(X + m * N + n, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + m * dy_m + n * dy_n, mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(Rstd + m, mask=m < M, other=0.0)
        # dy is zero outside the rows and columns: xhat may be anything finite there.
        xhat = (x - tl.load(Mean + m, mask=m < M, other=0.0)) * rstd
        g = dy * w
        along_xhat, along_one = tl.reduce((g * xhat, g), 1, _add_both, keep_dims=True)
        tl.store(DX + m * N + n, rstd * (g - along_one / N - xhat * (along_xhat / N)), mask=ok)
        dw += dy * xhat
        db += dy
    column = tl.arange(0, BLOCK)
    out = Parts + tl.program_id(0) * 2 * N + column
    tl.store(out, tl.sum(dw, 0), mask=column < N)
    tl.store(out + N, tl.sum(db, 0), mask=column < N)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    ROWS = max(1, min(16, 1024 // BLOCK))
    warps = max(2, min(16, ROWS * BLOCK // 512))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    programs = max(1, min(132 * 16 // warps, triton.cdiv(M, 2 * ROWS)))
    dx = torch.empty_like(x)
    parts = torch.empty(programs, 2, N, device=x.device, dtype=torch.float32)
    _ln_two_sums_bwd[(programs,)](
        grad_y, x, weight, mean, rstd, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1),
        STAGES=3 if ROWS * BLOCK * x.element_size() <= 32768 else 1, ROWS=ROWS, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 9, "N": 64}, {"M": 18, "N": 93, "dtype": "float16"}, {"M": 12, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 131072, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Far from zero, where a sum of squares minus a squared mean would cancel.
    x = torch.randn(M, N, generator=g) + 3.0
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
