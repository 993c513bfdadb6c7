import torch
import triton
import triton.language as tl


@triton.jit
def chunk_gla_fwd_kernel_o(
    q, v, g, h, A, o, scale, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    i_v, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NT = tl.cdiv(T, BT)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        p_q = tl.make_block_ptr(q + i_bh * T * K, (T, K), (K, 1), (i_t * BT, i_k * BK), (BT, BK), (1, 0))
        p_g = tl.make_block_ptr(g + i_bh * T * K, (T, K), (K, 1), (i_t * BT, i_k * BK), (BT, BK), (1, 0))
        p_h = tl.make_block_ptr(h + (i_bh * NT + i_t) * K * V, (K, V), (V, 1), (i_k * BK, i_v * BV), (BK, BV), (1, 0))
        b_q = tl.load(p_q, boundary_check=(0, 1))
        b_g = tl.load(p_g, boundary_check=(0, 1))
        b_qg = (b_q * scale * tl.exp(b_g)).to(b_q.dtype)
        b_o += tl.dot(b_qg, tl.load(p_h, boundary_check=(0, 1)).to(b_qg.dtype))
    p_v = tl.make_block_ptr(v + i_bh * T * V, (T, V), (V, 1), (i_t * BT, i_v * BV), (BT, BV), (1, 0))
    p_A = tl.make_block_ptr(A + i_bh * T * BT, (T, BT), (BT, 1), (i_t * BT, 0), (BT, BT), (1, 0))
    b_A = tl.load(p_A, boundary_check=(0, 1))
    r = tl.arange(0, BT)
    b_A = tl.where(r[:, None] >= r[None, :], b_A, 0.0)
    b_o += tl.dot(b_A, tl.load(p_v, boundary_check=(0, 1)).to(b_A.dtype))
    p_o = tl.make_block_ptr(o + i_bh * T * V, (T, V), (V, 1), (i_t * BT, i_v * BV), (BT, BV), (1, 0))
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0, 1))


def chunk_gla_fwd_o(q, v, g_cumsum, A, h, scale, chunk_size=64):
    B, H, T, K = q.shape
    V = v.shape[-1]
    o = torch.empty_like(v)
    chunk_gla_fwd_kernel_o[(triton.cdiv(V, 64), triton.cdiv(T, chunk_size), B * H)](
        q, v, g_cumsum, h, A, o, scale, T, K, V, chunk_size, 64, 64
    )
    return o
