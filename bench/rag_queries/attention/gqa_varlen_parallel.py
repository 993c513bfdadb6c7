import torch
import triton
import triton.language as tl


@triton.jit
def parallel_attn_fwd_kernel(
    q,
    k,
    v,
    o,
    lse,
    scale,
    cu,
    idx,
    T,
    H: tl.constexpr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    i_n, i_t = tl.load(idx + i_t * 2), tl.load(idx + i_t * 2 + 1)
    bos = tl.load(cu + i_n)
    T = tl.load(cu + i_n + 1) - bos
    p_q = tl.make_block_ptr(q + (bos * HQ + i_h) * D, (T, D), (HQ * D, 1), (i_t * BT, 0), (BT, D), (1, 0))
    b_q = tl.load(p_q, boundary_check=(0, 1))
    b_q = (b_q * scale).to(b_q.dtype)
    b_o = tl.zeros([BT, D], dtype=tl.float32)
    b_m = tl.full([BT], float("-inf"), dtype=tl.float32)
    b_acc = tl.zeros([BT], dtype=tl.float32)
    o_q = i_t * BT + tl.arange(0, BT)
    for i_s in range(0, min((i_t + 1) * BT, T), BS):
        p_k = tl.make_block_ptr(k + (bos * H + i_h // G) * D, (D, T), (1, H * D), (0, i_s), (D, BS), (0, 1))
        p_v = tl.make_block_ptr(v + (bos * H + i_h // G) * D, (T, D), (H * D, 1), (i_s, 0), (BS, D), (1, 0))
        o_k = i_s + tl.arange(0, BS)
        b_s = tl.dot(b_q, tl.load(p_k, boundary_check=(0, 1)))
        b_s = tl.where((o_q[:, None] >= o_k[None, :]) & (o_k[None, :] < T), b_s, float("-inf"))
        b_mp = b_m
        b_m = tl.maximum(b_m, tl.max(b_s, 1))
        b_r = tl.exp(b_mp - b_m)
        b_p = tl.exp(b_s - b_m[:, None])
        b_acc = b_acc * b_r + tl.sum(b_p, 1)
        b_o = b_o * b_r[:, None] + tl.dot(b_p.to(b_q.dtype), tl.load(p_v, boundary_check=(0, 1)))
    b_o = b_o / b_acc[:, None]
    p_o = tl.make_block_ptr(o + (bos * HQ + i_h) * D, (T, D), (HQ * D, 1), (i_t * BT, 0), (BT, D), (1, 0))
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0, 1))
    tl.store(lse + (bos + o_q) * HQ + i_h, b_m + tl.log(b_acc), mask=o_q < T)


def parallel_attn(q, k, v, scale, cu_seqlens, chunk_indices):
    B, T, HQ, D = q.shape
    H = k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, T, HQ, dtype=torch.float, device=q.device)
    parallel_attn_fwd_kernel[(len(chunk_indices), HQ)](
        q, k, v, o, lse, scale, cu_seqlens, chunk_indices, T, H, HQ, HQ // H, D, 64, 64
    )
    return o, lse
