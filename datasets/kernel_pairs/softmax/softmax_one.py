"""Softmax with one in the denominator: rows may attend to nothing, and only the log-sum-exp knows of the extra logit.

The one is an implicit logit of zero, which enters maximum and sum but has no column. The gradient keeps its usual form,
p * (dy - sum(p * dy)): the implicit column has no cotangent and adds nothing to the sum. Rows of -inf come out as
zeros, without a guard. Probabilities are rebuilt from x, so that y need not outlive its consumer.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_one",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "multi-row-tile", "row-local", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _softmax_one_fwd(X, Y, Lse, M, N, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)[None, :]
    mask = (m[:, None] < M) & (n < N)
    x = tl.load(X + m[:, None] * x_row + n.to(tl.int64) * x_col, mask=mask, other=-float("inf")).to(tl.float32)
    # Never below the implicit logit, and so never -inf.
    top = tl.maximum(tl.max(x, 1), 0.0)
    lse = top + tl.log(tl.exp(-top) + tl.sum(tl.exp(x - top[:, None]), 1))
    tl.store(Lse + m, lse, mask=m < M)
    tl.store(Y + m[:, None] * N + n, tl.exp(x - lse[:, None]), mask=mask)


def _tile(M, N):
    """Rows and columns of a tile of 2048 elements, or of one longer row."""
    BLOCK = triton.next_power_of_2(N)
    return max(1, min(triton.next_power_of_2(M), 2048 // BLOCK)), BLOCK


def forward(x):
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    ROWS, BLOCK = _tile(M, N)
    _softmax_one_fwd[(triton.cdiv(M, ROWS),)](
        x, y, lse, M, N, *x.stride(), ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 1024))
    )
    return y, (x, lse)


# --- backward ---
@triton.jit
def _softmax_one_bwd(DY, X, Lse, DX, M, N, dy_row, dy_col, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)[None, :]
    mask = (m[:, None] < M) & (n < N)
    wide = n.to(tl.int64)
    x = tl.load(X + m[:, None] * x_row + wide * x_col, mask=mask, other=-float("inf")).to(tl.float32)
    dy = tl.load(DY + m[:, None] * dy_row + wide * dy_col, mask=mask, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(Lse + m, mask=m < M, other=0.0)[:, None])
    dx = p * (dy - tl.sum(p * dy, 1)[:, None])
    tl.store(DX + m[:, None] * N + n, dx, mask=mask)


def backward(saved, grad_y, needs=None):
    x, lse = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(M, N)
    _softmax_one_bwd[(triton.cdiv(M, ROWS),)](
        grad_y, x, lse, dx, M, N, *grad_y.stride(), *x.stride(),
        ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 1024)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 64, "dtype": "float16"}, {"M": 21, "N": 101}, {"M": 9, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 131072, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Rows far above, near and far below the implicit logit.
    level = torch.linspace(3.0, -8.0, M)[:, None]
    return ((level + 2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    logits = torch.nn.functional.pad(x.float(), (0, 1))
    return torch.softmax(logits, -1)[:, :-1].to(x.dtype)
