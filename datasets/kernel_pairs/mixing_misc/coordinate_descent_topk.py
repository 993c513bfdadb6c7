"""Differentiable top-k by coordinate descent: an iteration's state is one number a row, so all of them are saved.

    a_t = eps (log k - logsumexp((s + b_{t-1}) / eps)),    b_t = -relu(s + a_t),    y = exp((s + a_T + b_T) / eps)

with b_0 = -s. Vectors b_t follow from the numbers a_t, and so does the softmax of a step without its normaliser:
exp((s + b_{t-1} + a_t) / eps) / k. The backward unrolls all steps with the row in registers and one sum in each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "coordinate_descent_topk",
    "family": "mixing_misc",
    "op": "soft_topk",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "recompute", "row-local", "strided-cotangent"),
    "saves": ("levels: fp32 (M, iters)",),
    "grads": ("scores",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _descent_fwd(S, Y, Levels, N, log_k, eps, ITERS, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    s = tl.load(S + row * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    # s + b_0 is zero everywhere: the first level is known.
    level = eps * (log_k - tl.log(N + 0.0))
    tl.store(Levels + row * ITERS, level)
    for t in range(1, ITERS):
        # s + b = min(s, -a): finite at the top, minus infinity outside the row.
        capped = tl.minimum(s, -level) / eps
        top = tl.max(capped, 0)
        level = eps * (log_k - top - tl.log(tl.sum(tl.exp(capped - top), 0)))
        tl.store(Levels + row * ITERS + t, level)
    tl.store(Y + row * N + n, tl.exp(tl.minimum(s + level, 0.0) / eps), mask=n < N)


def forward(scores, log_k, eps=0.3, iters=20):
    """Scores (M, N) with N up to about 16384; `log_k` is the logarithm of the number of winners, which may be real."""
    scores = scores.contiguous()
    M, N = scores.shape
    y = torch.empty_like(scores)
    levels = torch.empty(M, iters, device=scores.device, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    _descent_fwd[(M,)](
        scores, y, levels, N, log_k, eps, iters, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512))
    )
    return y, (scores, levels, log_k, eps)


# --- backward ---
@triton.jit
def _descent_bwd(DY, S, Levels, DS, N, log_k, inverse_eps, ITERS, dy_m, dy_n, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    inside = n < N
    s = tl.load(S + row * N + n, mask=inside, other=float("-inf")).to(tl.float32)
    dy = tl.load(DY + row * dy_m + n.to(tl.int64) * dy_n, mask=inside, other=0.0).to(tl.float32)
    level = tl.load(Levels + row * ITERS + ITERS - 1)
    # d(s + a + b), which all three enter alike.
    db = dy * tl.exp(tl.minimum(s + level, 0.0) * inverse_eps) * inverse_eps
    ds = db
    da = tl.sum(db, 0)
    for back in range(ITERS - 1):
        # b = -relu(s + a)
        through = tl.where(s + level > 0.0, db, 0.0)
        ds -= through
        da -= tl.sum(through, 0)
        # a = eps (log k - logsumexp((s + b before) / eps))
        before = tl.load(Levels + row * ITERS + ITERS - 2 - back)
        weight = tl.exp((tl.minimum(s, -before) + level) * inverse_eps - log_k)
        db = -da * weight
        ds += db
        da = 0.0
        level = before
    # The first level is a constant: what reached b_1 still goes to s.
    ds -= tl.where(s + level > 0.0, db, 0.0)
    tl.store(DS + row * N + n, ds, mask=inside)


def backward(saved, grad_y, needs=None):
    scores, levels, log_k, eps = saved
    M, N = scores.shape
    dscores = torch.empty_like(scores)
    BLOCK_N = triton.next_power_of_2(N)
    _descent_bwd[(M,)](
        grad_y, scores, levels, dscores, N, log_k, 1.0 / eps, levels.shape[1], *grad_y.stride(),
        BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512)),
    )  # fmt: skip
    return dscores


# --- check ---
SWEEP = (
    {"M": 6, "N": 64, "iters": 8},
    {"M": 5, "N": 203, "iters": 12},
    {"M": 3, "N": 48, "iters": 1},
    {"M": 4, "N": 72, "iters": 5, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 4096, "iters": 20, "dtype": "bfloat16"},)


def make_args(M, N, iters=20, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return scores, torch.tensor(max(1.0, N / 8)).log().item(), 0.3, iters


def reference(scores, log_k, eps=0.3, iters=20):
    s = scores.float()
    b = -s
    for _ in range(iters):
        a = eps * (log_k - torch.logsumexp((s + b) / eps, 1, keepdim=True))
        b = -torch.relu(s + a)
    return ((s + a + b) / eps).exp().to(scores.dtype)
