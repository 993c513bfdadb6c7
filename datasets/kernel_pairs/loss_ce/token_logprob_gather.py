"""Log-probabilities of k candidate tokens per row of logits: k columns scatter, one number per row spreads over all.

logp[j] = x[c[j]] / tau - lse,    dx = (scatter of g to c - p sum over j of g[j]) / tau.
Candidates may repeat. The backward keeps a tile of the row in registers and compares its columns with the k candidates,
which adds repeated ones like any others and needs no atomics; the cotangents' sum is k loads, not a pass.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "token_logprob_gather",
    "family": "loss_ce",
    "op": "token_logprobs",
    "schema": 1,
    "techniques": ("saved-lse", "gather-form", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _candidates_fwd(
    Logits, Candidates, LogP, Lse, V, inv_tau, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row = Logits + row * V
    lane = tl.arange(0, BLOCK)
    # Maximum and sum per lane, merged once after the loop.
    top = tl.full((BLOCK,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        live = lane < V - start
        x = tl.load(x_row + start + lane, mask=live, other=0.0).to(tl.float32) * inv_tau
        x = tl.where(live, x, -float("inf"))
        higher = tl.maximum(top, x)
        norm = norm * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    best = tl.max(top, 0)
    lse = best + tl.log(tl.sum(norm * tl.exp(top - best), 0))
    tl.store(Lse + row, lse)
    j = tl.arange(0, BLOCK_K)
    candidate = tl.load(Candidates + row * K + j, mask=j < K, other=0)
    x = tl.load(x_row + candidate, mask=j < K, other=0.0).to(tl.float32)
    tl.store(LogP + row * K + j, x * inv_tau - lse, mask=j < K)


def forward(logits, candidates, tau=1.0):
    logits, candidates = logits.contiguous(), candidates.contiguous()
    (M, V), K = logits.shape, candidates.shape[1]
    logp = torch.empty(M, K, device=logits.device, dtype=torch.float32)
    lse = torch.empty(M, device=logits.device, dtype=torch.float32)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _candidates_fwd[(M,)](
        logits, candidates, logp, lse, V, 1.0 / tau,
        K=K, BLOCK=BLOCK, BLOCK_K=triton.next_power_of_2(K), num_warps=max(1, min(8, BLOCK // 512)),
    )  # fmt: skip
    return logp, (logits, candidates, lse, tau)


# --- backward ---
@triton.jit
def _candidates_bwd(
    DLogP, Logits, Candidates, Lse, DLogits, V, inv_tau, g_row, g_col, K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    direct = tl.zeros((BLOCK,), tl.float32)
    total = 0.0
    for j in tl.static_range(K):
        g = tl.load(DLogP + row * g_row + j * g_col)
        total += g
        direct += tl.where(v == tl.load(Candidates + row * K + j), g, 0.0)
    x = tl.load(Logits + row * V + v, mask=v < V, other=0.0).to(tl.float32)
    p = tl.exp(x * inv_tau - tl.load(Lse + row))
    tl.store(DLogits + row * V + v, inv_tau * (direct - total * p), mask=v < V)


def backward(saved, grad_logp, needs=None):
    logits, candidates, lse, tau = saved
    (M, V), K = logits.shape, candidates.shape[1]
    dlogits = torch.empty_like(logits)
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    _candidates_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_logp, logits, candidates, lse, dlogits, V, 1.0 / tau, grad_logp.stride(0), grad_logp.stride(1),
        K=K, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 6, "V": 128, "K": 1},
    {"M": 9, "V": 201, "K": 5},
    {"M": 4, "V": 3000, "K": 8, "dtype": "bfloat16"},
    {"M": 5, "V": 90, "K": 3, "dtype": "float16"},
)
BENCH = ({"M": 8192, "V": 32000, "K": 1, "dtype": "bfloat16"},)


def make_args(M, V, K, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("the only token's probability is one whatever the logits are")
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    candidates = torch.randint(0, V, (M, K), generator=g)
    # The last candidate of every third row repeats the first.
    candidates[::3, -1] = candidates[::3, 0]
    return logits, candidates.to(device), 0.7


def reference(logits, candidates, tau=1.0):
    return torch.log_softmax(logits.float() / tau, -1).gather(-1, candidates)
