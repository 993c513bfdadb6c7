"""Grouped-query flash attention in (B, T, H, D) layout: the owner of a key tile loops over its group's query heads."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_gqa_loop_heads",
    "family": "attention",
    "op": "grouped_query_attention",
    "schema": 1,
    "techniques": ("head-reduction", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 or fp16 (B, T, HQ, D)", "lse: fp32 (B, HQ, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gqa_fwd(
    Q, K, V, Out, LSE, T, S, HQ, GROUP, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // HQ).to(tl.int64)
    head = tl.program_id(1) % HQ
    HK = HQ // GROUP
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = ((batch * T + m[:, None]) * HQ + head) * D + d[None, :]
    q_ok = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=q_ok, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Queries and keys end together (S >= T): query t sees keys up to t + S - T.
    end = tl.minimum((tile + 1) * BLOCK_M + S - T, S) if CAUSAL else S
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_at = ((batch * S + n[:, None]) * HK + head // GROUP) * D + d[None, :]
        kv_ok = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
        v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
        seen = n[None, :] < S
        if CAUSAL:
            seen = seen & (m[:, None] + S - T >= n[None, :])
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + q_at, acc / norm[:, None], mask=q_ok)
    tl.store(LSE + (batch * HQ + head) * T + m, top + tl.log2(norm), mask=m < T)


def forward(q, k, v, causal=True):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, HQ, D = q.shape
    S, HK = k.shape[1:3]
    o = torch.empty_like(q)
    lse = torch.empty(B, HQ, T, device=q.device, dtype=torch.float32)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    _gqa_fwd[(triton.cdiv(T, 128), B * HQ)](
        q, k, v, o, lse, T, S, HQ, HQ // HK, D**-0.5 * 1.4426950408889634, D=D, BLOCK_D=BLOCK_D, CAUSAL=causal,
        BLOCK_M=128, BLOCK_N=128 // q.element_size(), num_warps=4 if BLOCK_D <= 64 else 8, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, o, lse, causal)


# --- backward ---
@triton.jit
def _gqa_delta(
    Out, DO, Delta, T, HQ, do_b, do_t, do_h, do_d, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    batch = (tl.program_id(1) // HQ).to(tl.int64)
    head = tl.program_id(1) % HQ
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    ok = (m[:, None] < T) & (d[None, :] < D)
    o = tl.load(Out + ((batch * T + m[:, None]) * HQ + head) * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    do_at = batch * do_b + head.to(tl.int64) * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Delta + (batch * HQ + head) * T + m, tl.sum(o * do, 1), mask=m < T)


@triton.jit
def _gqa_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, T, S, HK, GROUP, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_key = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // HK).to(tl.int64)
    kv_head = (tl.program_id(1) % HK).to(tl.int64)
    HQ = HK * GROUP
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv_at = ((batch * S + n[:, None]) * HK + kv_head) * D + d[None, :]
    kv_ok = (n[:, None] < S) & (d[None, :] < D)
    k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
    v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = tl.maximum(first_key + T - S, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    # All query heads of the group meet in these registers: no atomics, and keys are never expanded to HQ heads.
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        row = (batch * HQ + head) * T
        for start in range(begin, T, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            ok = (m[:, None] < T) & (d[None, :] < D)
            q = tl.load(Q + ((batch * T + m[:, None]) * HQ + head) * D + d[None, :], mask=ok, other=0.0)
            do_at = batch * do_b + head * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
            do = tl.load(DO + do_at, mask=ok, other=0.0)
            lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
            delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
            if CAUSAL:
                p = tl.where(m[None, :] + S - T >= n[:, None], p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=kv_ok)
    tl.store(DV + kv_at, dv, mask=kv_ok)


@triton.jit
def _gqa_dq(
    Q, K, V, DO, LSE, Delta, DQ, T, S, HQ, GROUP, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // HQ).to(tl.int64)
    head = tl.program_id(1) % HQ
    HK = HQ // GROUP
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = ((batch * T + m[:, None]) * HQ + head) * D + d[None, :]
    q_ok = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=q_ok, other=0.0)
    do_at = batch * do_b + head.to(tl.int64) * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=q_ok, other=0.0)
    row = (batch * HQ + head) * T
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum((tile + 1) * BLOCK_M + S - T, S) if CAUSAL else S
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_at = ((batch * S + n[:, None]) * HK + head // GROUP) * D + d[None, :]
        kv_ok = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
        v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        # Keys past S are zero rows, but their p may be infinite where all true scores are very negative.
        seen = n[None, :] < S
        if CAUSAL:
            seen = seen & (m[:, None] + S - T >= n[None, :])
        p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=q_ok)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, causal = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, T, HQ, D = q.shape
    S, HK = k.shape[1:3]
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    _gqa_delta[(triton.cdiv(T, 64), B * HQ)](
        o, grad_o, delta, T, HQ, *grad_o.stride(), D=D, BLOCK_D=BLOCK_D, BLOCK_M=64
    )
    own, other = (128, 64) if q.element_size() == 2 else (64, 32)
    dq = dk = dv = None
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _gqa_dkdv[(triton.cdiv(S, own), B * HK)](
            q, k, v, grad_o, lse, delta, dk, dv, T, S, HK, HQ // HK, *grad_o.stride(), scale, scale_log2,
            D=D, BLOCK_D=BLOCK_D, CAUSAL=causal, BLOCK_M=other, BLOCK_N=own, num_warps=8, num_stages=2,
        )  # fmt: skip
    if need_q:
        dq = torch.empty_like(q)
        _gqa_dq[(triton.cdiv(T, own), B * HQ)](
            q, k, v, grad_o, lse, delta, dq, T, S, HQ, HQ // HK, *grad_o.stride(), scale, scale_log2,
            D=D, BLOCK_D=BLOCK_D, CAUSAL=causal, BLOCK_M=own, BLOCK_N=other, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "T": 64, "past": 0, "HK": 2, "group": 2, "D": 32},
    {"B": 2, "T": 75, "past": 66, "HK": 1, "group": 3, "D": 20},
    {"B": 1, "T": 50, "past": 33, "HK": 2, "group": 2, "D": 16, "causal": False, "dtype": "float16"},
    {"B": 1, "T": 96, "past": 0, "HK": 4, "group": 1, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "T": 2048, "past": 0, "HK": 8, "group": 4, "D": 64, "dtype": "bfloat16"},)


def make_args(B, T, past, HK, group, D, causal=True, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # The queries are the last T of past + T positions.
    shapes = ((B, T, HK * group, D), (B, past + T, HK, D), (B, past + T, HK, D))
    tensors = (torch.randn(shape, generator=g) for shape in shapes)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), causal)


def reference(q, k, v, causal=True):
    T, S = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # Torch's causal mask begins at the first key, this one ends at the last.
    keep = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if causal and T != S else None
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, is_causal=causal and T == S, enable_gqa=True
    )
    return out.transpose(1, 2)
