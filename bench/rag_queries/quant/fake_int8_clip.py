import torch
import triton
import triton.language as tl


@triton.jit
def fq(x, sc, zp, o, C, L, lo, hi, B: tl.constexpr):
    c = tl.program_id(0)
    i = tl.program_id(1) * B + tl.arange(0, B)
    s = tl.load(sc + c)
    z = tl.load(zp + c)
    v = tl.load(x + c * L + i, mask=i < L)
    q = tl.extra.cuda.libdevice.rint(v / s) + z
    q = tl.minimum(tl.maximum(q, lo), hi)
    tl.store(o + c * L + i, (q - z) * s, mask=i < L)


def fake_quantize_per_channel(x, scale, zero_point, bits=8):
    C, L = x.shape
    o = torch.empty_like(x)
    fq[(C, triton.cdiv(L, 1024))](x, scale, zero_point, o, C, L, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, B=1024)
    return o
