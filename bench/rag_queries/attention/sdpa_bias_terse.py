import torch
import triton
import triton.language as tl


@triton.jit
def fk(q, k, v, b, o, L, s, T, S, D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr):
    i = tl.program_id(0) * X + tl.arange(0, X)
    h = tl.program_id(1)
    d = tl.arange(0, D)
    a = tl.load(q + h * T * D + i[:, None] * D + d[None, :], mask=i[:, None] < T, other=0.0)
    m = tl.full((X,), -1e30, tl.float32)
    z = tl.zeros((X,), tl.float32)
    r = tl.zeros((X, D), tl.float32)
    for j0 in range(0, S, Y):
        j = j0 + tl.arange(0, Y)
        c = tl.load(k + h * S * D + j[None, :] * D + d[:, None], mask=j[None, :] < S, other=0.0)
        e = tl.dot(a, c) * s + tl.load(
            b + h * T * S + i[:, None] * S + j[None, :], mask=(i < T)[:, None] & (j < S)[None, :], other=-1e30
        )
        n = tl.maximum(m, tl.max(e, 1))
        p = tl.exp(e - n[:, None])
        f = tl.exp(m - n)
        z = z * f + tl.sum(p, 1)
        r = r * f[:, None] + tl.dot(
            p, tl.load(v + h * S * D + j[:, None] * D + d[None, :], mask=j[:, None] < S, other=0.0)
        )
        m = n
    tl.store(o + h * T * D + i[:, None] * D + d[None, :], r / z[:, None], mask=i[:, None] < T)
    tl.store(L + h * T + i, m + tl.log(z), mask=i < T)


def mha(q, k, v, bias):
    H, T, D = q.shape
    S = k.shape[1]
    o, L = torch.empty_like(q), q.new_empty(H, T)
    fk[(triton.cdiv(T, 32), H)](q, k, v, bias, o, L, D**-0.5, T, S, D, 32, 32)
    return o
