"""Causal ReLU attention with a linear distance bias: p_ij = relu(s_ij) / (i + 1), and dS passes where s is positive.

s_ij = scale q_i . k_j - slope_h (i - j), and the weights are divided by the number of visible keys, not by their sum.
There is no softmax: neither statistics nor delta, and rows do not couple. With a slope the scores of far keys are
mostly negative; a tile without a positive score is left before its second product, in all kernels alike.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_bias_relu_attention",
    "family": "attention_special",
    "op": "relu_attention",
    "schema": 1,
    "techniques": ("masking", "loop-swap", "owner-grid", "causal-bounds", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _biased_scores(left, right, i, j, slope, scale):
    # Scores with -1 where j lies after i; i and j carry their broadcast axes.
    s = tl.dot(left, tl.trans(right)) * scale - slope * (i - j).to(tl.float32)
    return tl.where(i >= j, s, -1.0)


@triton.jit
def _relu_fwd(
    Q, K, V, Slopes, Out, H, T, D, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    slope = tl.load(Slopes + head % H).to(tl.float32)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = (head * T + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        s = _biased_scores(q, k, m[:, None], n[None, :], slope, scale)
        if tl.max(tl.max(s, 1), 0) > 0:
            v = tl.load(V + kv_at, mask=in_kv, other=0.0)
            acc = tl.dot(tl.maximum(s, 0.0).to(v.dtype), v, acc)
    tl.store(Out + q_at, acc / (m + 1).to(tl.float32)[:, None], mask=in_q)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    if q.shape[2] <= 256:
        return 32, 16, 4
    return (64, 32, 4) if q.element_size() == 4 or q.shape[3] > 64 else (64, 64, 4)


def forward(q, k, v, slopes):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    out = torch.empty_like(q)
    own, other, warps = _blocks(q)
    _relu_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, slopes, out, H, T, D, D**-0.5,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return out, (q, k, v, slopes)


# --- backward ---
@triton.jit
def _relu_dq(
    Q, K, V, Slopes, DO, DQ, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    slope = tl.load(Slopes + head % H).to(tl.float32)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = (head * T + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        s = _biased_scores(q, k, m[:, None], n[None, :], slope, scale)
        if tl.max(tl.max(s, 1), 0) > 0:
            v = tl.load(V + kv_at, mask=in_kv, other=0.0)
            ds = tl.where(s > 0, tl.dot(do, tl.trans(v)), 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq)
    # The divisor belongs to the row: it is applied once, at the end.
    tl.store(DQ + q_at, dq * (scale / (m + 1).to(tl.float32))[:, None], mask=in_q)


@triton.jit
def _relu_dkdv(
    Q, K, V, Slopes, DO, DK, DV, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    slope = tl.load(Slopes + head % H).to(tl.float32)
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = (head * T + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        s = _biased_scores(k, q, m[None, :], n[:, None], slope, scale)
        # Rows past T have scores from the bias alone, which a negative slope makes positive; their do is 0.
        if tl.max(tl.max(s, 1), 0) > 0:
            do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
            weight = 1.0 / (m + 1).to(tl.float32)[None, :]
            dv = tl.dot((tl.maximum(s, 0.0) * weight).to(do.dtype), do, dv)
            ds = tl.where(s > 0, tl.dot(v, tl.trans(do)) * weight, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_out, needs=None):
    q, k, v, slopes = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    own, other, warps = _blocks(q)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, D, *grad_out.stride(), D**-0.5)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _relu_dq[grid](
            q,
            k,
            v,
            slopes,
            grad_out,
            dq,
            *sizes,
            BLOCK_M=own,
            BLOCK_N=other,
            BLOCK_D=BLOCK_D,
            num_warps=warps,
            num_stages=2,
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _relu_dkdv[grid](
            q, k, v, slopes, grad_out, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps
        )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 3, "T": 75, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    return q, k, v, torch.exp2(-8.0 * (torch.arange(H) + 1.0) / H).to(device)


def reference(q, k, v, slopes):
    at = torch.arange(q.shape[2], device=q.device)
    ago = at[:, None] - at[None, :]
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 - slopes.float()[:, None, None] * ago
    weights = torch.relu(s).tril() / (at + 1.0)[:, None]
    return weights.to(v.dtype) @ v
