"""Attention that returns its log-sum-exp as a second output with a gradient of its own: delta becomes delta - dlse.

dlse_i enters every score of its row with weight p_ij, so dS = p (dP - delta + dlse): the backward kernels stay as
they are, and only the kernel that makes delta reads the second cotangent. Either cotangent may be missing; without
one for o there is nothing but p dlse, and neither v nor do is touched.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_lse_output",
    "family": "attention",
    "op": "attention_with_lse",
    "schema": 1,
    "techniques": (
        "saved-lse", "delta-preprocess", "optional-cotangent", "loop-swap", "owner-grid", "strided-cotangent",
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
def _lse_fwd(
    Q, K, V, Out, LSE, T, S, D, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    log2e: tl.constexpr = 1.4426950408889634
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = tl.where(n[None, :] < S, tl.dot(q, tl.trans(k)) * (scale * log2e), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    # An output for others to use: natural logarithm.
    tl.store(LSE + head * T + m, (top + tl.log2(norm)) / log2e, mask=m < T)


def _blocks(length, q):
    """(owned rows, rows of the other side, warps)."""
    if length <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if q.shape[3] <= 64 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, D), S = q.shape, k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(T, q)
    _lse_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, lse, T, S, D, D**-0.5,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return (o, lse), (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _lse_delta(
    Out, DO, DLSE, Delta, H, T, D, do_b, do_h, do_t, do_d, dl_b, dl_h, dl_t,
    HAS_DO: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    delta = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_DO:
        inside = (m[:, None] < T) & (d[None, :] < D)
        o = tl.load(Out + (head * T + m[:, None]) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
        delta += tl.sum(o * tl.load(DO + do_at, mask=inside, other=0.0).to(tl.float32), 1)
    if HAS_DLSE:
        dl_at = head // H * dl_b + head % H * dl_h + m.to(tl.int64) * dl_t
        delta -= tl.load(DLSE + dl_at, mask=m < T, other=0.0)
    tl.store(Delta + head * T + m, delta, mask=m < T)


@triton.jit
def _lse_dq(
    Q, K, V, DO, LSE, Delta, DQ, H, T, S, D, do_b, do_h, do_t, do_d, scale, HAS_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    if HAS_DO:
        do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
        do = tl.load(DO + do_at, mask=in_q, other=0.0)
    log2e: tl.constexpr = 1.4426950408889634
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf")) * log2e
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * log2e) - lse[:, None]
        ds = tl.exp2(tl.where(n[None, :] < S, s, float("-inf")))
        if HAS_DO:
            v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
            ds *= tl.dot(do, tl.trans(v)) - delta[:, None]
        else:
            ds *= -delta[:, None]
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _lse_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, S, D, do_b, do_h, do_t, do_d, scale, HAS_DO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < S) & (d[None, :] < D)
    kv_at = (head * S + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    log2e: tl.constexpr = 1.4426950408889634
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_DO:
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    for start in range(0, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf")) * log2e
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * log2e) - lse[None, :])
        if HAS_DO:
            do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        else:
            ds = p * -delta[None, :]
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, grad_lse, needs=None):
    q, k, v, o, lse = saved
    need_q, need_k, need_v = needs or (True, True, True)
    (B, H, T, D), S = q.shape, k.shape[2]
    BLOCK_D = max(16, triton.next_power_of_2(D))
    has = {"HAS_DO": grad_o is not None}
    # What stands in for a missing cotangent is never read.
    do = o if grad_o is None else grad_o
    dlse = lse if grad_lse is None else grad_lse
    delta = torch.empty_like(lse)
    _lse_delta[(triton.cdiv(T, 64), B * H)](
        o, do, dlse, delta, H, T, D, *do.stride(), *dlse.stride(), HAS_DLSE=grad_lse is not None, **has,
        BLOCK_M=64, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    sizes = (H, T, S, D, *do.stride(), D**-0.5)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        own, other, warps = _blocks(T, q)
        _lse_dq[(triton.cdiv(T, own), B * H)](
            q, k, v, do, lse, delta, dq, *sizes, **has,
            BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps,
        )  # fmt: skip
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        own, other, warps = _blocks(S, q)
        _lse_dkdv[(triton.cdiv(S, own), B * H)](
            q, k, v, do, lse, delta, dk, dv, *sizes, **has,
            BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
        )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 48, "D": 32},
    {"B": 2, "H": 1, "T": 45, "S": 71, "D": 20},
    {"B": 1, "H": 2, "T": 33, "S": 40, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "S": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))


def reference(q, k, v):
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)
