"""Mean over the kept tokens of each sequence: the saved count scales dy, padded tokens get zeros and are never read.

y[b] = sum over kept t of x[b, t] / max(count[b], 1). The forward's program owns a channel tile of one sequence and
walks the tokens. The backward has nothing to add: programs own tiles (token, channel) of dx, load the scaled row of dy
once, and need of the input neither values nor, beside the mask, anything else.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mean_pool_masked_seq",
    "family": "pool_vision",
    "op": "masked_mean_pool",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "masking", "saved-statistics", "strided-cotangent"),
    "saves": ("count: int32 (B,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _masked_mean_fwd(X, Keep, Y, Count, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    kept = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        keep = tl.load(Keep + b * T + t, mask=t < T, other=0) != 0
        # The mask guards the load itself: whatever stands in padded tokens, infinities too, stays out.
        at = (b * T + t[:, None]) * D + d[None, :]
        total += tl.load(X + at, mask=keep[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
        kept += keep.to(tl.int32)
    count = tl.sum(kept, 0)
    tl.store(Y + b * D + d, tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32), mask=d < D)
    tl.store(Count + b, count, mask=tl.program_id(1) == 0)


def forward(x, keep):
    x, keep = x.contiguous(), keep.contiguous()
    B, T, D = x.shape
    y = torch.empty(B, D, device=x.device, dtype=x.dtype)
    count = torch.empty(B, device=x.device, dtype=torch.int32)
    BLOCK_D = min(64, triton.next_power_of_2(D))
    _masked_mean_fwd[(B, triton.cdiv(D, BLOCK_D))](x, keep, y, count, T, D, BLOCK_T=32, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (keep, count)


# --- backward ---
@triton.jit
def _masked_mean_bwd(DY, Keep, Count, DX, T, D, dy_b, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.maximum(tl.load(Count + b), 1).to(tl.float32)
    share = tl.load(DY + b * dy_b + d.to(tl.int64) * dy_d, mask=d < D, other=0.0).to(tl.float32) / count
    keep = tl.load(Keep + b * T + t, mask=t < T, other=0) != 0
    dx = tl.where(keep[:, None], share[None, :], 0.0)
    tl.store(DX + (b * T + t[:, None]) * D + d[None, :], dx, mask=(t[:, None] < T) & (d[None, :] < D))


def backward(saved, grad_y, needs=None):
    keep, count = saved
    (B, T), D = keep.shape, grad_y.shape[1]
    dx = torch.empty(B, T, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_T = 16
    _masked_mean_bwd[(B, triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        grad_y, keep, count, dx, T, D, *grad_y.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 3, "T": 32, "D": 64},
    {"B": 2, "T": 45, "D": 77},
    {"B": 2, "T": 20, "D": 16, "dtype": "bfloat16"},
    {"B": 4, "T": 2, "D": 24, "dtype": "float16"},
)
BENCH = ({"B": 128, "T": 512, "D": 1024, "dtype": "bfloat16"},)


def make_args(B, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Padding on the right and holes in between; the last sequence keeps nothing.
    length = torch.randint(1, T + 1, (B, 1), generator=g)
    length[-1] = 0
    keep = (torch.arange(T) < length) & (torch.rand(B, T, generator=g) < 0.9)
    return x, keep.to(device)


def reference(x, keep):
    total = x.float().masked_fill(~keep[:, :, None], 0.0).sum(1)
    return (total / keep.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
