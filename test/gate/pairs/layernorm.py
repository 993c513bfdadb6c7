"""LayerNorm with one program per row; column sums by atomics into float32."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="layernorm",
    family="norm_row",
    op="layer_norm",
    schema=1,
    techniques=("atomic",),
    saves=("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    grads=("x", "weight", "bias"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _ln_fwd(X, W, B, Y, MEAN, RSTD, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(X + row * N + c, mask=m, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    d = tl.where(m, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 0) / N + eps)
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    b = tl.load(B + c, mask=m, other=0.0).to(tl.float32)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
    tl.store(Y + row * N + c, d * rstd * w + b, mask=m)


def forward(x, weight, bias, eps=1e-5):
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _ln_fwd[(M,)](x, weight, bias, y, mean, rstd, N, eps, BLOCK=triton.next_power_of_2(N))
    return y, (x, weight, bias, mean, rstd)


# --- backward ---
@triton.jit
def _ln_bwd(DY, X, W, MEAN, RSTD, DX, DW, DB, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    g = tl.load(DY + row * N + c, mask=m, other=0.0).to(tl.float32)
    x = tl.load(X + row * N + c, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + row)
    rstd = tl.load(RSTD + row)
    xh = tl.where(m, (x - mean) * rstd, 0.0)
    wg = g * w
    c1 = tl.sum(xh * wg, 0) / N
    c2 = tl.sum(wg, 0) / N
    tl.store(DX + row * N + c, (wg - xh * c1 - c2) * rstd, mask=m)
    tl.atomic_add(DW + c, g * xh, mask=m)
    tl.atomic_add(DB + c, g, mask=m)


def backward(saved, grad_out, needs=None):
    x, weight, bias, mean, rstd = saved
    M, N = x.shape
    g = grad_out.contiguous()
    dx = torch.empty_like(x)
    dw = torch.zeros(N, device=x.device, dtype=torch.float32)
    db = torch.zeros_like(dw)
    _ln_bwd[(M,)](g, x, weight, mean, rstd, dx, dw, db, N, BLOCK=triton.next_power_of_2(N))
    return dx, dw.to(weight.dtype), db.to(bias.dtype)


# --- check ---
SWEEP = (dict(M=5, N=40), dict(M=33, N=70))


def make_args(M, N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b = torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return x.to(device), w.to(device), b.to(device)


def reference(x, weight, bias, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
