"""Delta rule: a matrix memory per head that is corrected towards each value it is asked to hold.

    e[t] = v[t] - k[t] S[t]
    S[t + 1] = S[t] + beta[t] k[t]^T e[t]
    o[t] = scale * q[t] S[t + 1]

with row vectors q, k of width K, v of width V, and the memory S of shape (K, V), which starts at zero.
"""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def delta_rule_fwd_kernel(
    Q, K, V, BETA, O, T, scale, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = keys < DK, values < DV
    b_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for t in range(0, T):
        at = head * T + t
        b_q = tl.load(Q + at * DK + keys, mask=k_mask, other=0.0).to(tl.float32) * scale
        b_k = tl.load(K + at * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_v = tl.load(V + at * DV + values, mask=v_mask, other=0.0).to(tl.float32)
        b_beta = tl.load(BETA + at).to(tl.float32)
        b_error = b_v - tl.sum(b_k[:, None] * b_state, axis=0)
        b_state += b_beta * b_k[:, None] * b_error[None, :]
        tl.store(O + at * DV + values, tl.sum(b_q[:, None] * b_state, axis=0), mask=v_mask)


@autodiff(inputs_require_grad=("q", "k", "v", "beta"))
def delta_rule(q, k, v, beta, scale=None):
    """Run the rule over T for q, k (B, H, T, K), v (B, H, T, V), beta (B, H, T); returns o like v.

    `scale` defaults to 1 / sqrt(K).
    """
    B, H, T, K = k.shape
    V = v.shape[-1]
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    o = torch.empty_like(v)
    BLOCK_V = min(triton.next_power_of_2(V), 32)
    delta_rule_fwd_kernel[(triton.cdiv(V, BLOCK_V), B * H)](
        q,
        k,
        v,
        beta,
        o,
        T,
        K**-0.5 if scale is None else scale,
        DK=K,
        DV=V,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=BLOCK_V,
    )
    return o


SWEEP = [
    dict(B=4, H=16, T=1024, K=64, V=64),
    dict(B=4, H=16, T=1024, K=64, V=64, dtype="bfloat16"),
    dict(B=2, H=3, T=19, K=20, V=36),
]


def make_args(B, H, T, K, V, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    q, k = torch.randn(2, B, H, T, K, device=device)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(B, H, T, V, device=device)
    beta = torch.rand(B, H, T, device=device)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta


def reference(q, k, v, beta, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=beta.dtype, device=k.device)
    outputs = []
    for t in range(k.shape[2]):
        row = k[:, :, t, :, None].to(beta.dtype)
        error = v[:, :, t].to(beta.dtype) - (row * state).sum(dim=-2)
        state = state + beta[:, :, t, None, None] * row * error[:, :, None, :]
        outputs.append((scale * q[:, :, t, :, None].to(beta.dtype) * state).sum(dim=-2))
    return torch.stack(outputs, dim=2).to(v.dtype)
