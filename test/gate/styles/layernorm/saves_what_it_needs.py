"""The normalised rows are saved in place of the input, by a forward of its own; what is not needed is None."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="layernorm_saved",
    family="norm_row",
    op="layer_norm",
    schema=1,
    techniques=("saved-output", "column-sums"),
    saves=("normed: fp32 (M, N)", "rstd: fp32 (M,)"),
    grads=("x", "weight", "bias"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _fwd(X, W, B, Y, NORMED, RSTD, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(X + row * N + c, mask=m, other=0.0).to(tl.float32)
    d = tl.where(m, x - tl.sum(x, 0) / N, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 0) / N + eps)
    normed = d * rstd
    tl.store(RSTD + row, rstd)
    tl.store(NORMED + row * N + c, normed, mask=m)
    y = normed * tl.load(W + c, mask=m, other=0.0) + tl.load(B + c, mask=m, other=0.0)
    tl.store(Y + row * N + c, y, mask=m)


def forward(x, weight, bias, eps=1e-5):
    M, N = x.shape
    y, normed = torch.empty_like(x), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rstd = torch.empty(M, device=x.device)
    _fwd[(M,)](x, weight, bias, y, normed, rstd, N, eps, BLOCK=triton.next_power_of_2(N))
    return y, (normed, rstd, weight, x.dtype)


# --- backward ---
@triton.jit
def _dx(DY, sm, sn, NORMED, RSTD, W, DX, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    normed = tl.load(NORMED + row * N + c, mask=m, other=0.0)
    wdy = tl.load(DY + row * sm + c * sn, mask=m, other=0.0) * tl.load(W + c, mask=m, other=0.0)
    out = wdy - (tl.sum(wdy) + normed * tl.sum(wdy * normed)) / N
    tl.store(DX + row * N + c, out * tl.load(RSTD + row), mask=m)


@triton.jit
def _sums(
    DY, sm, sn, NORMED, DW, DB, M, N, HAS_W: tl.constexpr, HAS_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    dw = tl.zeros((BM, BN), tl.float32)
    db = tl.zeros((BM, BN), tl.float32)
    for start in range(0, M, BM):
        r = start + tl.arange(0, BM)
        m = (r[:, None] < M) & (c[None, :] < N)
        dy = tl.load(DY + r[:, None] * sm + c[None, :] * sn, mask=m, other=0.0)
        if HAS_W:
            dw += dy * tl.load(NORMED + r[:, None] * N + c[None, :], mask=m, other=0.0)
        db += dy
    if HAS_W:
        tl.store(DW + c, tl.sum(dw, 0), mask=c < N)
    if HAS_B:
        tl.store(DB + c, tl.sum(db, 0), mask=c < N)


def backward(saved, grad_out, needs=(True, True, True)):
    normed, rstd, weight, dtype = saved
    M, N = normed.shape
    need_x, need_w, need_b = needs
    dx = dw = db = None
    if need_x:
        dx = torch.empty(normed.shape, dtype=dtype, device=normed.device)
        _dx[(M,)](grad_out, *grad_out.stride(), normed, rstd, weight, dx, N, BLOCK=triton.next_power_of_2(N))
    if need_w or need_b:
        dw = torch.empty_like(weight) if need_w else None
        db = torch.empty_like(weight) if need_b else None
        _sums[(triton.cdiv(N, 32),)](
            grad_out, *grad_out.stride(), normed, dw, db, M, N, HAS_W=need_w, HAS_B=need_b, BM=8, BN=32
        )
    return dx, dw, db


# --- check ---
SWEEP = (dict(M=5, N=40), dict(M=33, N=70))


def make_args(M, N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b = torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return x.to(device), w.to(device), b.to(device)


def reference(x, weight, bias, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
