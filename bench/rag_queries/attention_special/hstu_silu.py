import torch
import triton
import triton.language as tl


@triton.jit
def _hstu_attn_fwd(Q, K, V, Out, seq_offsets, alpha, MAX_SEQ, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    off_z, off_h = tl.program_id(1) // H, tl.program_id(1) % H
    start = tl.load(seq_offsets + off_z)
    n = tl.load(seq_offsets + off_z + 1) - start
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(Q + ((start + m) * H + off_h)[:, None] * D + d[None, :], mask=m[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    for j in range(0, tl.minimum(n, (tl.program_id(0) + 1) * BM), BN):
        c = j + tl.arange(0, BN)
        k = tl.load(K + ((start + c) * H + off_h)[None, :] * D + d[:, None], mask=c[None, :] < n, other=0.0)
        v = tl.load(V + ((start + c) * H + off_h)[:, None] * D + d[None, :], mask=c[:, None] < n, other=0.0)
        qk = tl.dot(q, k) * alpha
        silu = qk * tl.sigmoid(qk) * (1.0 / MAX_SEQ)
        silu = tl.where(m[:, None] >= c[None, :], silu, 0)
        acc += tl.dot(silu.to(v.dtype), v)
    tl.store(Out + ((start + m) * H + off_h)[:, None] * D + d[None, :], acc, mask=m[:, None] < n)


def ragged_hstu_attention(q, k, v, seq_offsets, alpha, max_seq_len):
    L, H, D = q.shape
    out = torch.empty_like(v)
    _hstu_attn_fwd[(triton.cdiv(max_seq_len, 64), (seq_offsets.numel() - 1) * H)](
        q, k, v, out, seq_offsets, alpha, max_seq_len, H, D, 64, 64
    )
    return out
