"""Gated linear recurrence of RWKV-6: a matrix state per head that decays per key channel, with a bonus for the present.

    o[t] = r[t] (S[t] + diag(u) k[t]^T v[t])
    S[t + 1] = diag(exp(w[t])) S[t] + k[t]^T v[t]

with row vectors r, k, w of width K, v of width V, and the state S of shape (K, V). `w` is the logarithm of the decay.
"""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def gated_recurrence_fwd_kernel(
    R,
    K,
    V,
    W,
    U,
    S0,
    O,
    S1,
    H,
    T,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # One program keeps all key channels and BLOCK_V value channels of one head's state in registers through all time.
    head = tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = keys < DK, values < DV
    state_mask = k_mask[:, None] & v_mask[None, :]
    state = head * DK * DV + keys[:, None] * DV + values[None, :]

    b_u = tl.load(U + (head % H) * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
    b_state = tl.load(S0 + state, mask=state_mask, other=0.0).to(tl.float32)
    for t in range(0, T):
        at = head * T + t
        b_r = tl.load(R + at * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_k = tl.load(K + at * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_w = tl.load(W + at * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_v = tl.load(V + at * DV + values, mask=v_mask, other=0.0).to(tl.float32)
        b_kv = b_k[:, None] * b_v[None, :]
        b_o = tl.sum(b_r[:, None] * (b_state + b_u[:, None] * b_kv), axis=0)
        tl.store(O + at * DV + values, b_o, mask=v_mask)
        b_state = tl.exp(b_w)[:, None] * b_state + b_kv
    tl.store(S1 + state, b_state, mask=state_mask)


@autodiff(inputs_require_grad=("r", "k", "v", "w", "u", "initial_state"))
def gated_recurrence(r, k, v, w, u, initial_state):
    """Run the recurrence over T for r, k, w (B, H, T, K), v (B, H, T, V), u (H, K) and initial_state (B, H, K, V).

    Returns o (B, H, T, V) like v and the final state in float32.
    """
    B, H, T, K = k.shape
    V = v.shape[-1]
    r, k, v, w, u, initial_state = (x.contiguous() for x in (r, k, v, w, u, initial_state))
    o = torch.empty_like(v)
    final_state = torch.empty((B, H, K, V), dtype=torch.float32, device=k.device)
    BLOCK_V = min(triton.next_power_of_2(V), 32)
    gated_recurrence_fwd_kernel[(triton.cdiv(V, BLOCK_V), B * H)](
        r,
        k,
        v,
        w,
        u,
        initial_state,
        o,
        final_state,
        H,
        T,
        DK=K,
        DV=V,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=BLOCK_V,
    )
    return o, final_state


SWEEP = [
    dict(B=8, H=32, T=1024, K=64, V=64),
    dict(B=8, H=32, T=1024, K=64, V=64, dtype="bfloat16"),
    dict(B=2, H=3, T=19, K=20, V=36),
]


def make_args(B, H, T, K, V, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    r, k = torch.randn(2, B, H, T, K, device=device).to(dtype)
    v = torch.randn(B, H, T, V, device=device).to(dtype)
    w = -torch.exp(torch.randn(B, H, T, K, device=device) - 1.0)  # decays between 0 and 1
    u = torch.randn(H, K, device=device)
    initial_state = torch.randn(B, H, K, V, device=device)
    return r, k, v, w, u, initial_state


def reference(r, k, v, w, u, initial_state):
    state, outputs = initial_state, []
    for t in range(k.shape[2]):
        kv = k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((r[:, :, t, :, None] * (state + u[None, :, :, None] * kv)).sum(dim=-2))
        state = torch.exp(w[:, :, t, :, None]) * state + kv
    return torch.stack(outputs, dim=2).to(v.dtype), state
