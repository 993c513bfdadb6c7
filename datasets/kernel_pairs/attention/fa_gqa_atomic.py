"""Causal grouped-query attention where every query head has its own dk/dv programs, which meet in atomic adds.

A key tile has as many programs as its group has query heads, each with one loop over queries, and one atomic add per
element at its end: short loops and an even load, at the price of fp32 buffers, their zeros and the last cast. (With
many key heads the owner that loops over its group's heads needs none of this.) The dq kernel computes delta on its
way.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_gqa_atomic",
    "family": "attention",
    "op": "grouped_query_attention",
    "schema": 1,
    "techniques": ("atomics", "saved-lse", "loop-swap", "owner-grid", "causal-bounds", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, HQ, T, D)", "lse: fp32 (B, HQ, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_fwd(
    Q, K, V, Out, LSE, T, D, GROUP, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    # With HQ = HK * GROUP heads per sequence, the key head is the query head over GROUP across the batch, too.
    kv_rows = head // GROUP * T
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        # Keys are read as the product wants them, (D, N).
        k_t = tl.load(K + (kv_rows + n[None, :]) * D + d[:, None], mask=(n[None, :] < T) & (d[:, None] < D), other=0.0)
        s = tl.dot(q, k_t) * scale_log2
        if start + BLOCK_N > first:
            s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - raised[:, None])
        fade = tl.exp2(top - raised)
        norm = norm * fade + tl.sum(p, 1)
        v = tl.load(V + (kv_rows + n[:, None]) * D + d[None, :], mask=(n[:, None] < T) & (d[None, :] < D), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = raised
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    T, D = q.shape[2:]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, HQ, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, HQ, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _grouped_fwd[(triton.cdiv(T, own), B * HQ)](
        q, k, v, o, lse, T, D, HQ // k.shape[1], D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _grouped_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, HQ, T, D, GROUP, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // HQ * do_b + head % HQ * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    kv_rows = head // GROUP * T
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (kv_rows + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (kv_rows + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _grouped_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, HQ, T, D, GROUP, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs are the heads of one group: they share the key tile in L2 and end at about the same time.
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = (head // GROUP * T + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += head // HQ * do_b + head % HQ * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.atomic_add(DK + kv_at, dk * scale, mask=in_kv, sem="relaxed")
    tl.atomic_add(DV + kv_at, dv, mask=in_kv, sem="relaxed")


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    _, need_k, need_v = needs or (True, True, True)
    B, HQ, T, D = q.shape
    GROUP = HQ // k.shape[1]
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(q)
    sizes = (HQ, T, D, GROUP, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _grouped_dq[(triton.cdiv(T, own), B * HQ)](
        q, k, v, o, grad_o, lse, delta, dq, *sizes, BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps
    )
    if not (need_k or need_v):
        return dq, None, None
    sums = torch.zeros(2, *k.shape, device=k.device, dtype=torch.float32)
    _grouped_dkdv[(B * HQ, triton.cdiv(T, own))](
        q, k, v, grad_o, lse, delta, sums[0], sums[1], *sizes,
        BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    dk, dv = sums.to(k.dtype).unbind(0)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "HK": 2, "group": 2, "T": 64, "D": 32},
    {"B": 2, "HK": 1, "group": 3, "T": 75, "D": 20},
    {"B": 1, "HK": 2, "group": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 1, "HK": 8, "group": 4, "T": 2048, "D": 128, "dtype": "bfloat16"},)


def make_args(B, HK, group, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    heads = (HK * group, HK, HK)
    return tuple(torch.randn(B, h, T, D, generator=g).to(device, getattr(torch, dtype)) for h in heads)


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
