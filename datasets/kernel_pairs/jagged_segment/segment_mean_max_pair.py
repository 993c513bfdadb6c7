"""Mean and maximum of every segment in one read: two cotangents, either absent, are spread and routed in one write."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "segment_mean_max_pair",
    "family": "jagged_segment",
    "op": "segment_mean_max",
    "schema": 1,
    "techniques": ("varlen", "argmax-routing", "broadcast-adjoint", "optional-cotangent", "strided-cotangent"),
    "saves": ("winner: i32 (S, D)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _mean_max_fwd(X, Offsets, Mean, Max, Winner, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    best = tl.full((BLOCK_R, BLOCK_D), float("-inf"), tl.float32)
    held = tl.full((BLOCK_R, BLOCK_D), 0x7FFFFFFF, tl.int32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (d[None, :] < D)
        x = tl.load(X + r[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        total += x
        better = ok & (x > best)
        best = tl.where(better, x, best)
        held = tl.where(better, (r - begin)[:, None].to(tl.int32), held)
    top = tl.max(best, 0)
    # Of the lanes that reached the maximum the lowest row counts: the first of equals.
    winner = tl.min(tl.where(best == top[None, :], held, 0x7FFFFFFF), 0)
    # The value is taken from the lane that is named, so that value and winner are one also among equals.
    named = (held == winner[None, :]) & (held != 0x7FFFFFFF)
    top = tl.sum(tl.where(named, best, 0.0), 0)
    at = segment * D + d
    length = tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(Mean + at, tl.sum(total, 0) / length, mask=d < D)
    tl.store(Max + at, top, mask=d < D)
    tl.store(Winner + at, winner, mask=d < D)


def forward(x, offsets):
    """x (L, D); segment s is rows offsets[s] to offsets[s + 1], an empty one gives zeros."""
    x = x.contiguous()
    segments, D = offsets.numel() - 1, x.shape[1]
    mean, top = (torch.empty(segments, D, device=x.device, dtype=x.dtype) for _ in range(2))
    # The row within the segment: 32 bits are enough for any length.
    winner = torch.empty(segments, D, device=x.device, dtype=torch.int32)
    BLOCK_D = min(64, triton.next_power_of_2(D))
    _mean_max_fwd[(segments, triton.cdiv(D, BLOCK_D))](
        x, offsets, mean, top, winner, D, BLOCK_R=2048 // BLOCK_D, BLOCK_D=BLOCK_D, num_warps=4
    )
    return (mean, top), (x, offsets, winner)


# --- backward ---
@triton.jit
def _mean_max_bwd(
    DMean, DMax, Offsets, Winner, DX, D, mean_s, mean_d, max_s, max_d,
    HAS_MEAN: tl.constexpr, HAS_MAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # What a segment's rows share is loaded once; then its rows are only written.
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    begin = tl.load(Offsets + segment).to(tl.int64)
    length = (tl.load(Offsets + segment + 1).to(tl.int64) - begin).to(tl.int32)
    spread = tl.zeros((BLOCK_D,), tl.float32)
    routed = tl.zeros((BLOCK_D,), tl.float32)
    winner = tl.full((BLOCK_D,), -1, tl.int32)
    if HAS_MEAN:
        spread = tl.load(DMean + segment * mean_s + d * mean_d, mask=d < D, other=0.0).to(tl.float32)
        spread = spread / tl.maximum(length, 1).to(tl.float32)
    if HAS_MAX:
        routed = tl.load(DMax + segment * max_s + d * max_d, mask=d < D, other=0.0).to(tl.float32)
        winner = tl.load(Winner + segment * D + d, mask=d < D, other=-1)
    for start in range(0, length, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R))[:, None]
        dx = spread[None, :] + tl.where(r == winner[None, :], routed[None, :], 0.0)
        tl.store(DX + (begin + r) * D + d[None, :], dx, mask=(r < length) & (d[None, :] < D))


def backward(saved, grad_mean, grad_max, needs=None):
    x, offsets, winner = saved
    segments, D = winner.shape
    dx = torch.empty_like(x)
    dmean, dmax = (winner if grad is None else grad for grad in (grad_mean, grad_max))
    BLOCK_D = min(128, triton.next_power_of_2(D))
    _mean_max_bwd[(segments, triton.cdiv(D, BLOCK_D))](
        dmean, dmax, offsets, winner, dx, D, *dmean.stride(), *dmax.stride(),
        HAS_MEAN=grad_mean is not None, HAS_MAX=grad_max is not None,
        BLOCK_R=4096 // BLOCK_D, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"S": 3, "L": 192, "D": 64},
    {"S": 6, "L": 403, "D": 21},
    {"S": 4, "L": 60, "D": 140, "dtype": "bfloat16"},
)
BENCH = ({"S": 1024, "L": 262144, "D": 256, "dtype": "bfloat16"},)


def make_args(S, L, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(L, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The second segment is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    return x, torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L]))).to(device)


def reference(x, offsets):
    lengths = offsets.diff()
    own = torch.repeat_interleave(torch.arange(lengths.numel(), device=x.device), lengths, output_size=x.shape[0])
    zeros = torch.zeros(lengths.numel(), x.shape[1], device=x.device)
    mean = zeros.index_add(0, own, x.float()) / lengths.clamp(min=1)[:, None]
    top = zeros.scatter_reduce(0, own[:, None].expand_as(x), x.float(), "amax", include_self=False)
    return mean.to(x.dtype), top.to(x.dtype)
