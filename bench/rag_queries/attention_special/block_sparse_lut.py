import torch
import triton
import triton.language as tl


@triton.jit
def sparse_attention_kernel(Q, K, V, O, LSE, row_ptr, col_idx, scale, T, D: tl.constexpr, BLK: tl.constexpr):
    """Visits only the key blocks that the layout lists for this query block."""
    qb, head = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BLK)
    d = tl.arange(0, D)
    base = head * T * D
    q = tl.load(Q + base + (qb * BLK + r)[:, None] * D + d[None, :])
    m = tl.full([BLK], float("-inf"), tl.float32)
    z = tl.zeros([BLK], tl.float32)
    acc = tl.zeros([BLK, D], tl.float32)
    for at in range(tl.load(row_ptr + qb), tl.load(row_ptr + qb + 1)):
        kb = tl.load(col_idx + at)
        k = tl.load(K + base + (kb * BLK + r)[None, :] * D + d[:, None])
        s = tl.dot(q, k) * scale
        s = tl.where((qb * BLK + r)[:, None] >= (kb * BLK + r)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        old = tl.exp(m - new)
        z = z * old + tl.sum(p, 1)
        v = tl.load(V + base + (kb * BLK + r)[:, None] * D + d[None, :])
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v)
        m = new
    tl.store(O + base + (qb * BLK + r)[:, None] * D + d[None, :], acc / z[:, None])
    tl.store(LSE + head * T + qb * BLK + r, m + tl.log(z))


def block_sparse_attention(q, k, v, row_ptr, col_idx, scale):
    H, T, D = q.shape
    o = torch.empty_like(q)
    lse = q.new_empty(H, T, dtype=torch.float32)
    sparse_attention_kernel[(T // 64, H)](q, k, v, o, lse, row_ptr, col_idx, scale, T, D, 64)
    return o, lse
