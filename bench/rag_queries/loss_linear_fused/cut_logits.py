import torch
import triton
import triton.language as tl


@triton.jit
def _lse_of_products(E, Cw, LSE, NEG, Y, B, D, V, BB: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    y = tl.load(Y + b, mask=b < B, other=-1)
    m = tl.full((BB,), float("-inf"), tl.float32)
    z = tl.zeros((BB,), tl.float32)
    at = tl.zeros((BB,), tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        acc = tl.zeros((BB, BV), tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            e = tl.load(E + b[:, None] * D + d[None, :], mask=(b < B)[:, None] & (d < D)[None, :], other=0.0)
            c = tl.load(Cw + v[:, None] * D + d[None, :], mask=(v < V)[:, None] & (d < D)[None, :], other=0.0)
            acc = tl.dot(e, c.T, acc)
        acc = tl.where((v < V)[None, :], acc, float("-inf"))
        at += tl.sum(tl.where(v[None, :] == y[:, None], acc, 0.0), 1)
        n = tl.maximum(m, tl.max(acc, 1))
        z = z * tl.exp(m - n) + tl.sum(tl.exp(acc - n[:, None]), 1)
        m = n
    tl.store(LSE + b, m + tl.log(z), mask=b < B)
    tl.store(NEG + b, m + tl.log(z) - at, mask=b < B)


def cce(e, classifier, targets):
    """Loss of hidden states against a classifier; the matrix of logits lives in registers alone."""
    B, D = e.shape
    V = classifier.shape[0]
    lse, nll = e.new_empty(B, dtype=torch.float32), e.new_empty(B, dtype=torch.float32)
    _lse_of_products[(triton.cdiv(B, 64),)](e, classifier, lse, nll, targets, B, D, V, 64, 128, 32)
    return nll.mean(), lse
