"""Softmax of few, very long rows: every row is cut over many programs, and its two sums meet in a launch of their own.

Forward and backward have the same three launches: a partial per (row, chunk), one program per row that folds the row's
partials, and the elementwise end. The fold spares each program of the last launch from reading all partials of its row.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_splitrow",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("two-stage-partials", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _chunk_stats(X, Top, Total, N, x_row, chunks, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    c = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + c, mask=c < N, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    # A chunk that is masked out entirely has no maximum to subtract; its sum is an exact zero.
    anchor = tl.where(top == -float("inf"), 0.0, top)
    tl.store(Top + row * chunks + chunk, top)
    tl.store(Total + row * chunks + chunk, tl.sum(tl.exp(x - anchor), 0))


@triton.jit
def _fold_stats(Top, Total, Lse, chunks, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_C)
    top = tl.load(Top + row * chunks + i, mask=i < chunks, other=-float("inf"))
    total = tl.load(Total + row * chunks + i, mask=i < chunks, other=0.0)
    peak = tl.max(top, 0)
    tl.store(Lse + row, peak + tl.log(tl.sum(total * tl.exp(top - peak), 0)))


@triton.jit
def _normalise(X, Lse, Y, N, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + c, mask=c < N, other=-float("inf")).to(tl.float32)
    tl.store(Y + row * N + c, tl.exp(x - tl.load(Lse + row)), mask=c < N)


def _chunking(N):
    """Chunk length, and how many of them make up a row."""
    BLOCK = max(32, min(8192, triton.next_power_of_2(N) // 4))
    return BLOCK, triton.cdiv(N, BLOCK)


def forward(x):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    BLOCK, chunks = _chunking(N)
    stats = torch.empty(2, M, chunks, device=x.device, dtype=torch.float32)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    warps = max(1, BLOCK // 1024)
    _chunk_stats[(chunks, M)](x, stats[0], stats[1], N, x.stride(0), chunks, BLOCK=BLOCK, num_warps=warps)
    _fold_stats[(M,)](stats[0], stats[1], lse, chunks, BLOCK_C=triton.next_power_of_2(chunks))
    _normalise[(chunks, M)](x, lse, y, N, x.stride(0), BLOCK=BLOCK, num_warps=warps)
    return y, (y,)


# --- backward ---
@triton.jit
def _chunk_dot(DY, Y, Parts, N, dy_row, dy_col, chunks, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    c = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(Y + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
    tl.store(Parts + row * chunks + chunk, tl.sum(y * dy, 0))


@triton.jit
def _fold_dot(Parts, Mean, chunks, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_C)
    tl.store(Mean + row, tl.sum(tl.load(Parts + row * chunks + i, mask=i < chunks, other=0.0), 0))


@triton.jit
def _split_dx(DY, Y, Mean, DX, N, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    # Last chunk first: it is what the dot products read most recently.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    c = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(Y + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
    tl.store(DX + row * N + c, y * (dy - tl.load(Mean + row)), mask=c < N)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    BLOCK, chunks = _chunking(N)
    parts = torch.empty(M, chunks, device=y.device, dtype=torch.float32)
    mean = torch.empty(M, device=y.device, dtype=torch.float32)
    dx = torch.empty_like(y)
    strides, warps = grad_y.stride(), max(1, BLOCK // 1024)
    _chunk_dot[(chunks, M)](grad_y, y, parts, N, *strides, chunks, BLOCK=BLOCK, num_warps=warps)
    _fold_dot[(M,)](parts, mean, chunks, BLOCK_C=triton.next_power_of_2(chunks))
    _split_dx[(chunks, M)](grad_y, y, mean, dx, N, *strides, BLOCK=BLOCK, num_warps=warps)
    return dx


# --- check ---
SWEEP = ({"M": 2, "N": 256, "dtype": "float16"}, {"M": 3, "N": 413}, {"M": 1, "N": 512, "dtype": "bfloat16"})
BENCH = ({"M": 8, "N": 4194304, "dtype": "bfloat16"}, {"M": 3, "N": 5000000, "dtype": "float32"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.softmax(x.float(), -1).to(x.dtype)
