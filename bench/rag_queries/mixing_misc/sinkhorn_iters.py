import torch
import triton
import triton.language as tl


@triton.jit
def _sinkhorn(cost, plan, n_iters, eps, N: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, N)
    p = b * N * N + i[:, None] * N + i[None, :]
    k = -tl.load(cost + p) / eps
    for _ in range(n_iters):
        m = tl.max(k, 1)
        k = k - (m + tl.log(tl.sum(tl.exp(k - m[:, None]), 1)))[:, None]
        m = tl.max(k, 0)
        k = k - (m + tl.log(tl.sum(tl.exp(k - m[None, :]), 0)))[None, :]
    tl.store(plan + p, tl.exp(k))


def optimal_transport(cost, n_iters=20, eps=0.1):
    B, N, _ = cost.shape
    plan = torch.empty_like(cost)
    _sinkhorn[(B,)](cost, plan, n_iters, eps, N)
    return plan
