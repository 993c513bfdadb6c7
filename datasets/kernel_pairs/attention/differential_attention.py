"""Differential attention, o = (softmax(s1) - lambda softmax(s2)) v: two maps are rebuilt beside one shared dP.

s1 and s2 come from two pairs of queries and keys, the values are common. The forward saves the second map's output,
so that delta2 = rowsum(o2 do) and delta1 = rowsum(o do) + lambda delta2, and the gradient of lambda is minus the sum
of delta2: no tile is needed for it. dP = do v^T is one product for both maps, as is dv from p1 - lambda p2.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "differential_attention",
    "family": "attention",
    "op": "differential_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "delta-preprocess", "recompute", "causal-bounds", "loop-swap", "owner-grid", "scalar-gradient",
        "two-stage-partials", "strided-cotangent",
    ),
    "saves": (
        "o: fp32 or bf16 (B, H, T, DV)", "o2: fp32 or bf16 (B, H, T, DV)", "lse: fp32 (2, B, H, T)",
    ),
    "grads": ("q1", "q2", "k1", "k2", "v", "lam"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "two owners of keys fill four warps but for 16 words, and are four tenths faster than in eight",
}  # fmt: skip


# --- forward ---
@triton.jit
def _load_tile(X, row, T, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + row[:, None] * D + d[None, :], mask=(row[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit
def _store_tile(X, tile, row, T, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(X + row[:, None] * D + d[None, :], tile, mask=(row[:, None] < T) & (d[None, :] < D))


@triton.jit
def _one_map(q, k, v, m, n, top, norm, acc, scale_log2):
    # A step of a causal softmax with running maximum.
    s = tl.where(m[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return new_top, norm * shrink + tl.sum(p, 1), acc


@triton.jit
def _differential_fwd(
    Q1, Q2, K1, K2, V, Lam, Out, Out2, LSE, T, D, DV, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = tl.program_id(1).to(tl.int64) * T
    rows = tl.num_programs(1).to(tl.int64) * T
    lam = tl.load(Lam).to(tl.float32)
    m = first + tl.arange(0, BLOCK_M)
    q1 = _load_tile(Q1 + row * D, m, T, D, BLOCK_D)
    q2 = _load_tile(Q2 + row * D, m, T, D, BLOCK_D)
    top1 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    top2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm1 = tl.zeros((BLOCK_M,), tl.float32)
    norm2 = tl.zeros((BLOCK_M,), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    acc2 = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        v = _load_tile(V + row * DV, n, T, DV, BLOCK_V)
        k1 = _load_tile(K1 + row * D, n, T, D, BLOCK_D)
        top1, norm1, acc1 = _one_map(q1, k1, v, m, n, top1, norm1, acc1, scale_log2)
        k2 = _load_tile(K2 + row * D, n, T, D, BLOCK_D)
        top2, norm2, acc2 = _one_map(q2, k2, v, m, n, top2, norm2, acc2, scale_log2)
    o2 = acc2 / norm2[:, None]
    _store_tile(Out2 + row * DV, o2, m, T, DV, BLOCK_V)
    _store_tile(Out + row * DV, acc1 / norm1[:, None] - lam * o2, m, T, DV, BLOCK_V)
    tl.store(LSE + row + m, top1 + tl.log2(norm1), mask=m < T)
    tl.store(LSE + rows + row + m, top2 + tl.log2(norm2), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps): two maps at a time take twice the registers."""
    if q.shape[2] <= 256:
        return 32, 16, 4
    return (64, 32, 8) if q.element_size() == 4 else (64, 32, 4)


def _tiles(q, v):
    return {
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": max(16, triton.next_power_of_2(v.shape[3])),
    }


def forward(q1, q2, k1, k2, v, lam):
    q1, q2, k1, k2, v = (x.contiguous() for x in (q1, q2, k1, k2, v))
    (B, H, T, D), DV = q1.shape, v.shape[3]
    o, o2 = torch.empty_like(v), torch.empty_like(v)
    lse = torch.empty(2, B, H, T, device=v.device, dtype=torch.float32)
    own, other, warps = _blocks(q1)
    _differential_fwd[(triton.cdiv(T, own), B * H)](
        q1, q2, k1, k2, v, lam, o, o2, lse, T, D, DV, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, **_tiles(q1, v), num_warps=warps,
    )  # fmt: skip
    return o, (q1, q2, k1, k2, v, lam, o, o2, lse)


# --- backward ---
@triton.jit
def _differential_delta(
    Out, Out2, DO, Lam, Delta, DLam, H, T, DV, do_b, do_h, do_t, do_d, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr
):
    bh = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_V)
    do_at = bh // H * do_b + bh % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=(m[:, None] < T) & (d[None, :] < DV), other=0.0).to(tl.float32)
    delta = tl.sum(_load_tile(Out + bh * T * DV, m, T, DV, BLOCK_V).to(tl.float32) * do, 1)
    delta2 = tl.sum(_load_tile(Out2 + bh * T * DV, m, T, DV, BLOCK_V).to(tl.float32) * do, 1)
    tl.store(Delta + bh * T + m, delta + tl.load(Lam).to(tl.float32) * delta2, mask=m < T)
    tl.store(Delta + tl.num_programs(1).to(tl.int64) * T + bh * T + m, delta2, mask=m < T)
    tl.store(DLam + bh * tl.num_programs(0) + tl.program_id(0), -tl.sum(delta2, 0))


@triton.jit
def _weights(scores, row_stat, later, earlier, scale_log2):
    return tl.exp2(tl.where(later >= earlier, scores * scale_log2 - row_stat, float("-inf")))


@triton.jit
def _differential_dq(
    Q1, Q2, K1, K2, V, Lam, DO, LSE, Delta, DQ1, DQ2, H, T, D, DV, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    bh = tl.program_id(1).to(tl.int64)
    row = bh * T
    rows = tl.num_programs(1).to(tl.int64) * T
    lam = tl.load(Lam).to(tl.float32)
    m = first + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    do_at = bh // H * do_b + bh % H * do_h + m[:, None].to(tl.int64) * do_t + e[None, :] * do_d
    do = tl.load(DO + do_at, mask=(m[:, None] < T) & (e[None, :] < DV), other=0.0)
    q1 = _load_tile(Q1 + row * D, m, T, D, BLOCK_D)
    q2 = _load_tile(Q2 + row * D, m, T, D, BLOCK_D)
    lse1 = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    lse2 = tl.load(LSE + rows + row + m, mask=m < T, other=float("inf"))
    delta1 = tl.load(Delta + row + m, mask=m < T, other=0.0)
    delta2 = tl.load(Delta + rows + row + m, mask=m < T, other=0.0)
    dq1 = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq2 = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dp = tl.dot(do, tl.trans(_load_tile(V + row * DV, n, T, DV, BLOCK_V)))
        k1 = _load_tile(K1 + row * D, n, T, D, BLOCK_D)
        p1 = _weights(tl.dot(q1, tl.trans(k1)), lse1[:, None], m[:, None], n[None, :], scale_log2)
        dq1 = tl.dot((p1 * (dp - delta1[:, None])).to(k1.dtype), k1, dq1)
        k2 = _load_tile(K2 + row * D, n, T, D, BLOCK_D)
        p2 = _weights(tl.dot(q2, tl.trans(k2)), lse2[:, None], m[:, None], n[None, :], scale_log2)
        dq2 = tl.dot((p2 * (dp - delta2[:, None])).to(k2.dtype), k2, dq2)
    _store_tile(DQ1 + row * D, dq1 * scale, m, T, D, BLOCK_D)
    # The second map enters with -lambda, as does its gradient.
    _store_tile(DQ2 + row * D, dq2 * (-lam * scale), m, T, D, BLOCK_D)


@triton.jit
def _differential_dkdv(
    Q1, Q2, K1, K2, V, Lam, DO, LSE, Delta, DK1, DK2, DVal, H, T, D, DV, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    bh = tl.program_id(1).to(tl.int64)
    row = bh * T
    rows = tl.num_programs(1).to(tl.int64) * T
    DO += bh // H * do_b + bh % H * do_h
    lam = tl.load(Lam).to(tl.float32)
    n = first + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_V)
    k1 = _load_tile(K1 + row * D, n, T, D, BLOCK_D)
    k2 = _load_tile(K2 + row * D, n, T, D, BLOCK_D)
    v = _load_tile(V + row * DV, n, T, DV, BLOCK_V)
    dk1 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dk2 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        do_at = m[:, None].to(tl.int64) * do_t + e[None, :] * do_d
        do = tl.load(DO + do_at, mask=(m[:, None] < T) & (e[None, :] < DV), other=0.0)
        lse1 = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        lse2 = tl.load(LSE + rows + row + m, mask=m < T, other=float("inf"))
        delta1 = tl.load(Delta + row + m, mask=m < T, other=0.0)
        delta2 = tl.load(Delta + rows + row + m, mask=m < T, other=0.0)
        dp = tl.dot(v, tl.trans(do))
        q1 = _load_tile(Q1 + row * D, m, T, D, BLOCK_D)
        p1 = _weights(tl.dot(k1, tl.trans(q1)), lse1[None, :], m[None, :], n[:, None], scale_log2)
        dk1 = tl.dot((p1 * (dp - delta1[None, :])).to(q1.dtype), q1, dk1)
        q2 = _load_tile(Q2 + row * D, m, T, D, BLOCK_D)
        p2 = _weights(tl.dot(k2, tl.trans(q2)), lse2[None, :], m[None, :], n[:, None], scale_log2)
        dk2 = tl.dot((p2 * (dp - delta2[None, :])).to(q2.dtype), q2, dk2)
        dv = tl.dot((p1 - lam * p2).to(do.dtype), do, dv)
    _store_tile(DK1 + row * D, dk1 * scale, n, T, D, BLOCK_D)
    _store_tile(DK2 + row * D, dk2 * (-lam * scale), n, T, D, BLOCK_D)
    _store_tile(DVal + row * DV, dv, n, T, DV, BLOCK_V)


def backward(saved, grad_o, needs=None):
    q1, q2, k1, k2, v, lam, o, o2, lse = saved
    (B, H, T, D), DV = q1.shape, v.shape[3]
    scale = D**-0.5
    tiles = _tiles(q1, v)
    delta = torch.empty_like(lse)
    dlam = torch.empty(B * H, triton.cdiv(T, 64), device=v.device, dtype=torch.float32)
    _differential_delta[(triton.cdiv(T, 64), B * H)](
        o, o2, grad_o, lam, delta, dlam, H, T, DV, *grad_o.stride(), BLOCK_M=64, BLOCK_V=tiles["BLOCK_V"]
    )
    dq1, dq2, dk1, dk2, dv = (torch.empty_like(x) for x in (q1, q2, k1, k2, v))
    own, other, warps = _blocks(q1)
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, D, DV, *grad_o.stride(), scale, scale * 1.4426950408889634)
    _differential_dq[grid](
        q1, q2, k1, k2, v, lam, grad_o, lse, delta, dq1, dq2, *sizes,
        BLOCK_M=own, BLOCK_N=other, **tiles, num_warps=warps, num_stages=3,
    )  # fmt: skip
    _differential_dkdv[grid](
        q1, q2, k1, k2, v, lam, grad_o, lse, delta, dk1, dk2, dv, *sizes,
        BLOCK_M=other, BLOCK_N=own, **tiles, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dq1, dq2, dk1, dk2, dv, dlam.sum().to(lam.dtype).view(lam.shape)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "D": 16, "DV": 32},
    {"B": 2, "H": 1, "T": 43, "D": 20, "DV": 24},
    {"B": 1, "H": 2, "T": 33, "D": 16, "DV": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "D": 64, "DV": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, D, DV, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (D, D, D, D, DV)]
    return *tensors, torch.rand(1, generator=g).to(device)


def reference(q1, q2, k1, k2, v, lam):
    later = torch.ones(q1.shape[2], q1.shape[2], dtype=torch.bool, device=v.device).triu(1)
    maps = [
        ((q @ k.transpose(-1, -2)).float() * q1.shape[-1] ** -0.5).masked_fill(later, float("-inf")).softmax(-1)
        for q, k in ((q1, k1), (q2, k2))
    ]
    return (maps[0] - lam * maps[1]).to(v.dtype) @ v
