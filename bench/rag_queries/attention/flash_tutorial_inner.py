import torch
import triton
import triton.language as tl


@triton.jit
def _attn_fwd_inner(
    acc,
    l_i,
    m_i,
    q,
    K_block_ptr,
    V_block_ptr,
    start_m,
    qk_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGE: tl.constexpr,
    offs_m: tl.constexpr,
    offs_n: tl.constexpr,
    N_CTX: tl.constexpr,
):
    if STAGE == 1:
        lo, hi = 0, start_m * BLOCK_M
    elif STAGE == 2:
        lo, hi = start_m * BLOCK_M, (start_m + 1) * BLOCK_M
    else:
        lo, hi = 0, N_CTX
    K_block_ptr = tl.advance(K_block_ptr, (0, lo))
    V_block_ptr = tl.advance(V_block_ptr, (lo, 0))
    for start_n in range(lo, hi, BLOCK_N):
        qk = tl.dot(q, tl.load(K_block_ptr)) * qk_scale
        if STAGE == 2:
            qk += tl.where(offs_m[:, None] >= (start_n + offs_n[None, :]), 0, -1.0e6)
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(tl.float16), tl.load(V_block_ptr), acc)
        m_i = m_ij
        K_block_ptr = tl.advance(K_block_ptr, (0, BLOCK_N))
        V_block_ptr = tl.advance(V_block_ptr, (BLOCK_N, 0))
    return acc, l_i, m_i


@triton.jit
def _attn_fwd(
    Q, K, V, sm_scale, M, Out, stride_h, H, N_CTX, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    start_m = tl.program_id(0)
    off = tl.program_id(1).to(tl.int64) * stride_h
    Qb = tl.make_block_ptr(
        Q + off, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (start_m * BLOCK_M, 0), (BLOCK_M, HEAD_DIM), (1, 0)
    )
    Kb = tl.make_block_ptr(K + off, (HEAD_DIM, N_CTX), (1, HEAD_DIM), (0, 0), (HEAD_DIM, BLOCK_N), (0, 1))
    Vb = tl.make_block_ptr(V + off, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (0, 0), (BLOCK_N, HEAD_DIM), (1, 0))
    Ob = tl.make_block_ptr(
        Out + off, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (start_m * BLOCK_M, 0), (BLOCK_M, HEAD_DIM), (1, 0)
    )
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    q = tl.load(Qb)
    acc, l_i, m_i = _attn_fwd_inner(
        acc, l_i, m_i, q, Kb, Vb, start_m, sm_scale * 1.44269504, BLOCK_M, BLOCK_N, 1, offs_m, offs_n, N_CTX
    )
    acc, l_i, m_i = _attn_fwd_inner(
        acc, l_i, m_i, q, Kb, Vb, start_m, sm_scale * 1.44269504, BLOCK_M, BLOCK_N, 2, offs_m, offs_n, N_CTX
    )
    m_i += tl.math.log2(l_i)
    tl.store(M + tl.program_id(1) * N_CTX + offs_m, m_i)
    tl.store(Ob, (acc / l_i[:, None]).to(Out.type.element_ty))


class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sm_scale):
        o = torch.empty_like(q)
        B, H, T, D = q.shape
        M = torch.empty((B * H, T), device=q.device, dtype=torch.float32)
        _attn_fwd[(triton.cdiv(T, 128), B * H)](q, k, v, sm_scale, M, o, q.stride(1), H, T, D, 128, 64)
        ctx.save_for_backward(q, k, v, o, M)
        return o
