import torch
import triton
import triton.language as tl


@triton.jit
def fused_recurrent_delta_rule_fwd_kernel(
    q,
    k,
    v,
    beta,
    u,
    o,
    h0,
    ht,
    scale,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
):
    i_v, i_nh = tl.program_id(0), tl.program_id(1)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_h = tl.zeros([BV, BK], dtype=tl.float32)
    p_h = i_nh * K * V + o_k[None, :] * V + o_v[:, None]
    if USE_INITIAL_STATE:
        b_h += tl.load(h0 + p_h).to(tl.float32)
    for t in range(0, T):
        b_k = tl.load(k + (i_nh * T + t) * K + o_k).to(tl.float32)
        b_q = tl.load(q + (i_nh * T + t) * K + o_k).to(tl.float32) * scale
        b_v = tl.load(v + (i_nh * T + t) * V + o_v).to(tl.float32)
        b_v -= tl.sum(b_h * b_k[None, :], axis=1)
        tl.store(u + (i_nh * T + t) * V + o_v, b_v)
        b_v *= tl.load(beta + i_nh * T + t).to(tl.float32)
        b_h += b_k[None, :] * b_v[:, None]
        tl.store(o + (i_nh * T + t) * V + o_v, tl.sum(b_h * b_q[None, :], axis=1))
    if STORE_FINAL_STATE:
        tl.store(ht + p_h, b_h)


class FusedRecurrentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, scale, initial_state, output_final_state):
        B, H, T, K = q.shape
        V = v.shape[-1]
        o, u = torch.empty_like(v), torch.empty_like(v)
        ht = q.new_empty(B, H, K, V) if output_final_state else None
        fused_recurrent_delta_rule_fwd_kernel[(triton.cdiv(V, 8), B * H)](
            q, k, v, beta, u, o, initial_state, ht, scale, T, K, V, K, 8, initial_state is not None, output_final_state
        )
        ctx.save_for_backward(q, k, u, beta, initial_state)
        return o, ht
