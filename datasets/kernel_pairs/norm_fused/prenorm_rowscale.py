"""LayerNorm times a drop-path scale per sample: the row's scalar multiplies its gradient, dropped samples are skipped.

y[b, s] = scale[b] * LayerNorm(x[b, s]). A sample of scale 0 reads neither x nor dy in either direction: its rows of y
and dx are zeros, and it adds nothing to dweight and dbias. Rows are dealt out to the programs in turn, so that the
skipped ones of a sample are spread over all of them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "prenorm_rowscale",
    "family": "norm_fused",
    "op": "layer_norm_drop_path",
    "schema": 1,
    "techniques": ("row-local", "recompute", "two-stage-partials", "partial-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rowscale_fwd(X, W, B, Scale, Y, S, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    scale = tl.load(Scale + row // S).to(tl.float32)
    if scale == 0.0:
        tl.store(Y + row * D + d, tl.zeros((BLOCK,), tl.float32), mask=ok)
    else:
        x = tl.load(X + row * D + d, mask=ok, other=0.0).to(tl.float32)
        w = tl.load(W + d, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(B + d, mask=ok, other=0.0).to(tl.float32)
        centred = tl.where(ok, x - tl.sum(x, 0) / D, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
        tl.store(Y + row * D + d, scale * (centred * rstd * w + b), mask=ok)


def forward(x, weight, bias, scale, eps=1e-5):
    x = x.contiguous()
    B, S, D = x.shape
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(D)
    _rowscale_fwd[(B * S,)](x, weight, bias, scale, y, S, D, eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, weight, scale, eps)


# --- backward ---
@triton.jit
def _add_four_sums(a0, b0, c0, d0, a1, b1, c1, d1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1


@triton.jit
def _scale_and_pivot(Scale, X, row, S, D):
    """The scale of a row's sample, and the row's first element where it is not skipped."""
    scale = tl.load(Scale + row // S).to(tl.float32)
    return scale, tl.load(X + row.to(tl.int64) * D, mask=scale != 0.0, other=0.0).to(tl.float32)


@triton.jit
def _rowscale_bwd(
    DY, X, W, Scale, DX, Parts, R, S, D, dy_b, dy_s, dy_d, eps,
    NEED_X: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    ok = d < D
    w = tl.load(W + d, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    scale, pivot = _scale_and_pivot(Scale, X, pid, S, D)
    # Skipping is a mask, not a branch, so that the copies of the next rows are issued whatever becomes of this one.
    for turn in tl.range(pid, R, programs, num_stages=STAGES):
        sample = turn // S
        row = turn.to(tl.int64)
        next_scale, next_pivot = _scale_and_pivot(Scale, X, tl.minimum(turn + programs, R - 1), S, D)
        kept = ok & (scale != 0.0)
        x = tl.load(X + row * D + d, mask=kept, other=0.0).to(tl.float32)
        dy = tl.load(DY + sample.to(tl.int64) * dy_b + (row - sample * S) * dy_s + d * dy_d, mask=kept, other=0.0).to(
            tl.float32
        )
        # The scale acts after the affine part, so it enters all three gradients with dy.
        dy *= scale
        dxhat = dy * w
        # About the row's first element nothing cancels: sums of statistics and gradient are one reduction, not three.
        away = tl.where(kept, x - pivot, 0.0)
        first, second, along_one, along_x = tl.reduce((away, away * away, dxhat, dxhat * away), 0, _add_four_sums)
        mean = first / D
        rstd = tl.rsqrt(tl.maximum(second / D - mean * mean, 0.0) + eps)
        xhat = tl.where(ok, (away - mean) * rstd, 0.0)
        dw += dy * xhat
        db += dy
        if NEED_X:
            slope = (along_x - mean * along_one) * rstd / D
            tl.store(DX + row * D + d, rstd * (dxhat - along_one / D - xhat * slope), mask=ok)
        scale = next_scale
        pivot = next_pivot
    tl.store(Parts + pid * D + d, dw, mask=ok)
    tl.store(Parts + (programs + pid) * D + d, db, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, scale, eps = saved
    B, S, D = x.shape
    BLOCK = triton.next_power_of_2(D)
    warps = max(1, min(16, BLOCK // 1024))
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    programs = min(132 * 16 // warps, triton.cdiv(B * S, 2))
    need_x = needs is None or needs[0]
    dx = torch.empty_like(x) if need_x else None
    parts = torch.empty(2, programs, D, device=x.device, dtype=torch.float32)
    _rowscale_bwd[(programs,)](
        grad_y, x, weight, scale, dx, parts, B * S, S, D, *grad_y.stride(), eps,
        NEED_X=need_x, STAGES=4 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"B": 3, "S": 4, "D": 64},
    {"B": 5, "S": 7, "D": 45, "dtype": "float16"},
    {"B": 4, "S": 3, "D": 96, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "S": 1024, "D": 1536, "dtype": "bfloat16"},)


def make_args(B, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = torch.randn(B, S, D, generator=g), torch.rand(D, generator=g) + 0.5, torch.randn(D, generator=g)
    # Every third sample is dropped, the others make up for it. The scale is drawn, not learned, and stays fp32.
    scale = torch.where(torch.arange(B) % 3 == 1, 0.0, 1.5)
    tensors = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))
    return (*tensors, scale.to(device))


def reference(x, weight, bias, scale, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return (scale[:, None, None] * y).to(x.dtype)
