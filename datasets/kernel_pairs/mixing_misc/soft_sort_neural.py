"""NeuralSort, a relaxed permutation of each row of scores: pairwise differences come back as sums of signs.

    P[i] = softmax over j of ((n + 1 - 2 i) s[j] - sum over k of |s[j] - s[k]|) / tau,    i = 1 .. n

With dz the softmax gradient, ds[j] takes the column sums of (n + 1 - 2 i) dz, and with c = -(column sums of dz) the
pair term: sum over k of (c[j] + c[k]) sign(s[j] - s[k]). Row programs leave both column sums as partial rows; once they
are added up, the owner of a tile of j walks all k.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "soft_sort_neural",
    "family": "mixing_misc",
    "op": "neural_sort",
    "schema": 1,
    "techniques": ("saved-output", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": ("p: fp32 or bf16 (B, N, N)",),
    "grads": ("scores",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _spread_fwd(S, Spread, N, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr):
    # spread[j] = sum over k of |s[j] - s[k]|
    row = tl.program_id(0).to(tl.int64) * N
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    s = tl.load(S + row + j, mask=j < N, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        other = tl.load(S + row + k, mask=k < N, other=0.0).to(tl.float32)
        total += tl.where(k[None, :] < N, tl.abs(s[:, None] - other[None, :]), 0.0)
    tl.store(Spread + row + j, tl.sum(total, 1), mask=j < N)


@triton.jit
def _relaxed_rows_fwd(S, Spread, P, N, inverse_tau, BLOCK_N: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    j = tl.arange(0, BLOCK_N)
    s = tl.load(S + batch * N + j, mask=j < N, other=0.0).to(tl.float32)
    spread = tl.load(Spread + batch * N + j, mask=j < N, other=0.0)
    z = tl.where(j < N, ((N - 1 - 2 * i) * s - spread) * inverse_tau, float("-inf"))
    p = tl.exp(z - tl.max(z, 0))
    tl.store(P + (batch * N + i) * N + j, p / tl.sum(p, 0), mask=j < N)


def forward(scores, tau=1.0):
    """Scores (B, N) with N up to a few thousand; P (B, N, N)."""
    scores = scores.contiguous()
    B, N = scores.shape
    spread = torch.empty(B, N, device=scores.device, dtype=torch.float32)
    p = torch.empty(B, N, N, device=scores.device, dtype=scores.dtype)
    _spread_fwd[(B, triton.cdiv(N, 64))](scores, spread, N, BLOCK_J=64, BLOCK_K=64, num_warps=4)
    BLOCK_N = triton.next_power_of_2(N)
    _relaxed_rows_fwd[(B, N)](
        scores, spread, p, N, 1.0 / tau, BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 256))
    )
    return p, (scores, p, tau)


# --- backward ---
@triton.jit
def _relaxed_rows_bwd(DP, P, Parts, N, rows_each, dp_b, dp_i, dp_j, BLOCK_N: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    j = tl.arange(0, BLOCK_N)
    inside = j < N
    ranked = tl.zeros((BLOCK_N,), tl.float32)
    plain = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(chunk * rows_each, tl.minimum((chunk + 1) * rows_each, N)):
        p = tl.load(P + (batch * N + i) * N + j, mask=inside, other=0.0).to(tl.float32)
        dp_at = batch * dp_b + i.to(tl.int64) * dp_i + j.to(tl.int64) * dp_j
        dp = tl.load(DP + dp_at, mask=inside, other=0.0).to(tl.float32)
        dz = p * (dp - tl.sum(p * dp, 0))
        ranked += (N - 1 - 2 * i) * dz
        plain += dz
    at = Parts + (batch * tl.num_programs(1) + chunk) * 2 * N + j
    tl.store(at, ranked, mask=inside)
    tl.store(at + N, plain, mask=inside)


@triton.jit
def _signs_bwd(S, Totals, DS, N, inverse_tau, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    s = tl.load(S + batch * N + j, mask=j < N, other=0.0).to(tl.float32)
    ranked = tl.load(Totals + batch * 2 * N + j, mask=j < N, other=0.0)
    mine = tl.load(Totals + (batch * 2 + 1) * N + j, mask=j < N, other=0.0)
    pairs = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        other = tl.load(S + batch * N + k, mask=k < N, other=0.0).to(tl.float32)
        theirs = tl.load(Totals + (batch * 2 + 1) * N + k, mask=k < N, other=0.0)
        off = s[:, None] - other[None, :]
        sign = tl.where(off > 0.0, 1.0, 0.0) - tl.where(off < 0.0, 1.0, 0.0)
        pairs += tl.where(k[None, :] < N, (mine[:, None] + theirs[None, :]) * sign, 0.0)
    tl.store(DS + batch * N + j, (ranked - tl.sum(pairs, 1)) * inverse_tau, mask=j < N)


def backward(saved, grad_p, needs=None):
    scores, p, tau = saved
    B, N = scores.shape
    dscores = torch.empty_like(scores)
    # Eight programs for each of 132 processors, but at least eight rows for each pair of partial sums.
    chunks = max(1, min(triton.cdiv(N, 8), 1056 // B))
    rows_each = triton.cdiv(N, chunks)
    chunks = triton.cdiv(N, rows_each)
    parts = torch.empty(B, chunks, 2, N, device=scores.device, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    _relaxed_rows_bwd[(B, chunks)](
        grad_p, p, parts, N, rows_each, *grad_p.stride(), BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 256))
    )
    _signs_bwd[(B, triton.cdiv(N, 64))](
        scores, parts.sum(1), dscores, N, 1.0 / tau, BLOCK_J=64, BLOCK_K=64, num_warps=4
    )
    return dscores


# --- check ---
SWEEP = ({"B": 2, "N": 64}, {"B": 3, "N": 77, "tau": 2.0}, {"B": 2, "N": 40, "dtype": "bfloat16"})
BENCH = ({"B": 128, "N": 1024, "dtype": "bfloat16"},)


def make_args(B, N, tau=1.0, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), tau


def reference(scores, tau=1.0):
    s = scores.float()
    N = s.shape[1]
    spread = (s[:, :, None] - s[:, None, :]).abs().sum(2)
    rank = N + 1 - 2 * torch.arange(1, N + 1, device=s.device)
    return ((rank[:, None] * s[:, None, :] - spread[:, None, :]) / tau).softmax(-1).to(scores.dtype)
