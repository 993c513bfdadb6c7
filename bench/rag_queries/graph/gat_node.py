import torch
import triton
import triton.language as tl


@triton.jit
def gat_aggregate(rowptr, col, el, er, feat, out, alpha, H: tl.constexpr, D: tl.constexpr, slope):
    """Attention of a node over its incoming edges, a head a program."""
    v, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    lo, hi = tl.load(rowptr + v), tl.load(rowptr + v + 1)
    dst = tl.load(er + v * H + h)
    m = float("-inf")
    for e in range(lo, hi):
        u = tl.load(col + e)
        s = tl.load(el + u * H + h) + dst
        m = tl.maximum(m, tl.where(s > 0, s, slope * s))
    z = 0.0
    acc = tl.zeros((D,), tl.float32)
    for e in range(lo, hi):
        u = tl.load(col + e)
        s = tl.load(el + u * H + h) + dst
        p = tl.exp(tl.where(s > 0, s, slope * s) - m)
        tl.store(alpha + e * H + h, p)
        z += p
        acc += p * tl.load(feat + (u * H + h) * D + d)
    tl.store(out + (v * H + h) * D + d, acc / z)


def gat_conv(rowptr, col, el, er, feat, negative_slope=0.2):
    N, H, D = feat.shape
    out = torch.empty_like(feat)
    alpha = feat.new_empty(col.numel(), H)
    gat_aggregate[(N, H)](rowptr, col, el, er, feat, out, alpha, H, D, negative_slope)
    return out
