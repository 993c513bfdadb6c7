"""Causal attention with ALiBi's linear biases: the slopes' gradient is a row sum of dS times distance, if asked for.

s_ij = scale q_i . k_j - slope_h (i - j). Only the dq kernel, which owns whole rows, sums -(i - j) dS_ij; it does so
in one vector of registers beside dq and stores one number per tile. Without learned slopes that code is compiled
away.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_alibi",
    "family": "attention",
    "op": "alibi_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "delta-preprocess", "causal-bounds", "loop-swap", "owner-grid", "two-stage-partials",
        "scalar-gradient", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, T, H, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "slopes"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _alibi_fwd(
    Q, K, V, Slopes, Out, LSE, H, T, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    # Everything inside exp2 is in units of log 2.
    slope = tl.load(Slopes + head).to(tl.float32) * 1.4426950408889634
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = ((batch * T + m[:, None]) * H + head) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = ((batch * T + n[:, None]) * H + head) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        ago = m[:, None] - n[None, :]
        s = tl.dot(q, tl.trans(k)) * scale_log2 - slope * ago.to(tl.float32)
        s = tl.where(ago >= 0, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(LSE + (batch * H + head) * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    T, D = q.shape[1], q.shape[3]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v, slopes):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _alibi_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, slopes, o, lse, H, T, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, slopes, o, lse)


# --- backward ---
@triton.jit
def _alibi_dq(
    Q, K, V, Slopes, Out, DO, LSE, Delta, DQ, DSlopes, H, T, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    NEED_SLOPES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    slope = tl.load(Slopes + head).to(tl.float32) * 1.4426950408889634
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = ((batch * T + m[:, None]) * H + head) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = batch * do_b + m[:, None].to(tl.int64) * do_t + head.to(tl.int64) * do_h + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    row = (batch * H + head) * T + m
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row, delta, mask=m < T)
    lse = tl.load(LSE + row, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dslope = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = ((batch * T + n[:, None]) * H + head) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        ago = m[:, None] - n[None, :]
        s = tl.dot(q, tl.trans(k)) * scale_log2 - slope * ago.to(tl.float32) - lse[:, None]
        p = tl.exp2(tl.where(ago >= 0, s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
        if NEED_SLOPES:
            dslope -= tl.sum(ds * ago.to(tl.float32), 1)
    tl.store(DQ + q_at, dq * scale, mask=in_q)
    if NEED_SLOPES:
        # (tiles, B * H): summed over its first axis and the batch afterwards.
        tl.store(DSlopes + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(dslope, 0))


@triton.jit
def _alibi_dkdv(
    Q, K, V, Slopes, DO, LSE, Delta, DK, DV, H, T, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    slope = tl.load(Slopes + head).to(tl.float32) * 1.4426950408889634
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = ((batch * T + n[:, None]) * H + head) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += batch * do_b + head.to(tl.int64) * do_h
    row = (batch * H + head) * T
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + ((batch * T + m[:, None]) * H + head) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        ago = m[None, :] - n[:, None]
        s = tl.dot(k, tl.trans(q)) * scale_log2 - slope * ago.to(tl.float32) - lse[None, :]
        p = tl.exp2(tl.where(ago >= 0, s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, slopes, o, lse = saved
    _, need_k, need_v, need_slopes = needs or (True,) * 4
    B, T, H, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(q)
    tiles = triton.cdiv(T, own)
    sizes = (H, T, D, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    parts = torch.empty(tiles, B, H, device=q.device, dtype=torch.float32)
    _alibi_dq[(tiles, B * H)](
        q, k, v, slopes, o, grad_o, lse, delta, dq, parts, *sizes, NEED_SLOPES=need_slopes,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    dslopes = parts.sum((0, 1)).to(slopes.dtype) if need_slopes else None
    if not (need_k or need_v):
        return dq, None, None, dslopes
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _alibi_dkdv[(tiles, B * H)](
        q, k, v, slopes, grad_o, lse, delta, dk, dv, *sizes,
        BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    return dq, dk, dv, dslopes


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 3, "T": 75, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    return q, k, v, torch.exp2(-8.0 * (torch.arange(H) + 1.0) / H).to(device)


def reference(q, k, v, slopes):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[2], device=q.device)
    ago = at[:, None] - at[None, :]
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 - slopes.float()[:, None, None] * ago
    return (s.masked_fill(ago < 0, float("-inf")).softmax(-1).to(v.dtype) @ v).transpose(1, 2)
