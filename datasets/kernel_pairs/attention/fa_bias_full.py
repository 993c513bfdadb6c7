"""Attention with a full additive bias that gets a gradient: dS is written once, as dbias, and dk is a product of it.

The bias gradient is dS itself, a (T, S) matrix per head that has to be stored anyway. The dq kernel, which owns query
rows and has dS in the layout of the bias, stores it; the dk/dv kernel loads it back and saves the product do v^T and
the delta, so that the two kernels take six products instead of seven.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_bias_full",
    "family": "attention",
    "op": "attention_bias",
    "schema": 1,
    "techniques": ("saved-lse", "loop-swap", "owner-grid", "shared-gradient", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _biased_fwd(
    Q, K, V, Bias, Out, LSE, T, S, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        in_s = (m[:, None] < T) & (n[None, :] < S)
        bias = tl.load(Bias + (head * T + m[:, None]) * S + n[None, :], mask=in_s, other=0.0).to(tl.float32)
        # The bias joins in units of log 2, as the scores.
        s = tl.dot(q, tl.trans(k)) * scale_log2 + bias * 1.4426950408889634
        s = tl.where(n[None, :] < S, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + (head * T + m[:, None]) * D + d[None, :], acc / norm[:, None], mask=in_q)
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(length, q):
    """(owned rows, rows of the other side, warps): the (M, N) tile of the bias takes registers, too."""
    if length <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if q.shape[3] <= 64 else (128, 32, 8)


def forward(q, k, v, bias):
    q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous()
    B, H, T, D = q.shape
    S = k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, warps = _blocks(T, q)
    _biased_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, bias, o, lse, T, S, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, bias, o, lse)


# --- backward ---
@triton.jit
def _biased_dq(
    Q, K, V, Bias, Out, DO, LSE, DQ, DBias, H, T, S, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        in_s = (m[:, None] < T) & (n[None, :] < S)
        s_at = (head * T + m[:, None]) * S + n[None, :]
        bias = tl.load(Bias + s_at, mask=in_s, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k)) * scale_log2 + bias * 1.4426950408889634 - lse[:, None]
        p = tl.exp2(tl.where(in_s, s, float("-inf")))
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(k.dtype)
        tl.store(DBias + s_at, ds, mask=in_s)
        dq = tl.dot(ds, k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _biased_dkdv(
    Q, K, Bias, DS, DO, LSE, DK, DV, H, T, S, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < S) & (d[None, :] < D)
    kv_at = (head * S + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        # Bias and dS are read as they lie, keys along the rows, so that the loads coalesce.
        in_s = (m[:, None] < T) & (n[None, :] < S)
        s_at = (head * T + m[:, None]) * S + n[None, :]
        bias = tl.load(Bias + s_at, mask=in_s, other=0.0).to(tl.float32)
        ds = tl.load(DS + s_at, mask=in_s, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 + bias * 1.4426950408889634 - lse[:, None]
        p = tl.exp2(tl.where(in_s, s, float("-inf")))
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
        dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, bias, o, lse = saved
    _, need_k, need_v, _ = needs or (True,) * 4
    B, H, T, D = q.shape
    S = k.shape[2]
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    sizes = (H, T, S, D, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq, dbias = torch.empty_like(q), torch.empty_like(bias)
    own, other, warps = _blocks(T, q)
    _biased_dq[(triton.cdiv(T, own), B * H)](
        q, k, v, bias, o, grad_o, lse, dq, dbias, *sizes,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=3,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None, dbias
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    own, other, warps = _blocks(S, q)
    _biased_dkdv[(triton.cdiv(S, own), B * H)](
        q, k, bias, dbias, grad_o, lse, dk, dv, *sizes,
        BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return dq, dk, dv, dbias


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 48, "D": 32},
    {"B": 2, "H": 1, "T": 45, "S": 71, "D": 20},
    {"B": 1, "H": 2, "T": 33, "S": 40, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 1024, "S": 1024, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, D), (B, H, T, S))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, bias):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
