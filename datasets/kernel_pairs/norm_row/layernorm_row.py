"""LayerNorm, one row per program: dx needs two row sums, dweight and dbias meet as partial rows in a second kernel."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_row",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _layernorm_fwd(X, W, B, Y, Mean, Rstd, N, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(X + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(B + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    tl.store(Y + row * N + cols, centred * rstd * w + b, mask=mask)


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK_N = triton.next_power_of_2(N)
    _layernorm_fwd[(M,)](
        x, weight, bias, y, mean, rstd, N, eps, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512))
    )
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _layernorm_bwd(
    DY, X, W, Mean, Rstd, DX, DWP, DBP, M, N, stride_dm, stride_dn, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    # A program owns ROWS consecutive rows, so one partial row of dweight and dbias serves all of them.
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(ROWS):
        row = pid * ROWS + i
        live = mask & (row < M)
        x = tl.load(X + row * N + cols, mask=live, other=0.0).to(tl.float32)
        g = tl.load(DY + row * stride_dm + cols * stride_dn, mask=live, other=0.0).to(tl.float32)
        mean = tl.load(Mean + row, mask=row < M, other=0.0)
        rstd = tl.load(Rstd + row, mask=row < M, other=0.0)
        xhat = tl.where(live, (x - mean) * rstd, 0.0)
        wg = g * w
        along_xhat = tl.sum(wg * xhat, 0) / N
        along_one = tl.sum(wg, 0) / N
        tl.store(DX + row * N + cols, (wg - along_one - xhat * along_xhat) * rstd, mask=live)
        dw += g * xhat
        db += g
    tl.store(DWP + pid * N + cols, dw, mask=mask)
    tl.store(DBP + pid * N + cols, db, mask=mask)


@triton.jit
def _layernorm_reduce(DWP, DBP, DW, DB, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows[:, None] < P) & (cols[None, :] < N)
        at = rows[:, None] * N + cols[None, :]
        dw += tl.load(DWP + at, mask=mask, other=0.0)
        db += tl.load(DBP + at, mask=mask, other=0.0)
    tl.store(DW + cols, tl.sum(dw, 0), mask=cols < N)
    tl.store(DB + cols, tl.sum(db, 0), mask=cols < N)


def backward(saved, grad_y, needs=(True, True, True)):
    x, weight, mean, rstd = saved
    M, N = x.shape
    # About two programs for each multiprocessor of a large GPU, and never fewer than four rows for each.
    ROWS = max(4, min(64, triton.next_power_of_2(triton.cdiv(M, 264))))
    parts = triton.cdiv(M, ROWS)
    dx = torch.empty_like(x)
    dw_parts = torch.empty(parts, N, device=x.device, dtype=torch.float32)
    db_parts = torch.empty_like(dw_parts)
    BLOCK_N = triton.next_power_of_2(N)
    _layernorm_bwd[(parts,)](
        grad_y, x, weight, mean, rstd, dx, dw_parts, db_parts, M, N, grad_y.stride(0), grad_y.stride(1),
        ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512)),
    )  # fmt: skip
    if not (needs[1] or needs[2]):
        return dx, None, None
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    _layernorm_reduce[(triton.cdiv(N, 64),)](dw_parts, db_parts, dw, db, parts, N, BLOCK_P=32, BLOCK_N=64)
    return dx, dw, db


# --- check ---
SWEEP = ({"M": 5, "N": 64}, {"M": 19, "N": 100, "dtype": "float16"}, {"M": 8, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, b = torch.randn(M, N, generator=g) + 0.3, torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, w, b))


def reference(x, weight, bias, eps=1e-5):
    xf = x.float()
    centred = xf - xf.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight.float() + bias.float()).to(x.dtype)
