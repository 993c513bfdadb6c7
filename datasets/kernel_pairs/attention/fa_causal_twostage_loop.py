"""Causal flash attention with loops in two stages: tiles below the diagonal without a mask, the diagonal with one.

In both backward kernels only the tiles that the diagonal crosses compare positions. A query tile has them at the end
of its loop, a key tile at the beginning of its own; the loop body is one function with DIAGONAL known at compile
time.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_causal_twostage_loop",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": (
        "causal-bounds", "masking", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "recompute",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _fwd_stage(
    acc, top, norm, q, K, V, m, begin, end, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + n[:, None] * D + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2
        if DIAGONAL:
            s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(p, 1)
        v = tl.load(V + n[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    return acc, top, norm


@triton.jit
def _twostage_fwd(
    Q, K, V, Out, LSE, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    offset = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < T) & (d[None, :] < D)
    at = (offset + m[:, None]) * D + d[None, :]
    q = tl.load(Q + at, mask=inside, other=0.0)
    K += offset * D
    V += offset * D
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    # BLOCK_N divides BLOCK_M: the keys before the tile's first query are whole tiles.
    acc, top, norm = _fwd_stage(acc, top, norm, q, K, V, m, 0, first, T, scale_log2, D, BLOCK_D, BLOCK_N, False)
    end = tl.minimum(first + BLOCK_M, T)
    acc, top, norm = _fwd_stage(acc, top, norm, q, K, V, m, first, end, T, scale_log2, D, BLOCK_D, BLOCK_N, True)
    tl.store(Out + at, acc / norm[:, None], mask=inside)
    tl.store(LSE + offset + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps); the second divides the first."""
    T, D = q.shape[2:]
    if T <= 512:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    _twostage_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, o, lse, T, D**-0.5 * 1.4426950408889634, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _twostage_delta(Out, DO, Delta, H, T, do_b, do_h, do_t, do_d, D, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < T) & (d[None, :] < D)
    o = tl.load(Out + (head * T + m[:, None]) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Delta + head * T + m, tl.sum(o * do, 1), mask=m < T)


@triton.jit
def _dq_stage(
    dq, q, do, lse, delta, K, V, m, begin, end, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + n[:, None] * D + d[None, :], mask=inside, other=0.0)
        v = tl.load(V + n[:, None] * D + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        if DIAGONAL:
            s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        ds = tl.exp2(s) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _dkdv_stage(
    dk, dv, k, v, Q, DO, LSE, Delta, n, begin, end, T, do_t, do_d, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + m[:, None] * D + d[None, :], mask=inside, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=inside, other=0.0)
        # Rows past T come last: exp2(-inf) takes them out without a mask on the scores.
        lse = tl.load(LSE + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        if DIAGONAL:
            s = tl.where(m[None, :] >= n[:, None], s, float("-inf"))
        p = tl.exp2(s)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _twostage_dq(
    Q, K, V, DO, LSE, Delta, DQ, H, T, do_b, do_h, do_t, do_d, scale, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < T) & (d[None, :] < D)
    at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + at, mask=inside, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=inside, other=0.0)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    K += head * T * D
    V += head * T * D
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq = _dq_stage(dq, q, do, lse, delta, K, V, m, 0, first, T, scale_log2, D, BLOCK_D, BLOCK_N, False)
    end = tl.minimum(first + BLOCK_M, T)
    dq = _dq_stage(dq, q, do, lse, delta, K, V, m, first, end, T, scale_log2, D, BLOCK_D, BLOCK_N, True)
    tl.store(DQ + at, dq * scale, mask=inside)


@triton.jit
def _twostage_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, do_b, do_h, do_t, do_d, scale, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < T) & (d[None, :] < D)
    at = (head * T + n[:, None]) * D + d[None, :]
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    Q += head * T * D
    DO += head // H * do_b + head % H * do_h
    LSE += head * T
    Delta += head * T
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    below = first + BLOCK_N
    dk, dv = _dkdv_stage(
        dk, dv, k, v, Q, DO, LSE, Delta, n, first, tl.minimum(below, T), T, do_t, do_d, scale_log2, D, BLOCK_D,
        BLOCK_M, True,
    )  # fmt: skip
    dk, dv = _dkdv_stage(
        dk, dv, k, v, Q, DO, LSE, Delta, n, below, T, T, do_t, do_d, scale_log2, D, BLOCK_D, BLOCK_M, False
    )
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    _twostage_delta[(triton.cdiv(T, 64), B * H)](
        o, grad_o, delta, H, T, *grad_o.stride(), D, BLOCK_D=BLOCK_D, BLOCK_M=64
    )
    own, other, warps = _blocks(q)
    grid = (triton.cdiv(T, own), B * H)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _twostage_dq[grid](
            q, k, v, grad_o, lse, delta, dq, H, T, *grad_o.stride(), scale, scale_log2, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=own, BLOCK_N=other, num_warps=warps,
        )  # fmt: skip
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _twostage_dkdv[grid](
            q, k, v, grad_o, lse, delta, dk, dv, H, T, *grad_o.stride(), scale, scale_log2, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=other, BLOCK_N=own, num_warps=warps,
        )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 96, "D": 32},
    {"B": 2, "H": 1, "T": 83, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = (
    {"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},
    {"B": 2, "H": 16, "T": 2048, "D": 128, "dtype": "bfloat16"},
)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
