"""Log of a mixture of softmaxes, the cure for low-rank output layers: gradients are weighted by responsibilities.

    logp[v] = log sum over k of pi[k] p[k, v],    pi = softmax(prior),    p[k] = softmax(z[k])

With r[k, v] = pi[k] p[k, v] / sum over k and g = dlogp, R[k] = sum over v of r[k, v] g[v] is component k's share of the
cotangent: dz = r g - p R and dprior = R - pi sum(R). A token's owner goes over its logits twice, all components in one
tile, so that the mixture is summed anew in registers instead of being read back rounded.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lowrank_softmax_mixture",
    "family": "mixing_misc",
    "op": "mixture_of_softmaxes",
    "schema": 1,
    "techniques": ("saved-lse", "two-pass", "row-local", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (T, K)",),
    "grads": ("logits", "prior"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _log_mixing(Prior, token, k, K):
    """log pi of one token; components past K get minus infinity."""
    prior = tl.load(Prior + token * K + k, mask=k < K, other=float("-inf")).to(tl.float32)
    top = tl.max(prior, 0)
    return prior - top - tl.log(tl.sum(tl.exp(prior - top), 0))


@triton.jit
def _mixture_fwd(Z, Prior, LogP, LSE, K, V, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows = (token * K + k[:, None]) * V
    # Every lane keeps a running maximum and sum of its own columns; lanes meet once.
    top = tl.full((BLOCK_K, BLOCK_V), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)[None, :]
        z = tl.load(Z + rows + v, mask=(k[:, None] < K) & (v < V), other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, z)
        total = total * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    row_top = tl.max(top, 1)
    row_total = tl.sum(total * tl.exp(top - row_top[:, None]), 1)
    lse = row_top + tl.log(tl.where(k < K, row_total, 1.0))
    tl.store(LSE + token * K + k, lse, mask=k < K)
    offset = (_log_mixing(Prior, token, k, K) - lse)[:, None]
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)[None, :]
        joint = tl.load(Z + rows + v, mask=(k[:, None] < K) & (v < V), other=0.0).to(tl.float32) + offset
        # A logarithm of a sum over k that does not underflow where every component is unlikely.
        peak = tl.max(joint, 0)[None, :]
        logp = peak + tl.log(tl.sum(tl.exp(joint - peak), 0)[None, :])
        tl.store(LogP + token * V + v, logp, mask=v < V)


def _tile(K, V):
    BLOCK_K = triton.next_power_of_2(K)
    return BLOCK_K, max(16, min(4096 // BLOCK_K, triton.next_power_of_2(V)))


def forward(logits, prior):
    """Logits (T, K, V), prior (T, K) with a small number K of components; the result is (T, V)."""
    logits, prior = logits.contiguous(), prior.contiguous()
    T, K, V = logits.shape
    logp = torch.empty(T, V, device=logits.device, dtype=logits.dtype)
    lse = torch.empty(T, K, device=logits.device, dtype=torch.float32)
    BLOCK_K, BLOCK_V = _tile(K, V)
    _mixture_fwd[(T,)](logits, prior, logp, lse, K, V, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4)
    return logp, (logits, prior, lse)


# --- backward ---
@triton.jit
def _mixture_bwd(
    DLogP, Z, Prior, LSE, DZ, DPrior, K, V, d_t, d_v, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows = (token * K + k[:, None]) * V
    log_pi = _log_mixing(Prior, token, k, K)
    lse = tl.load(LSE + token * K + k, mask=k < K, other=0.0)
    offset = (log_pi - lse)[:, None]
    shares = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for start in tl.range(0, V, BLOCK_V, num_stages=3):
        v = start + tl.arange(0, BLOCK_V)[None, :]
        joint = tl.load(Z + rows + v, mask=(k[:, None] < K) & (v < V), other=0.0).to(tl.float32) + offset
        g = tl.load(DLogP + token * d_t + v.to(tl.int64) * d_v, mask=v < V, other=0.0).to(tl.float32)
        weight = tl.exp(joint - tl.max(joint, 0)[None, :])
        shares += weight * (g / tl.sum(weight, 0)[None, :])
    share = tl.sum(shares, 1)
    pi = tl.exp(log_pi)
    tl.store(DPrior + token * K + k, share - pi * tl.sum(share, 0), mask=k < K)
    # r g - p R: the responsibilities once more, and the component's own softmax.
    for start in tl.range(0, V, BLOCK_V, num_stages=4):
        v = start + tl.arange(0, BLOCK_V)[None, :]
        ok = (k[:, None] < K) & (v < V)
        z = tl.load(Z + rows + v, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(DLogP + token * d_t + v.to(tl.int64) * d_v, mask=v < V, other=0.0).to(tl.float32)
        joint = z + offset
        weight = tl.exp(joint - tl.max(joint, 0)[None, :])
        dz = weight * (g / tl.sum(weight, 0)[None, :]) - tl.exp(z - lse[:, None]) * share[:, None]
        tl.store(DZ + rows + v, dz, mask=ok)


def backward(saved, grad_logp, needs=None):
    logits, prior, lse = saved
    T, K, V = logits.shape
    dlogits, dprior = torch.empty_like(logits), torch.empty_like(prior)
    BLOCK_K, BLOCK_V = _tile(K, V)
    _mixture_bwd[(T,)](
        grad_logp, logits, prior, lse, dlogits, dprior, K, V, *grad_logp.stride(),
        BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=2,
    )  # fmt: skip
    return dlogits, dprior


# --- check ---
SWEEP = (
    {"T": 5, "K": 4, "V": 64},
    {"T": 7, "K": 3, "V": 1501},
    {"T": 4, "K": 6, "V": 72, "dtype": "bfloat16"},
)
BENCH = ({"T": 4096, "K": 8, "V": 8192, "dtype": "bfloat16"},)


def make_args(T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (2.0 * torch.randn(T, K, V, generator=g), torch.randn(T, K, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(logits, prior):
    joint = prior.float().log_softmax(-1)[..., None] + logits.float().log_softmax(-1)
    return joint.logsumexp(1).to(logits.dtype)
