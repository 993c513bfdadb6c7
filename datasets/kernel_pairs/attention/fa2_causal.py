"""Causal flash attention with log-sum-exp saved: one backward kernel owns key tiles (dk, dv), one query tiles (dq)."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa2_causal",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "causal-bounds", "recompute"),
    "saves": ("o: fp32 or bf16 or fp16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _fa2_fwd(
    Q, K, V, Out, LSE, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The longest rows start first, so that short ones fill the gaps at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    base = head * T * D
    q_at = base + m[:, None] * D + d[None, :]
    q_ok = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=q_ok, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_at = base + n[:, None] * D + d[None, :]
        kv_ok = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
        v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
        # Scores in units of log 2: exp2 is what the hardware computes.
        s = tl.dot(q, tl.trans(k)) * scale_log2
        s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + q_at, acc / norm[:, None], mask=q_ok)
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    scale_log2 = D**-0.5 * 1.4426950408889634
    BLOCK_D = max(16, triton.next_power_of_2(D))
    _fa2_fwd[(triton.cdiv(T, 128), B * H)](
        q, k, v, o, lse, T, scale_log2, D=D, BLOCK_D=BLOCK_D,
        BLOCK_M=128, BLOCK_N=128 // q.element_size(), num_warps=8, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _fa2_delta(Out, DO, Delta, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    # Row sum of o * do: what the softmax takes off every dp of its row.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = m[:, None] * D + d[None, :]
    ok = (m[:, None] < rows) & (d[None, :] < D)
    o = tl.load(Out + at, mask=ok, other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Delta + m, tl.sum(o * do, 1), mask=m < rows)


@triton.jit
def _fa2_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, T, scale, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_key = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    base = head * T * D
    kv_at = base + n[:, None] * D + d[None, :]
    kv_ok = (n[:, None] < T) & (d[None, :] < D)
    k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
    v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Queries before the first key see none of this tile. All products are kept transposed: keys are rows.
    for start in range(first_key // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q_at = base + m[:, None] * D + d[None, :]
        q_ok = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + q_at, mask=q_ok, other=0.0)
        do = tl.load(DO + q_at, mask=q_ok, other=0.0)
        # Infinity for rows outside makes their probabilities exact zeros.
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=kv_ok)
    tl.store(DV + kv_at, dv, mask=kv_ok)


@triton.jit
def _fa2_dq(
    Q, K, V, DO, LSE, Delta, DQ, T, scale, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    base = head * T * D
    q_at = base + m[:, None] * D + d[None, :]
    q_ok = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=q_ok, other=0.0)
    do = tl.load(DO + q_at, mask=q_ok, other=0.0)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_at = base + n[:, None] * D + d[None, :]
        kv_ok = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
        v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=q_ok)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    # Every tile of the cotangent is read many times: one copy is cheaper than strided reads in all of them.
    grad_o = grad_o.contiguous()
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    _fa2_delta[(triton.cdiv(B * H * T, 64),)](o, grad_o, delta, B * H * T, D=D, BLOCK_D=BLOCK_D, BLOCK_M=64)
    # The owned tile stays in shared memory, so fp32 takes half the rows.
    own, other = (128, 64) if q.element_size() == 2 else (64, 32)
    dq = dk = dv = None
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _fa2_dkdv[(triton.cdiv(T, own), B * H)](
            q, k, v, grad_o, lse, delta, dk, dv, T, scale, scale_log2, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=other, BLOCK_N=own, num_warps=8, num_stages=2,
        )  # fmt: skip
    if need_q:
        dq = torch.empty_like(q)
        _fa2_dq[(triton.cdiv(T, own), B * H)](
            q, k, v, grad_o, lse, delta, dq, T, scale, scale_log2, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=own, BLOCK_N=other, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 128, "D": 32},
    {"B": 2, "H": 1, "T": 151, "D": 24, "dtype": "float16"},
    {"B": 1, "H": 2, "T": 200, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "D": 64, "dtype": "float16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
