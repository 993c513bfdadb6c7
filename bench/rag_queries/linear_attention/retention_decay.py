import torch
import triton
import triton.language as tl


@triton.jit
def retnet_parallel(Q, K, V, O, T, DK: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, B: tl.constexpr):
    i, bh = tl.program_id(0), tl.program_id(1)
    gamma = tl.math.log2(1 - tl.math.exp2(-5.0 - (bh % H)))
    row = i * B + tl.arange(0, B)
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    q = tl.load(Q + bh * T * DK + row[:, None] * DK + dk[None, :], mask=row[:, None] < T, other=0.0)
    out = tl.zeros((B, DV), tl.float32)
    for j in range(0, i + 1):
        col = j * B + tl.arange(0, B)
        k = tl.load(K + bh * T * DK + col[None, :] * DK + dk[:, None], mask=col[None, :] < T, other=0.0)
        v = tl.load(V + bh * T * DV + col[:, None] * DV + dv[None, :], mask=col[:, None] < T, other=0.0)
        gap = row[:, None] - col[None, :]
        w = tl.where(gap >= 0, tl.math.exp2(gap * gamma), 0.0)
        out += tl.dot((tl.dot(q, k) * w).to(v.dtype), v)
    tl.store(O + bh * T * DV + row[:, None] * DV + dv[None, :], out, mask=row[:, None] < T)


def retention(q, k, v):
    b, h, t, dk = q.shape
    dv = v.shape[-1]
    o = torch.empty_like(v)
    retnet_parallel[(triton.cdiv(t, 64), b * h)](q, k, v, o, t, dk, dv, h, 64)
    return o
