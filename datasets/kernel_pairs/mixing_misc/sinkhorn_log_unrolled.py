"""Sinkhorn normalisation in the log domain, differentiated through all of its steps with half of the iterates saved.

    u_t = -logsumexp over columns of (z + v_{t-1}),    v_t = -logsumexp over rows of (z + u_t),    v_0 = 0
    P = exp(z + u_T + v_T)

The forward leaves the column potentials v_t. The backward goes from the last step to the first in registers: u_t is
recomputed from v_{t-1}, and both softmax matrices of a step are one exponential of z, u and v.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sinkhorn_log_unrolled",
    "family": "mixing_misc",
    "op": "sinkhorn",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "recompute", "row-local", "strided-cotangent"),
    "saves": ("potentials: fp32 (iters + 1, B, M)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _logsumexp(z, axis: tl.constexpr):
    top = tl.max(z, axis)
    return top + tl.log(tl.sum(tl.exp(z - tl.expand_dims(top, axis)), axis))


@triton.jit
def _log_sinkhorn_fwd(
    Z, P, Potentials, N, M, inverse_tau, ITERS, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    # A whole matrix (N, M) in registers, one for each program. Outside of it z is so low that exp gives zero.
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_M)
    at = (matrix * N + i[:, None]) * M + j[None, :]
    inside = (i[:, None] < N) & (j[None, :] < M)
    z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32) * inverse_tau
    z = tl.where(inside, z, -1.0e9)
    u = tl.zeros((BLOCK_N,), tl.float32)
    v = tl.zeros((BLOCK_M,), tl.float32)
    place = Potentials + matrix * M + j
    tl.store(place, v, mask=j < M)
    for _ in range(ITERS):
        u = tl.where(i < N, -_logsumexp(z + v[None, :], 1), 0.0)
        v = tl.where(j < M, -_logsumexp(z + u[:, None], 0), 0.0)
        place += tl.num_programs(0).to(tl.int64) * M
        tl.store(place, v, mask=j < M)
    tl.store(P + at, tl.exp(z + u[:, None] + v[None, :]), mask=inside)


def _tile(N, M):
    BLOCK_N, BLOCK_M = triton.next_power_of_2(N), triton.next_power_of_2(M)
    return BLOCK_N, BLOCK_M, max(1, min(8, BLOCK_N * BLOCK_M // 1024))


def forward(logits, tau=0.5, iters=10):
    """Logits (B, N, M), at most about 128 x 128; P has columns that sum to one, and rows nearly (N = M)."""
    logits = logits.contiguous()
    B, N, M = logits.shape
    p = torch.empty_like(logits)
    potentials = torch.empty(iters + 1, B, M, device=logits.device, dtype=torch.float32)
    BLOCK_N, BLOCK_M, warps = _tile(N, M)
    _log_sinkhorn_fwd[(B,)](
        logits, p, potentials, N, M, 1.0 / tau, iters, BLOCK_N=BLOCK_N, BLOCK_M=BLOCK_M, num_warps=warps
    )
    return p, (logits, potentials, tau)


# --- backward ---
@triton.jit
def _log_sinkhorn_bwd(
    DP, Z, Potentials, DZ, N, M, inverse_tau, ITERS, dp_b, dp_i, dp_j, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_M)
    at = (matrix * N + i[:, None]) * M + j[None, :]
    inside = (i[:, None] < N) & (j[None, :] < M)
    z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32) * inverse_tau
    z = tl.where(inside, z, -1.0e9)
    dp_at = matrix * dp_b + i[:, None].to(tl.int64) * dp_i + j[None, :].to(tl.int64) * dp_j
    dp = tl.load(DP + dp_at, mask=inside, other=0.0).to(tl.float32)
    step = tl.num_programs(0).to(tl.int64) * M
    place = Potentials + ITERS * step + matrix * M + j
    v = tl.load(place, mask=j < M, other=0.0)
    before = tl.load(place - step, mask=j < M, other=0.0)
    u = tl.where(i < N, -_logsumexp(z + before[None, :], 1), 0.0)
    # d log P, which z, u and v enter alike.
    dz = dp * tl.exp(z + u[:, None] + v[None, :])
    du = tl.sum(dz, 1)
    dv = tl.sum(dz, 0)
    for back in range(ITERS):
        # v = -lse(z + u): its softmax over rows is exp(z + u + v).
        flow = dv[None, :] * tl.exp(z + u[:, None] + v[None, :])
        dz -= flow
        du -= tl.sum(flow, 1)
        # u = -lse(z + before): likewise with the potentials of the step before.
        flow = du[:, None] * tl.exp(z + u[:, None] + before[None, :])
        dz -= flow
        dv = -tl.sum(flow, 0)
        du = tl.zeros((BLOCK_N,), tl.float32)
        place -= step
        v = before
        # Behind the first step there is nothing to load, and what is loaded would not be used.
        before = tl.load(place - step, mask=(j < M) & (back < ITERS - 1), other=0.0)
        u = tl.where(i < N, -_logsumexp(z + before[None, :], 1), 0.0)
    tl.store(DZ + at, dz * inverse_tau, mask=inside)


def backward(saved, grad_p, needs=None):
    logits, potentials, tau = saved
    B, N, M = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK_N, BLOCK_M, warps = _tile(N, M)
    _log_sinkhorn_bwd[(B,)](
        grad_p, logits, potentials, dlogits, N, M, 1.0 / tau, potentials.shape[0] - 1, *grad_p.stride(),
        BLOCK_N=BLOCK_N, BLOCK_M=BLOCK_M, num_warps=warps,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"B": 3, "N": 16, "M": 16, "iters": 5},
    {"B": 2, "N": 21, "M": 13, "iters": 4},
    {"B": 3, "N": 8, "M": 24, "iters": 3, "dtype": "bfloat16"},
)
BENCH = ({"B": 2048, "N": 64, "M": 64, "iters": 10, "dtype": "float32"},)


def make_args(B, N, M, iters, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, M, generator=g).to(device=device, dtype=getattr(torch, dtype)), 0.5, iters


def reference(logits, tau=0.5, iters=10):
    log_p = logits.float() / tau
    for _ in range(iters):
        log_p = log_p - log_p.logsumexp(2, keepdim=True)
        log_p = log_p - log_p.logsumexp(1, keepdim=True)
    return log_p.exp().to(logits.dtype)
