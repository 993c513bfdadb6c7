"""Log-softmax over short rows, several rows in one tile: dx = dy - exp(y) * sum(dy), read off the saved output."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "log_softmax",
    "family": "softmax",
    "op": "log_softmax",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _log_softmax_fwd(X, Y, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    inside = (r < M) & (c < N)
    # Columns beyond N must not count; rows beyond M only must not be NaN.
    x = tl.load(X + r * N + c, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(c < N, x, -float("inf"))
    shifted = x - tl.max(x, 1)[:, None]
    y = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    tl.store(Y + r * N + c, y, mask=inside)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(N)
    ROWS = max(1, 1024 // BLOCK)
    _log_softmax_fwd[(triton.cdiv(M, ROWS),)](
        x, y, M, N, ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 512))
    )
    return y, (y,)


# --- backward ---
@triton.jit
def _log_softmax_bwd(DY, Y, DX, M, N, stride_m, stride_n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    inside = (r < M) & (c < N)
    dy = tl.load(DY + r * stride_m + c * stride_n, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Y + r * N + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + r * N + c, dy - tl.exp(y) * tl.sum(dy, 1)[:, None], mask=inside)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    BLOCK = triton.next_power_of_2(N)
    ROWS = max(1, 1024 // BLOCK)
    _log_softmax_bwd[(triton.cdiv(M, ROWS),)](
        grad_y, y, dx, M, N, grad_y.stride(0), grad_y.stride(1),
        ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 512)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 40, "N": 32}, {"M": 21, "N": 50, "dtype": "float16"}, {"M": 9, "N": 64, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 1024, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.log_softmax(x.float(), -1).to(x.dtype)
