"""LayerNorm without weight and bias: y is xhat itself, so y and 1/std are all that dx needs, and nothing is reduced.

dx = rstd * (dy - mean(dy) - y * mean(dy * y)). A program owns a tile of whole rows and no two programs share a result.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_nobias_noaffine",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "saved-output", "saved-statistics", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)", "rstd: fp32 (M,)"),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ln_plain_fwd(X, Y, Rstd, M, N, x_m, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    x = tl.load(X + m * x_m + n, mask=ok, other=0.0).to(tl.float32)
    d = tl.where(ok, x - tl.sum(x, 1, keep_dims=True) / N, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 1, keep_dims=True) / N + eps)
    tl.store(Rstd + m, rstd, mask=m < M)
    tl.store(Y + m * N + n, d * rstd, mask=ok)


def _tile(N):
    # 16 elements for each thread: short rows share a program, long ones get more warps.
    block = triton.next_power_of_2(N)
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "BLOCK_N": block, "num_warps": max(4, min(16, rows * block // 512))}


def forward(x, eps=1e-5):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    rstd = torch.empty(M, device=x.device, dtype=torch.float32)
    tile = _tile(N)
    _ln_plain_fwd[(triton.cdiv(M, tile["ROWS"]),)](x, y, rstd, M, N, x.stride(0), eps, **tile)
    return y, (y, rstd)


# --- backward ---
@triton.jit
def _ln_plain_bwd(DY, Y, Rstd, DX, M, N, dy_m, dy_n, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    y = tl.load(Y + m * N + n, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(DY + m * dy_m + n * dy_n, mask=ok, other=0.0).to(tl.float32)
    rstd = tl.load(Rstd + m, mask=m < M, other=0.0)
    # Project dy off the constant vector and off y, the two directions in which the row cannot move.
    along_one = tl.sum(dy, 1, keep_dims=True) / N
    along_y = tl.sum(dy * y, 1, keep_dims=True) / N
    tl.store(DX + m * N + n, rstd * (dy - along_one - y * along_y), mask=ok)


def backward(saved, grad_y, needs=None):
    y, rstd = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    tile = _tile(N)
    _ln_plain_bwd[(triton.cdiv(M, tile["ROWS"]),)](
        grad_y, y, rstd, dx, M, N, grad_y.stride(0), grad_y.stride(1), **tile
    )
    return dx


# --- check ---
SWEEP = ({"M": 40, "N": 64}, {"M": 37, "N": 87, "dtype": "float16"}, {"M": 20, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 32768, "N": 1024, "dtype": "bfloat16"}, {"M": 8192, "N": 8192, "dtype": "bfloat16"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) * 2.0 + 1.0).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x, eps=1e-5):
    return torch.nn.functional.layer_norm(x.float(), (x.shape[1],), eps=eps).to(x.dtype)
