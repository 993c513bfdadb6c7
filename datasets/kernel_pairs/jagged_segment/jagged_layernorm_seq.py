"""Normalisation over a whole sequence, all rows and channels together, with an affine map per channel.

The owner of a sequence reads it twice in the backward: once for the two sums that dx needs and for its share of dweight
and dbias, which ride along column by column, and once, out of L2 for all but the longest, to write dx. The last tile of
the first read stays in registers for the second.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_layernorm_seq",
    "family": "jagged_segment",
    "op": "sequence_norm",
    "schema": 1,
    "techniques": ("varlen", "two-pass", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("stats: fp32 (S, 2)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sequence_norm_fwd(X, W, B, Offsets, Y, Stats, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    count = tl.maximum((end - begin) * D, 1).to(tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        total += tl.load(X + r * D + d, mask=(r < end) & (d < D), other=0.0).to(tl.float32)
    mean = tl.sum(total) / count
    square = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        ok = (r < end) & (d < D)
        off = tl.where(ok, tl.load(X + r * D + d, mask=ok, other=0.0).to(tl.float32) - mean, 0.0)
        square += off * off
    rstd = tl.rsqrt(tl.sum(square) / count + eps)
    tl.store(Stats + 2 * sequence, mean)
    tl.store(Stats + 2 * sequence + 1, rstd)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32) * rstd
    b = tl.load(B + d, mask=d < D, other=0.0).to(tl.float32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        ok = (r < end) & (d < D)
        x = tl.load(X + r * D + d, mask=ok, other=0.0).to(tl.float32)
        tl.store(Y + r * D + d, (x - mean) * w + b, mask=ok)


def _tile(D):
    BLOCK_D = triton.next_power_of_2(D)
    return max(1, 4096 // BLOCK_D), BLOCK_D


def forward(x, weight, bias, offsets, eps=1e-5):
    """x (L, D), weight and bias (D), D up to a few thousand; sequence s is rows offsets[s] to offsets[s + 1]."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    sequences, D = offsets.numel() - 1, x.shape[1]
    y = torch.empty_like(x)
    stats = torch.empty(sequences, 2, device=x.device, dtype=torch.float32)
    BLOCK_R, BLOCK_D = _tile(D)
    _sequence_norm_fwd[(sequences,)](
        x, weight, bias, offsets, y, stats, D, eps, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=8
    )
    return y, (x, weight, offsets, stats)


# --- backward ---
@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _sequence_norm_bwd(
    DY, X, W, Offsets, Stats, DX, Parts, D, dy_r, dy_d, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    count = tl.maximum((end - begin) * D, 1).to(tl.float32)
    mean = tl.load(Stats + 2 * sequence)
    rstd = tl.load(Stats + 2 * sequence + 1)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # The last tile is asked for first: it waits in registers, the first walk hides its way.
    tail = tl.maximum(begin, end - BLOCK_R)
    r_end = tail + tl.arange(0, BLOCK_R)[:, None]
    inside = (r_end < end) & (d < D)
    dy_last = tl.load(DY + r_end * dy_r + d.to(tl.int64) * dy_d, mask=inside, other=0.0)
    x_last = tl.load(X + r_end * D + d, mask=inside, other=0.0)
    # The longest sequence is the last to end, and waits for memory alone: copies run four tiles ahead.
    for start in tl.range(begin, tail, BLOCK_R, num_stages=5):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        ok = (r < tail) & (d < D)
        dy = tl.load(DY + r * dy_r + d.to(tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(X + r * D + d, mask=ok, other=0.0).to(tl.float32)
        dweight += dy * (x - mean)
        dbias += dy
    dy_end = dy_last.to(tl.float32)
    away = x_last.to(tl.float32) - mean
    dw, db = tl.reduce((dweight + dy_end * away, dbias + dy_end), 0, _add_both)
    dw *= rstd
    # The sums over everything are those of the columns, weighted: sum(w dy) = w . dbias, sum(w dy xhat) = w . dweight.
    along_one, along_xhat = tl.reduce((w * db[None, :], w * dw[None, :]), 1, _add_both)
    # What does not depend on the element is multiplied once: dx = gain dy - shift - slope (x - mean).
    gain = w * rstd
    shift = along_one[:, None] / count * rstd
    slope = along_xhat[:, None] / count * rstd * rstd
    parts = Parts + sequence * 2 * D + d
    tl.store(parts, dw[None, :], mask=d < D)
    tl.store(parts + D, db[None, :], mask=d < D)
    tl.store(DX + r_end * D + d, gain * dy_end - shift - slope * away, mask=inside)
    # Back from the end, which is what L2 still holds.
    last = begin + (tl.cdiv(tail - begin, BLOCK_R) - 1) * BLOCK_R
    for back in tl.range(0, tail - begin, BLOCK_R, num_stages=5):
        r = last - back + tl.arange(0, BLOCK_R)[:, None]
        ok = (r < tail) & (d < D)
        dy = tl.load(DY + r * dy_r + d.to(tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(X + r * D + d, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + r * D + d, gain * dy - shift - slope * (x - mean), mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, offsets, stats = saved
    sequences, D = offsets.numel() - 1, x.shape[1]
    dx = torch.empty_like(x)
    parts = torch.empty(sequences, 2, D, device=x.device, dtype=torch.float32)
    # Tiles of 4096 elements, 16 for each thread: two sequences on a processor, whose rows fit L2 between the reads.
    BLOCK_R, BLOCK_D = _tile(D)
    _sequence_norm_bwd[(sequences,)](
        grad_y, x, weight, offsets, stats, dx, parts, D, *grad_y.stride(), BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=8
    )
    dweight, dbias = parts.sum(0).to(weight.dtype).unbind()
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"S": 3, "L": 192, "D": 64},
    {"S": 6, "L": 403, "D": 21},
    {"S": 4, "L": 60, "D": 300, "dtype": "bfloat16"},
)
BENCH = ({"S": 2048, "L": 524288, "D": 256, "dtype": "bfloat16"},)


def make_args(S, L, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(L, D, generator=g) + 1.0, torch.randn(D, generator=g), torch.randn(D, generator=g))
    # The second sequence is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), offsets.to(device)


def reference(x, weight, bias, offsets, eps=1e-5):
    lengths = offsets.diff()
    own = torch.repeat_interleave(torch.arange(lengths.numel(), device=x.device), lengths, output_size=x.shape[0])
    count = (lengths * x.shape[1]).clamp(min=1)
    zeros = torch.zeros(lengths.numel(), device=x.device)
    off = x.float() - (zeros.index_add(0, own, x.float().sum(1)) / count)[own, None]
    rstd = torch.rsqrt(zeros.index_add(0, own, off.square().sum(1)) / count + eps)
    return (off * rstd[own, None] * weight.float() + bias.float()).to(x.dtype)
