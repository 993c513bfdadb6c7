"""Log-sum-exp of rows: the gradient is the row's softmax, rebuilt from x and the output, times one cotangent per row.

The output is all the statistic that the backward needs, so that its programs need no reduction and no whole row: the
grid covers elements in tiles that share the few cotangents and sums of their rows. The forward walks long rows once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "logsumexp_rows",
    "family": "softmax",
    "op": "logsumexp",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "saved-output", "recompute", "strided-cotangent"),
    "saves": ("y: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _logsumexp_fwd(X, Y, N, x_row, x_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + lane).to(tl.int64)
        x = tl.load(X + row * x_row + c * x_col, mask=c < N, other=-float("inf")).to(tl.float32)
        # A lane rescales its own sum; lanes meet once, after the walk.
        higher = tl.maximum(top, x)
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
        top = higher
    peak = tl.max(top, 0)
    anchor = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(Y + row, anchor + tl.log(tl.sum(total * tl.exp(top - anchor), 0)))


def forward(x):
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = max(32, min(4096, triton.next_power_of_2(N) // 2))
    _logsumexp_fwd[(M,)](x, y, N, *x.stride(), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)))
    return y, (x, y)


# --- backward ---
@triton.jit
def _logsumexp_bwd(DY, X, Y, DX, M, N, dy_row, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m[:, None] < M) & (n < N)
    dy = tl.load(DY + m * dy_row, mask=m < M, other=0.0)[:, None]
    y = tl.load(Y + m, mask=m < M, other=0.0)[:, None]
    x = tl.load(X + m[:, None] * x_row + n.to(tl.int64) * x_col, mask=mask, other=-float("inf")).to(tl.float32)
    # A row of -inf has the sum -inf; its softmax is taken as zero.
    p = tl.exp(x - tl.where(y == -float("inf"), 0.0, y))
    tl.store(DX + m[:, None] * N + n, dy * p, mask=mask)


def backward(saved, grad_y, needs=None):
    x, y = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = max(32, min(1024, triton.next_power_of_2(N)))
    ROWS = 2048 // BLOCK
    _logsumexp_bwd[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK))](
        grad_y, x, y, dx, M, N, grad_y.stride(0), *x.stride(), ROWS=ROWS, BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 8, "N": 64, "dtype": "float16"},
    {"M": 7, "N": 301},
    {"M": 5, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 16384, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((3 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.logsumexp(x.float(), -1)
