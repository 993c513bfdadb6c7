"""Causal attention with capped scores, s = cap tanh(scale q k / cap): dS takes one more factor, 1 - tanh^2.

tanh is rebuilt with the scores, in dq and in dk/dv, so nothing more is saved than for plain attention. It is written
as 1 - 2 / (exp(2x) + 1), which neither overflows nor loses its limits, and the factor as 1 - t^2 from the same value.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_softcap",
    "family": "attention",
    "op": "softcap_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "delta-preprocess", "epilogue-fusion", "causal-bounds", "loop-swap", "owner-grid", "recompute",
        "strided-cotangent",
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
def _capped(product, scale_over_cap):
    # tanh of the scaled product: what the cap multiplies.
    return 1.0 - 2.0 / (tl.exp2(product * (scale_over_cap * 2.8853900817779268)) + 1.0)


@triton.jit
def _softcap_fwd(
    Q, K, V, Out, LSE, T, scale_over_cap, cap_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * T
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = (base + m[:, None]) * D + d[None, :]
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Scores never exceed the cap, which therefore serves as the maximum: no running one, no rescaling.
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = (_capped(tl.dot(q, tl.trans(k)), scale_over_cap) - 1.0) * cap_log2
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s, float("-inf")))
        norm += tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc)
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(LSE + base + m, cap_log2 + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    T, D = q.shape[2:]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v, cap=20.0):
    # exp(-2 cap) is the smallest weight there can be: fp32 has room for it up to caps of about 40.
    if not 0 < cap <= 40:
        raise ValueError(f"the cap is {cap}; this schedule is for caps above 0 and up to 40")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _softcap_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, lse, T, D**-0.5 / cap, cap * 1.4426950408889634, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_M=own, BLOCK_N=other, num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse, cap)


# --- backward ---
@triton.jit
def _softcap_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, do_b, do_h, do_t, do_d, scale, scale_over_cap, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = (base + m[:, None]) * D + d[None, :]
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + base + m, delta, mask=m < T)
    lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        t = _capped(tl.dot(q, tl.trans(k)), scale_over_cap)
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], t * cap_log2 - lse[:, None], float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * (1.0 - t * t)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _softcap_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, do_b, do_h, do_t, do_d, scale, scale_over_cap, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv_at = (base + n[:, None]) * D + d[None, :]
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
        t = _capped(tl.dot(k, tl.trans(q)), scale_over_cap)
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], t * cap_log2 - lse[None, :], float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :]) * (1.0 - t * t)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, cap = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(q)
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, *grad_o.stride(), scale, scale / cap, cap * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _softcap_dq[grid](
        q, k, v, o, grad_o, lse, delta, dq, *sizes,
        D=D, BLOCK_D=BLOCK_D, BLOCK_M=own, BLOCK_N=other, num_warps=warps,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _softcap_dkdv[grid](
        q, k, v, grad_o, lse, delta, dk, dv, *sizes,
        D=D, BLOCK_D=BLOCK_D, BLOCK_M=other, BLOCK_N=own, num_warps=warps,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32, "cap": 2.0},
    {"B": 2, "H": 1, "T": 75, "D": 20, "cap": 20.0},
    {"B": 1, "H": 2, "T": 50, "D": 16, "cap": 4.0, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "cap": 20.0, "dtype": "bfloat16"},)


def make_args(B, H, T, D, cap, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    return q, k, v, cap


def reference(q, k, v, cap=20.0):
    s = cap * torch.tanh((q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 / cap))
    later = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return s.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v
