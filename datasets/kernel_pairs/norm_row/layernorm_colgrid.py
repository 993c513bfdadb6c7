"""LayerNorm with a transposed second launch: dx by rows, then dweight and dbias by columns, without any partial sums.

A program of the second launch owns a narrow column tile and walks down all rows, so each sum is complete in one place:
no buffer, no atomics, and a fixed order of addition. The price is a second read of x and dy, which is why this suits
wide rows, where there are column tiles enough to fill the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_colgrid",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("owner-grid", "column-owner", "row-local", "saved-statistics", "strided-cotangent"),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ln_pair_fwd(X, W, B, Y, Mean, Rstd, M, N, eps, BLOCK_N: tl.constexpr):
    # Two rows for each program: weight and bias are fetched once for both.
    m = tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 2)
    n = tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(Mean + m, mean, mask=m < M)
    tl.store(Rstd + m, rstd, mask=m < M)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + at, x * rstd[:, None] * w + b, mask=inside)


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK_N = triton.next_power_of_2(N)
    _ln_pair_fwd[(triton.cdiv(M, 2),)](
        x, weight, bias, y, mean, rstd, M, N, eps, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 256))
    )
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _ln_rows_dx(DY, X, W, Mean, Rstd, DX, N, dy_m, dy_n, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    x = tl.load(X + m * N + n, mask=n < N, other=0.0).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    dxhat = tl.load(DY + m * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32) * w
    rstd = tl.load(Rstd + m)
    # dxhat is zero past the row, so xhat needs no mask for the sums.
    xhat = (x - tl.load(Mean + m)) * rstd
    c1 = tl.sum(dxhat * xhat, 0) / N
    c2 = tl.sum(dxhat, 0) / N
    tl.store(DX + m * N + n, rstd * (dxhat - c2 - xhat * c1), mask=n < N)


@triton.jit
def _ln_columns_dwdb(
    DY, X, Mean, Rstd, DW, DB, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (m < M)[:, None] & (n < N)[None, :]
        x = tl.load(X + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        dy_at = m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(DY + dy_at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(Mean + m, mask=m < M, other=0.0)
        rstd = tl.load(Rstd + m, mask=m < M, other=0.0)
        dw += dy * (x - mean[:, None]) * rstd[:, None]
        db += dy
    tl.store(DW + n, tl.sum(dw, 0), mask=n < N)
    tl.store(DB + n, tl.sum(db, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    M, N = x.shape
    need_x, need_w, need_b = needs or (True, True, True)
    dx = dweight = dbias = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_N = triton.next_power_of_2(N)
        _ln_rows_dx[(M,)](
            grad_y, x, weight, mean, rstd, dx, N, grad_y.stride(0), grad_y.stride(1),
            BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512)),
        )  # fmt: skip
    if need_w or need_b:
        dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
        # 64 bytes of a row for each tile: two full sectors, and more than a hundred programs from 4096 columns on.
        tile = 64 // x.element_size()
        _ln_columns_dwdb[(triton.cdiv(N, tile),)](
            grad_y, x, mean, rstd, dweight, dbias, M, N, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=8192 // tile, BLOCK_N=tile, num_warps=8,
        )  # fmt: skip
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 140, "N": 64}, {"M": 19, "N": 77, "dtype": "float16"}, {"M": 33, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) * 0.7 - 0.2
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
