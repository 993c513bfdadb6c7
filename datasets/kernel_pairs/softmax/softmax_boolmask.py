"""Softmax with a boolean key mask: masked keys count for nothing, rows without any key are zero in both directions.

Rows of one batch share their mask, so that a program takes several of them and loads it once. A row without keys has
the sum zero; dividing it by one instead gives zeros, not NaN. Masked keys are loaded with the others, since a mask of
data would cut wide loads into single elements, and replaced: what stands there, NaN included, reaches neither y nor dx.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_boolmask",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("masking", "multi-row-tile", "row-local", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, H, S, T)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _keyed_softmax_fwd(X, Keep, Y, H, S, T, x_b, x_h, x_s, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1)
    b = head // H
    s = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    t = tl.arange(0, BLOCK)[None, :]
    keep = tl.load(Keep + b * T + t, mask=t < T, other=0) != 0
    inside = (s < S) & (t < T)
    source = X + b.to(tl.int64) * x_b + (head % H).to(tl.int64) * x_h + s.to(tl.int64) * x_s
    x = tl.where(keep, tl.load(source + t, mask=inside, other=0.0).to(tl.float32), -float("inf"))
    top = tl.max(x, 1, keep_dims=True)
    e = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(e, 1, keep_dims=True)
    y = e / tl.where(total == 0, 1.0, total)
    tl.store(Y + (head.to(tl.int64) * S + s) * T + t, y, mask=inside)


def _tile(S, T):
    BLOCK = triton.next_power_of_2(T)
    return max(1, min(triton.next_power_of_2(S), 4096 // BLOCK)), BLOCK


def forward(x, keep):
    x = x if x.stride(3) == 1 else x.contiguous()
    keep = keep.contiguous()
    B, H, S, T = x.shape
    y = torch.empty(B, H, S, T, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(S, T)
    _keyed_softmax_fwd[(triton.cdiv(S, ROWS), B * H)](
        x, keep, y, H, S, T, *x.stride()[:3], ROWS=ROWS, BLOCK=BLOCK, num_warps=8 if ROWS * BLOCK >= 4096 else 4
    )
    return y, (y, keep)


# --- backward ---
@triton.jit
def _keyed_softmax_bwd(DY, Keep, Y, DX, H, S, T, dy_b, dy_h, dy_s, dy_t, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1)
    b = head // H
    s = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    t = tl.arange(0, BLOCK)[None, :]
    keep = tl.load(Keep + b * T + t, mask=t < T, other=0) != 0
    inside = (s < S) & (t < T)
    at = (head.to(tl.int64) * S + s) * T + t
    grad = DY + b.to(tl.int64) * dy_b + (head % H).to(tl.int64) * dy_h + s.to(tl.int64) * dy_s
    # The saved y is zero at masked keys, but zero times NaN is not: dy has to be replaced there.
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + t.to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
    dy = tl.where(keep, dy, 0.0)
    tl.store(DX + at, y * (dy - tl.sum(y * dy, 1, keep_dims=True)), mask=inside)


def backward(saved, grad_y, needs=None):
    y, keep = saved
    B, H, S, T = y.shape
    dx = torch.empty_like(y)
    ROWS, BLOCK = _tile(S, T)
    _keyed_softmax_bwd[(triton.cdiv(S, ROWS), B * H)](
        grad_y, keep, y, dx, H, S, T, *grad_y.stride(),
        ROWS=ROWS, BLOCK=BLOCK, num_warps=8 if ROWS * BLOCK >= 4096 else 4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "S": 16, "T": 64, "dtype": "float16"},
    {"B": 3, "H": 1, "S": 19, "T": 45},
    {"B": 2, "H": 2, "S": 8, "T": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "H": 16, "S": 1024, "T": 1024, "dtype": "bfloat16"},)


def make_args(B, H, S, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(B, H, S, T, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    # Keys are masked in ever longer suffixes; the last batch keeps none.
    kept = torch.linspace(T, 0, B).long() if B > 1 else torch.tensor([T - T // 3])
    return x, (torch.arange(T) < kept[:, None]).to(device)


def reference(x, keep):
    scores = x.float().masked_fill(~keep[:, None, None], -float("inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0).to(x.dtype)
