"""Log-sum-exp over the rows of each segment, column by column: the softmax weights are rebuilt from the saved result.

dx[r] = exp(x[r] - y[s]) dy[s]. Nothing is summed on the way back, so that the rows of a long segment are dealt to as
many programs as the average length asks for; its two vectors y and dy are loaded once by each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "segment_logsumexp",
    "family": "jagged_segment",
    "op": "segment_logsumexp",
    "schema": 1,
    "techniques": ("varlen", "saved-lse", "broadcast-adjoint", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (S, C)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _segment_lse(X, Offsets, Y, LSE, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    # Each lane runs its own online sum; lanes meet at the end.
    top = tl.full((BLOCK_R, BLOCK_C), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (c[None, :] < C)
        x = tl.load(X + r[:, None] * C + c[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    high = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - high[None, :]), 0)
    # A segment without rows sums to zero: its logarithm is minus infinity.
    lse = tl.where(end > begin, high + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(Y + segment * C + c, lse, mask=c < C)
    tl.store(LSE + segment * C + c, lse, mask=c < C)


def forward(x, offsets):
    """x (L, C); segment s is rows offsets[s] to offsets[s + 1]."""
    x = x.contiguous()
    segments, C = offsets.numel() - 1, x.shape[1]
    y = torch.empty(segments, C, device=x.device, dtype=x.dtype)
    lse = torch.empty(segments, C, device=x.device, dtype=torch.float32)
    BLOCK_C = min(64, triton.next_power_of_2(C))
    _segment_lse[(segments, triton.cdiv(C, BLOCK_C))](
        x, offsets, y, lse, C, BLOCK_R=2048 // BLOCK_C, BLOCK_C=BLOCK_C, num_warps=4
    )
    return y, (x, offsets, lse)


# --- backward ---
@triton.jit
def _segment_lse_bwd(DY, X, Offsets, LSE, DX, C, dy_s, dy_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    lse = tl.load(LSE + segment * C + c, mask=c < C, other=0.0)[None, :]
    dy = tl.load(DY + segment * dy_s + c.to(tl.int64) * dy_c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(begin + tl.program_id(1) * BLOCK_R, end, tl.num_programs(1) * BLOCK_R, num_stages=4):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (c[None, :] < C)
        x = tl.load(X + r[:, None] * C + c[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        tl.store(DX + r[:, None] * C + c[None, :], tl.exp(x - lse) * dy, mask=ok)


def backward(saved, grad_y, needs=None):
    x, offsets, lse = saved
    (L, C), segments = x.shape, offsets.numel() - 1
    dx = torch.empty_like(x)
    BLOCK_C = min(256, triton.next_power_of_2(C))
    BLOCK_R = 1024 // BLOCK_C
    # Four tiles for a program of a segment of average length.
    share = max(1, triton.cdiv(L, 4 * segments * BLOCK_R))
    _segment_lse_bwd[(segments, share, triton.cdiv(C, BLOCK_C))](
        grad_y, x, offsets, lse, dx, C, *grad_y.stride(), BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"S": 3, "L": 192, "C": 64},
    {"S": 6, "L": 403, "C": 21},
    {"S": 4, "L": 60, "C": 140, "dtype": "bfloat16"},
)
BENCH = ({"S": 1024, "L": 262144, "C": 256, "dtype": "bfloat16"},)


def make_args(S, L, C, dtype="float32", device="cpu", seed=0):
    if S > L:
        raise ValueError("every segment has a row")
    g = torch.Generator().manual_seed(seed)
    x = (3.0 * torch.randn(L, C, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    # Distinct cuts: no segment is empty, so that results and their differences are finite.
    cuts = (torch.randperm(L - 1, generator=g)[: S - 1] + 1).sort().values
    return x, torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L]))).to(device)


def reference(x, offsets):
    segments = offsets.numel() - 1
    own = torch.repeat_interleave(torch.arange(segments, device=x.device), offsets.diff(), output_size=x.shape[0])
    zeros = torch.zeros(segments, x.shape[1], device=x.device)
    top = zeros.scatter_reduce(0, own[:, None].expand_as(x), x.detach().float(), "amax", include_self=False)
    return (top + zeros.index_add(0, own, (x.float() - top[own]).exp()).log()).to(x.dtype)
