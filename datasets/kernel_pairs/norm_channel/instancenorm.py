"""Affine InstanceNorm2d, one program for each plane (sample, channel), which it reads once and keeps in registers.

With the plane at hand mean and 1/std are summed again for less than fetching them, and dx needs no second read. The
affine gradients sum over samples: every plane adds its two numbers by atomics to fp32 sums of its channel.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "instancenorm",
    "family": "norm_channel",
    "op": "instance_norm",
    "schema": 1,
    "techniques": ("row-local", "recompute", "atomics", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _plane_xhat(X, plane, L, eps, BLOCK: tl.constexpr):
    """xhat of a whole plane, zero past its end, and its 1/std."""
    at = tl.arange(0, BLOCK)
    x = tl.load(X + plane.to(tl.int64) * L + at, mask=at < L, other=0.0).to(tl.float32)
    x = tl.where(at < L, x - tl.sum(x, 0) / L, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / L + eps)
    return x * rstd, rstd


@triton.jit
def _instance_norm_fwd(X, W, B, Y, C, L, eps, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    xhat, _ = _plane_xhat(X, plane, L, eps, BLOCK)
    w = tl.load(W + plane % C).to(tl.float32)
    b = tl.load(B + plane % C).to(tl.float32)
    tl.store(Y + plane.to(tl.int64) * L + at, xhat * w + b, mask=at < L)


def _launch(L):
    # Up to 128 x 128 pixels: 32 elements for each of 512 threads.
    block = triton.next_power_of_2(L)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    _instance_norm_fwd[(N * C,)](x, weight, bias, y, C, H * W, eps, **_launch(H * W))
    return y, (x, weight, eps)


# --- backward ---
@triton.jit
def _instance_norm_bwd(
    DY, X, W, DX, Sums, C, L, dy_n, dy_c, dy_l, eps, NEED_W: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    plane = tl.program_id(0)
    c = plane % C
    at = tl.arange(0, BLOCK)
    xhat, rstd = _plane_xhat(X, plane, L, eps, BLOCK)
    dy_at = (plane // C).to(tl.int64) * dy_n + c.to(tl.int64) * dy_c + at.to(tl.int64) * dy_l
    dy = tl.load(DY + dy_at, mask=at < L, other=0.0).to(tl.float32)
    dw = tl.sum(dy * xhat, 0)
    db = tl.sum(dy, 0)
    if NEED_W:
        tl.atomic_add(Sums + c, dw, sem="relaxed")
        tl.atomic_add(Sums + C + c, db, sem="relaxed")
    # The affine sums of the plane are, times w / L, the two projections of dx.
    gain = tl.load(W + c).to(tl.float32) * rstd
    tl.store(DX + plane.to(tl.int64) * L + at, gain * (dy - (db + xhat * dw) / L), mask=at < L)


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    N, C, H, W = x.shape
    need_w = needs is None or needs[1] or needs[2]
    # A view wherever the pixels of a plane lie at one distance, else a copy.
    dy = grad_y.flatten(2)
    dx = torch.empty_like(x)
    sums = torch.zeros(2, C, device=x.device, dtype=torch.float32)
    _instance_norm_bwd[(N * C,)](dy, x, weight, dx, sums, C, H * W, *dy.stride(), eps, NEED_W=need_w, **_launch(H * W))
    if not need_w:
        return dx, None, None
    dweight, dbias = sums.to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 3, "C": 4, "H": 8, "W": 8},
    {"N": 2, "C": 5, "H": 11, "W": 13, "dtype": "float16"},
    {"N": 4, "C": 3, "H": 7, "W": 9, "dtype": "bfloat16"},
)
BENCH = (
    {"N": 128, "C": 256, "H": 64, "W": 64, "dtype": "bfloat16"},
    {"N": 32, "C": 128, "H": 128, "W": 128, "dtype": "float32"},
)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, H, W, generator=g) * 2.0 - 0.5
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.instance_norm(x.float(), None, None, weight.float(), bias.float(), True, 0.1, eps)
    return y.to(x.dtype)
