"""InfoNCE of queries against in-batch and extra keys: the similarities live in tiles, row log-sum-exps are kept.

L[i] = lse over j of s[i, j] - s[i, i],    s = Q K^T / tau,    with P = softmax(s) and G = diag(g):
    dQ = G (P - I) K / tau,    dK = (P - I)^T G Q / tau.
Queries own dQ and keys own dK; each owner forms its tiles of s again, the key's with rows and columns swapped, so no
transpose of a probability tile is taken. The positives, one per query, are left out of the loops: they would cost a
comparison per element, and are one row per owner that is subtracted at the end.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "npair_infonce_row",
    "family": "loss_other",
    "op": "info_nce",
    "schema": 1,
    "techniques": ("saved-lse", "loop-swap", "owner-grid", "recompute"),
    "saves": ("lse: fp32 (N,)",),
    "grads": ("query", "key"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _infonce_fwd(
    Q, K, Loss, Lse, N, M, D, inv_tau, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    row = (i[:, None] < N) & (d[None, :] < D)
    q = tl.load(Q + i[:, None] * D + d[None, :], mask=row, other=0.0)
    # Query i's own key is key i: its similarity is a row product in fp32.
    own = tl.load(K + i[:, None] * D + d[None, :], mask=row, other=0.0)
    positive = tl.sum(q.to(tl.float32) * own.to(tl.float32), 1) * inv_tau
    top = positive
    norm = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, M, BLOCK_M):
        j = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        k = tl.load(K + j[:, None] * D + d[None, :], mask=(j[:, None] < M) & (d[None, :] < D), other=0.0)
        s = tl.where(j[None, :] < M, tl.dot(q, tl.trans(k)) * inv_tau, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[:, None]), 1)
        top = higher
    lse = top + tl.log(norm)
    tl.store(Lse + i, lse, mask=i < N)
    tl.store(Loss + i, lse - positive, mask=i < N)


def _wide(D):
    if D > 256:
        raise ValueError("the embedding must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(D))


def forward(query, key, tau=0.07):
    query, key = query.contiguous(), key.contiguous()
    (N, D), M = query.shape, key.shape[0]
    if M < N:
        raise ValueError("every query needs its own key: key i belongs to query i")
    loss, lse = (torch.empty(N, device=query.device, dtype=torch.float32) for _ in range(2))
    _infonce_fwd[(triton.cdiv(N, 64),)](
        query, key, loss, lse, N, M, D, 1.0 / tau,
        BLOCK_N=64, BLOCK_M=64, BLOCK_D=_wide(D), num_warps=4, num_stages=2,
    )  # fmt: skip
    return loss, (query, key, lse, tau)


# --- backward ---
@triton.jit
def _infonce_dq(
    DLoss, Q, K, Lse, DQ, N, M, D, inv_tau, stride_g,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    at = i[:, None] * D + d[None, :]
    row = (i[:, None] < N) & (d[None, :] < D)
    q = tl.load(Q + at, mask=row, other=0.0)
    lse = tl.load(Lse + i, mask=i < N, other=float("inf"))
    dq = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, M, BLOCK_M):
        j = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        k = tl.load(K + j[:, None] * D + d[None, :], mask=(j[:, None] < M) & (d[None, :] < D), other=0.0)
        s = tl.where(j[None, :] < M, tl.dot(q, tl.trans(k)) * inv_tau, -float("inf"))
        p = tl.exp(s - lse[:, None])
        dq = tl.dot(p.to(k.dtype), k, dq)
    own = tl.load(K + at, mask=row, other=0.0).to(tl.float32)
    g = tl.load(DLoss + i * stride_g, mask=i < N, other=0.0) * inv_tau
    tl.store(DQ + at, g[:, None] * (dq - own), mask=row)


@triton.jit
def _infonce_dk(
    DLoss, Q, K, Lse, DK, N, M, D, inv_tau, stride_g,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = j[:, None] * D + d[None, :]
    column = (j[:, None] < M) & (d[None, :] < D)
    k = tl.load(K + at, mask=column, other=0.0)
    dk = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        q = tl.load(Q + i[:, None] * D + d[None, :], mask=(i[:, None] < N) & (d[None, :] < D), other=0.0)
        lse = tl.load(Lse + i, mask=i < N, other=float("inf"))
        g = tl.load(DLoss + i * stride_g, mask=i < N, other=0.0)
        p = tl.exp(tl.dot(k, tl.trans(q)) * inv_tau - lse[None, :])
        # The cotangent joins q: probabilities times a mean's 1/N would flush to zero in fp16.
        dk = tl.dot(p.to(q.dtype), (q * g[:, None]).to(q.dtype), dk)
    # Only the first N keys are somebody's positive.
    mine = (j[:, None] < N) & (d[None, :] < D)
    q = tl.load(Q + at, mask=mine, other=0.0).to(tl.float32)
    g = tl.load(DLoss + j * stride_g, mask=j < N, other=0.0)
    tl.store(DK + at, inv_tau * (dk - g[:, None] * q), mask=column)


def backward(saved, grad_loss, needs=(True, True)):
    query, key, lse, tau = saved
    (N, D), M = query.shape, key.shape[0]
    BLOCK_D = _wide(D)
    half = query.element_size() == 2
    own, other = (128 if half and BLOCK_D <= 128 else 64), (64 if half else 32)
    dq = dk = None
    if needs[0]:
        dq = torch.empty_like(query)
        _infonce_dq[(triton.cdiv(N, own),)](
            grad_loss, query, key, lse, dq, N, M, D, 1.0 / tau, grad_loss.stride(0),
            BLOCK_N=own, BLOCK_M=other, BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
        )  # fmt: skip
    if needs[1]:
        dk = torch.empty_like(key)
        _infonce_dk[(triton.cdiv(M, own),)](
            grad_loss, query, key, lse, dk, N, M, D, 1.0 / tau, grad_loss.stride(0),
            BLOCK_N=other, BLOCK_M=own, BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dq, dk


# --- check ---
SWEEP = (
    {"N": 64, "EXTRA": 64, "D": 32},
    {"N": 75, "EXTRA": 26, "D": 41},
    {"N": 40, "EXTRA": 0, "D": 16, "dtype": "bfloat16"},
    {"N": 33, "EXTRA": 50, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 16384, "EXTRA": 16384, "D": 128, "dtype": "bfloat16"},)


def make_args(N, EXTRA, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.nn.functional.normalize(torch.randn(N, D, generator=g), dim=-1)
    key = torch.randn(N + EXTRA, D, generator=g) / D**0.5
    key[:N] += 0.5 * query
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (query, key)), 0.2)


def reference(query, key, tau=0.07):
    s = (query @ key.T).float() / tau
    return torch.logsumexp(s, -1) - s.diagonal()
