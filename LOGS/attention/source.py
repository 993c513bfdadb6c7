"""Flash attention forward, causal or not, on plain pointers with strides; log-sum-exp is returned for a backward."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

CONFIGS = [
    triton.Config(dict(BLOCK_M=128, BLOCK_N=64), num_warps=8, num_stages=3),
    triton.Config(dict(BLOCK_M=128, BLOCK_N=32), num_warps=4, num_stages=4),
    triton.Config(dict(BLOCK_M=64, BLOCK_N=64), num_warps=4, num_stages=3),
]


@triton.autotune(configs=CONFIGS, key=["T", "S", "D", "CAUSAL"])
@triton.jit
def attention_fwd_kernel(
    Q,
    K,
    V,
    O,
    LSE,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_od,
    sm_scale,
    H,
    T,
    S,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    O += batch * stride_ob + head * stride_oh

    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < T)[:, None] & (dims < D)[None, :]
    b_q = tl.load(Q + rows[:, None] * stride_qt + dims[None, :] * stride_qd, mask=q_mask, other=0.0)

    LOG2E: tl.constexpr = 1.4426950408889634
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # Queries and keys end together: query t sees keys up to t + S - T.
    end = S
    if CAUSAL:
        end = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M + S - T)
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        kv_mask = (keys < S)[:, None] & (dims < D)[None, :]
        b_k = tl.load(K + keys[:, None] * stride_ks + dims[None, :] * stride_kd, mask=kv_mask, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (sm_scale * LOG2E)
        seen = (keys < S)[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] + S - T >= keys[None, :])
        b_s = tl.where(seen, b_s, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_alpha = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
        b_v = tl.load(V + keys[:, None] * stride_vs + dims[None, :] * stride_vd, mask=kv_mask, other=0.0)
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new

    b_o = b_acc / b_sum[:, None]
    tl.store(O + rows[:, None] * stride_ot + dims[None, :] * stride_od, b_o, mask=q_mask)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * T + rows, b_max / LOG2E + tl.log(b_sum), mask=rows < T)


@autodiff(inputs_require_grad=("q", "k", "v"), nondiff_outputs=(1,))
def attention(q, k, v, causal=False, sm_scale=None):
    """`softmax(sm_scale * q k^T) v` for q (B, H, T, D) and k, v (B, H, S, D) with S >= T where causal.

    Returns the output like q, and the rows' log-sum-exp (B, H, T) in float32. `sm_scale` defaults to 1 / sqrt(D).
    """
    B, H, T, D = q.shape
    S = k.shape[2]
    assert not causal or S >= T, "a causal query must see at least one key"
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    o = torch.empty((B, H, T, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)

    def grid(meta):
        return triton.cdiv(T, meta["BLOCK_M"]), B * H

    attention_fwd_kernel[grid](
        q,
        k,
        v,
        o,
        lse,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *o.stride(),
        sm_scale,
        H,
        T,
        S,
        D=D,
        CAUSAL=causal,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
    )
    return o, lse


SWEEP = [
    dict(B=4, H=16, T=2048, S=2048, D=64, causal=True, dtype="float16"),
    dict(B=4, H=16, T=2048, S=2048, D=128, causal=False, dtype="bfloat16"),
    dict(B=1, H=4, T=1021, S=1021, D=64, causal=True),
    dict(B=2, H=3, T=77, S=133, D=48, causal=False, sm_scale=0.3),
    dict(B=1, H=2, T=33, S=65, D=32, causal=True),
    dict(B=2, H=32, T=16384, S=16384, D=128, causal=True, dtype="bfloat16", required=False),
]


def make_args(B, H, T, S, D, causal, sm_scale=None, dtype="float32", device="cuda"):
    # Stored as (B, T, H, D), as projections leave them: the kernel must honour the strides.
    q = torch.randn(B, T, H, D, device=device).to(getattr(torch, dtype)).transpose(1, 2)
    k, v = (torch.randn(B, S, H, D, device=device).to(getattr(torch, dtype)).transpose(1, 2) for _ in range(2))
    return q, k, v, causal, sm_scale


def reference(q, k, v, causal=False, sm_scale=None):
    T, S = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    scores = scale * (q @ k.transpose(-1, -2))
    if causal:
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)
