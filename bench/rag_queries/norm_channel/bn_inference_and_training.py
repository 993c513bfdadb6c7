import torch
import triton
import triton.language as tl


@triton.jit
def bn_stats(x, out_mean, out_var, run_mean, run_var, momentum, B, F, S, BM: tl.constexpr, BN: tl.constexpr):
    f = tl.program_id(0)
    total = 0.0
    m2 = 0.0
    count = B * S
    for b0 in range(0, B, BM):
        rb = b0 + tl.arange(0, BM)
        for s0 in range(0, S, BN):
            rs = s0 + tl.arange(0, BN)
            ok = (rb[:, None] < B) & (rs[None, :] < S)
            v = tl.load(x + rb[:, None] * F * S + f * S + rs[None, :], mask=ok, other=0.0).to(tl.float32)
            total += tl.sum(v)
            m2 += tl.sum(v * v)
    mu = total / count
    var = m2 / count - mu * mu
    tl.store(out_mean + f, mu)
    tl.store(out_var + f, tl.rsqrt(var + 1e-5))
    old = tl.load(run_mean + f)
    tl.store(run_mean + f, (1 - momentum) * old + momentum * mu)
    tl.store(run_var + f, (1 - momentum) * tl.load(run_var + f) + momentum * var * count / (count - 1))


@triton.jit
def bn_apply(x, y, mean, inv, gamma, beta, F, S, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = (i // S) % F
    v = tl.load(x + i, mask=i < n)
    v = (v - tl.load(mean + f)) * tl.load(inv + f) * tl.load(gamma + f) + tl.load(beta + f)
    tl.store(y + i, v, mask=i < n)


def batch_norm_2d(x, gamma, beta, run_mean, run_var, momentum=0.1):
    B, F, H, Wd = x.shape
    mean = torch.empty(F, device=x.device)
    inv = torch.empty(F, device=x.device)
    y = torch.empty_like(x)
    bn_stats[(F,)](x, mean, inv, run_mean, run_var, momentum, B, F, H * Wd, BM=8, BN=128)
    bn_apply[(triton.cdiv(x.numel(), 1024),)](x, y, mean, inv, gamma, beta, F, H * Wd, x.numel(), BLOCK=1024)
    return y
