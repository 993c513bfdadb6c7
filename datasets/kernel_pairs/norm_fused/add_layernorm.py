"""h = scale * x + x1 + residual, y = LayerNorm(h), with x1, scale and the output h optional.

What is absent is compiled out by flags, in both directions. The cotangents of y and h meet in one row pass, whose dh is
the gradient of residual and x1 alike, and of x where there is no scale; dweight, dbias and dscale are one partial row
each for every program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "add_layernorm",
    "family": "norm_fused",
    "op": "add_layer_norm",
    "schema": 1,
    "techniques": (
        "row-local", "saved-statistics", "two-stage-partials", "optional-cotangent", "shared-gradient",
        "strided-cotangent",
    ),
    "saves": ("h: fp32 or bf16 or fp16 (M, N)", "mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "residual", "weight", "bias", "x1", "scale"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _add_ln_fwd(
    X, Res, X1, Scale, W, B, Y, H, Mean, Rstd, N, eps,
    HAS_X1: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < N
    at = row * N + n
    h = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        h *= tl.load(Scale + n, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(Res + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_X1:
        h += tl.load(X1 + at, mask=inside, other=0.0).to(tl.float32)
    # The norm sees the sum as it is stored, which is what the backward will read.
    stored = h.to(H.dtype.element_ty)
    tl.store(H + at, stored, mask=inside)
    h = stored.to(tl.float32)
    mean = tl.sum(h, 0) / N
    centred = tl.where(inside, h - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    w = tl.load(W + n, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, centred * rstd * w + b, mask=inside)


def _launch(N):
    # Eight elements for each thread: the backward keeps up to nine rows in registers.
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def forward(x, residual, weight, bias, x1=None, scale=None, return_sum=True, eps=1e-5):
    x, residual = x.contiguous(), residual.contiguous()
    x1 = None if x1 is None else x1.contiguous()
    M, N = x.shape
    y, h = torch.empty_like(x), torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _add_ln_fwd[(M,)](
        x, residual, x1, scale, weight, bias, y, h, mean, rstd, N, eps,
        HAS_X1=x1 is not None, HAS_SCALE=scale is not None, **_launch(N),
    )  # fmt: skip
    # x itself is only needed for dscale.
    return (y, h if return_sum else None), (None if scale is None else x, x1, scale, weight, h, mean, rstd)


# --- backward ---
@triton.jit
def _add_ln_bwd(
    DY, DHOut, X, Scale, W, H, Mean, Rstd, DX, DH, Parts, M, N, dy_row, dy_col, dh_row, dh_col,
    HAS_DY: tl.constexpr, HAS_DH: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    n = tl.arange(0, BLOCK)
    inside = n < N
    if HAS_DY:
        w = tl.load(W + n, mask=inside, other=0.0).to(tl.float32)
        dw = tl.zeros((BLOCK,), tl.float32)
        db = tl.zeros((BLOCK,), tl.float32)
    if HAS_SCALE:
        scale = tl.load(Scale + n, mask=inside, other=0.0).to(tl.float32)
        dscale = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(pid, M, programs, num_stages=2):
        at = row * N + n
        dh = tl.zeros((BLOCK,), tl.float32)
        if HAS_DY:
            dy = tl.load(DY + row * dy_row + n * dy_col, mask=inside, other=0.0).to(tl.float32)
            h = tl.load(H + at, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(Rstd + row)
            xhat = tl.where(inside, (h - tl.load(Mean + row)) * rstd, 0.0)
            dxhat = dy * w
            dh = rstd * (dxhat - tl.sum(dxhat, 0) / N - xhat * (tl.sum(dxhat * xhat, 0) / N))
            dw += dy * xhat
            db += dy
        if HAS_DH:
            dh += tl.load(DHOut + row * dh_row + n * dh_col, mask=inside, other=0.0).to(tl.float32)
        tl.store(DH + at, dh, mask=inside)
        if HAS_SCALE:
            x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(DX + at, dh * scale, mask=inside)
            dscale += tl.where(inside, dh * x, 0.0)
    if HAS_DY:
        tl.store(Parts + pid * N + n, dw, mask=inside)
        tl.store(Parts + (programs + pid) * N + n, db, mask=inside)
    if HAS_SCALE:
        tl.store(Parts + (2 * programs + pid) * N + n, dscale, mask=inside)


def backward(saved, grad_y, grad_h, needs=None):
    x, x1, scale, weight, h, mean, rstd = saved
    M, N = h.shape
    has_dy, has_dh, has_scale = grad_y is not None, grad_h is not None, scale is not None
    launch = _launch(N)
    # One wave: 768 threads for each of 132 processors, as the registers allow.
    programs = min(132 * max(1, 24 // launch["num_warps"]), triton.cdiv(M, 2))
    dh = torch.empty_like(h)
    dx = torch.empty_like(h) if has_scale else dh
    parts = torch.empty(3, programs, N, device=h.device, dtype=torch.float32)
    _add_ln_bwd[(programs,)](
        grad_y, grad_h, x, scale, weight, h, mean, rstd, dx, dh, parts, M, N,
        *(grad_y.stride() if has_dy else (0, 0)), *(grad_h.stride() if has_dh else (0, 0)),
        HAS_DY=has_dy, HAS_DH=has_dh, HAS_SCALE=has_scale, **launch,
    )  # fmt: skip
    dweight = dbias = dscale = None
    if has_dy:
        dweight, dbias = parts[:2].sum(1).to(weight.dtype)
    if has_scale:
        dscale = parts[2].sum(0).to(scale.dtype)
    return dx, dh, dweight, dbias, None if x1 is None else dh, dscale


# --- check ---
SWEEP = (
    {"M": 5, "N": 64},
    {"M": 11, "N": 83, "X1": False, "dtype": "float16"},
    {"M": 9, "N": 96, "SCALE": False, "SUM": False},
    {"M": 6, "N": 128, "dtype": "bfloat16"},
)
BENCH = (
    {"M": 16384, "N": 2048, "dtype": "bfloat16"},
    {"M": 8192, "N": 4096, "X1": False, "SCALE": False, "dtype": "float32"},
)


def make_args(M, N, X1=True, SCALE=True, SUM=True, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, residual, x1 = (torch.randn(M, N, generator=g) for _ in range(3))
    weight, bias, scale = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g), torch.rand(N, generator=g)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    required = tuple(t.to(**to) for t in (x, residual, weight, bias))
    return (*required, x1.to(**to) if X1 else None, scale.to(**to) if SCALE else None, SUM)


def reference(x, residual, weight, bias, x1=None, scale=None, return_sum=True, eps=1e-5):
    h = x.float() if scale is None else x.float() * scale.float()
    h = h + residual.float() + (0.0 if x1 is None else x1.float())
    h = h.to(x.dtype)
    y = torch.nn.functional.layer_norm(h.float(), (x.shape[1],), weight.float(), bias.float(), eps).to(x.dtype)
    return y, h if return_sum else None
