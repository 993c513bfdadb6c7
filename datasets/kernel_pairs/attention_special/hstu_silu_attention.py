"""HSTU's attention on jagged sequences: silu of scores plus a bias by time distance, no softmax, causal.

    w_ij = silu(scale q_i . k_j + bias[bucket(time_i - time_j)]) / N,    o_i = sum over j <= i of w_ij v_j

Sequences lie end to end, with offsets; a program takes one tile of one sequence and leaves at once beyond its end.
The derivative of silu is s (1 + x (1 - s)), pointwise: there is no delta and no statistic. Buckets are powers of two
of the distance; the dq kernel adds its tile's share of their gradient into one row of partial sums, for the few
buckets that a tile meets.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "hstu_silu_attention",
    "family": "attention_special",
    "op": "silu_attention",
    "schema": 1,
    "techniques": (
        "varlen", "loop-swap", "owner-grid", "causal-bounds", "recompute", "two-stage-partials", "strided-cotangent",
    ),
    "saves": (),
    "grads": ("q", "k", "v", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}  # fmt: skip


# --- forward ---
@triton.jit
def _jagged_rows(X, row, end, s_row, s_col, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < end) & (d[None, :] < D)
    return tl.load(X + row[:, None].to(tl.int64) * s_row + d[None, :] * s_col, mask=inside, other=0.0)


@triton.jit
def _bucket(times_i, times_j, BUCKETS: tl.constexpr):
    # floor(log2(1 + distance)) by the leading zeros, as rounding of a logarithm would move borders; the last is open.
    away = tl.minimum(tl.abs(times_i - times_j) + 1, 1 << (BUCKETS - 1))
    return 31 - libdevice.clz(away)


@triton.jit
def _silu_fwd(
    Q, K, V, Bias, Times, Offsets, Out, H, D, scale, weight, BUCKETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin, end = tl.load(Offsets + sequence), tl.load(Offsets + sequence + 1)
    first = begin + tl.program_id(0) * BLOCK_M
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _jagged_rows(Q + head * D, m, end, H * D, 1, D, BLOCK_D)
    times_m = tl.load(Times + m, mask=m < end, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, tl.minimum(first + BLOCK_M, end), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _jagged_rows(K + head * D, n, end, H * D, 1, D, BLOCK_D)
        v = _jagged_rows(V + head * D, n, end, H * D, 1, D, BLOCK_D)
        times_n = tl.load(Times + n, mask=n < end, other=0)
        bias = tl.load(Bias + _bucket(times_m[:, None], times_n[None, :], BUCKETS)).to(tl.float32)
        x = tl.dot(q, tl.trans(k)) * scale + bias
        w = tl.where(m[:, None] >= n[None, :], x * tl.sigmoid(x), 0.0)
        acc = tl.dot(w.to(v.dtype), v, acc)
    at = (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    tl.store(Out + at, acc * weight, mask=(m[:, None] < end) & (d[None, :] < D))


def _blocks(longest):
    """(owned rows, rows of the other side, warps)."""
    if longest <= 256:
        return 32, 16, 4
    return (64, 32, 4)


def forward(q, k, v, bias, times, offsets, longest):
    if bias.numel() > 31:
        raise ValueError("distances are 32-bit integers: at most 31 buckets")
    q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous()
    _, H, D = q.shape
    out = torch.empty_like(q)
    own, other, warps = _blocks(longest)
    _silu_fwd[(triton.cdiv(longest, own), (offsets.numel() - 1) * H)](
        q, k, v, bias, times, offsets, out, H, D, D**-0.5, 1.0 / longest, BUCKETS=bias.numel(),
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return out, (q, k, v, bias, times, offsets, longest)


# --- backward ---
@triton.jit
def _silu_slope(x, later, earlier):
    # Derivative of silu where the key is seen.
    s = tl.sigmoid(x)
    return tl.where(later >= earlier, s * (1.0 + x * (1.0 - s)), 0.0)


@triton.jit
def _silu_dq(
    Q, K, V, Bias, Times, Offsets, DO, DQ, Parts, H, D, do_t, do_h, do_d, scale, weight, BUCKETS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin, end = tl.load(Offsets + sequence), tl.load(Offsets + sequence + 1)
    first = begin + tl.program_id(0) * BLOCK_M
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _jagged_rows(Q + head * D, m, end, H * D, 1, D, BLOCK_D)
    do = _jagged_rows(DO + head.to(tl.int64) * do_h, m, end, do_t, do_d, D, BLOCK_D)
    times_m = tl.load(Times + tl.minimum(m, end - 1))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lanes = tl.arange(0, BLOCK_B)
    dbias = tl.zeros((BLOCK_B,), tl.float32)
    for start in range(begin, tl.minimum(first + BLOCK_M, end), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _jagged_rows(K + head * D, n, end, H * D, 1, D, BLOCK_D)
        v = _jagged_rows(V + head * D, n, end, H * D, 1, D, BLOCK_D)
        # Keys behind the end take the time of the tile's first, so that they open no bucket of their own.
        times_n = tl.load(Times + tl.minimum(n, end - 1))
        bucket = _bucket(times_m[:, None], times_n[None, :], BUCKETS)
        x = tl.dot(q, tl.trans(k)) * scale + tl.load(Bias + bucket).to(tl.float32)
        dx = tl.dot(do, tl.trans(v)) * _silu_slope(x, m[:, None], n[None, :])
        dq = tl.dot(dx.to(k.dtype), k, dq)
        # Times are in order, so a tile meets few buckets; one that the mask empties adds zeros.
        for b in range(tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0) + 1):
            dbias += tl.where(lanes == b, tl.sum(tl.sum(tl.where(bucket == b, dx, 0.0), 1), 0), 0.0)
    at = (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    tl.store(DQ + at, dq * (scale * weight), mask=(m[:, None] < end) & (d[None, :] < D))
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(Parts + part * BUCKETS + lanes, dbias * weight, mask=lanes < BUCKETS)


@triton.jit
def _silu_dkdv(
    Q, K, V, Bias, Times, Offsets, DO, DK, DV, H, D, do_t, do_h, do_d, scale, weight, BUCKETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin, end = tl.load(Offsets + sequence), tl.load(Offsets + sequence + 1)
    first = begin + tl.program_id(0) * BLOCK_N
    if first >= end:
        return
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = _jagged_rows(K + head * D, n, end, H * D, 1, D, BLOCK_D)
    v = _jagged_rows(V + head * D, n, end, H * D, 1, D, BLOCK_D)
    times_n = tl.load(Times + n, mask=n < end, other=0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        # Rows past the end have do = 0, which takes them out of both sums.
        q = _jagged_rows(Q + head * D, m, end, H * D, 1, D, BLOCK_D)
        do = _jagged_rows(DO + head.to(tl.int64) * do_h, m, end, do_t, do_d, D, BLOCK_D)
        times_m = tl.load(Times + m, mask=m < end, other=0)
        bias = tl.load(Bias + _bucket(times_m[None, :], times_n[:, None], BUCKETS)).to(tl.float32)
        x = tl.dot(k, tl.trans(q)) * scale + bias
        w = tl.where(m[None, :] >= n[:, None], x * tl.sigmoid(x), 0.0)
        dv = tl.dot(w.to(do.dtype), do, dv)
        dx = tl.dot(v, tl.trans(do)) * _silu_slope(x, m[None, :], n[:, None])
        dk = tl.dot(dx.to(q.dtype), q, dk)
    at = (n[:, None].to(tl.int64) * H + head) * D + d[None, :]
    inside = (n[:, None] < end) & (d[None, :] < D)
    tl.store(DK + at, dk * (scale * weight), mask=inside)
    tl.store(DV + at, dv * weight, mask=inside)


def backward(saved, grad_out, needs=None):
    q, k, v, bias, times, offsets, longest = saved
    _, need_k, need_v, _ = needs or (True,) * 4
    _, H, D = q.shape
    own, other, warps = _blocks(longest)
    grid = (triton.cdiv(longest, own), (offsets.numel() - 1) * H)
    sizes = (H, D, *grad_out.stride(), D**-0.5, 1.0 / longest)
    tiles = {"BUCKETS": bias.numel(), "BLOCK_D": max(16, triton.next_power_of_2(D)), "num_warps": warps}
    dq = torch.empty_like(q)
    # Tiles beyond the end of their sequence write nothing.
    parts = torch.zeros(grid[1], grid[0], bias.numel(), device=q.device, dtype=torch.float32)
    _silu_dq[grid](
        q, k, v, bias, times, offsets, grad_out, dq, parts, *sizes, BLOCK_M=own, BLOCK_N=other,
        BLOCK_B=triton.next_power_of_2(bias.numel()), **tiles,
    )  # fmt: skip
    dbias = parts.sum((0, 1)).to(bias.dtype)
    if not (need_k or need_v):
        return dq, None, None, dbias
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _silu_dkdv[grid](q, k, v, bias, times, offsets, grad_out, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, **tiles)
    return dq, dk, dv, dbias


# --- check ---
SWEEP = (
    {"lengths": (40, 17), "H": 2, "D": 32, "buckets": 6},
    {"lengths": (1, 33, 0, 20), "H": 1, "D": 20, "buckets": 5},
    {"lengths": (29, 16), "H": 2, "D": 16, "buckets": 4, "dtype": "bfloat16"},
)
BENCH = (
    {
        "lengths": (1024, 300, 777, 1900, 64, 512, 968, 2048), "H": 8, "D": 64, "buckets": 12, "dtype": "bfloat16",
    },
)  # fmt: skip


def make_args(lengths, H, D, buckets, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(total, H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    bias = torch.randn(buckets, generator=g).to(device)
    # Events in order of time, with gaps of 0 to 9.
    times = torch.randint(0, 10, (total,), generator=g).cumsum(0).to(device, torch.int32)
    offsets = torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)
    return q, k, v, bias, times, offsets, max(lengths)


def reference(q, k, v, bias, times, offsets, longest):
    # Sequence by sequence. The table is a product with one-hot rows: the adjoint of an index would queue at few places.
    number = torch.arange(bias.numel(), device=q.device)
    lengths = offsets.diff().tolist()
    outs = []
    for qs, ks, vs, when in zip(*(x.split(lengths) for x in (q, k, v, times)), strict=True):
        qs, ks, vs = (x.transpose(0, 1) for x in (qs, ks, vs))
        bucket = torch.bucketize((when[:, None] - when[None, :]).abs() + 1, 2 ** number[1:], right=True)
        table = (bucket[..., None] == number).float() @ bias.float()
        weights = torch.nn.functional.silu((qs @ ks.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + table).tril()
        outs.append(((weights / longest).to(v.dtype) @ vs).transpose(0, 1))
    return torch.cat(outs)
