"""Sigmoid router whose selection bias balances the load: the bias picks experts, but no gradient flows through it.

Experts are the top k of s + bias, s = sigmoid(logits); the weights use s alone: w[j] = scale s[j] / S, S = sum s[j].
    ds[j] = (scale dw[j] - <dw, w>) / S,    dlogits[i[j]] = ds[j] s[j] (1 - s[j]).
Only k of E entries of a row are not zero. With hundreds of experts a plain fill and k scattered stores per token move
less than a dense tile, and the backward never looks at the logits: it reads the k saved scores.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sigmoid_router_bias",
    "family": "moe",
    "op": "sigmoid_topk_router",
    "schema": 1,
    "techniques": ("argmax-routing", "partial-gradient", "saved-statistics", "multi-row-tile", "strided-cotangent"),
    "saves": ("score: fp32 (T, K)", "index: int32 (T, K)"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sigmoid_router_fwd(
    Logits, Bias, Weight, Score, Index, T, E, scale,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    inside = (t[:, None] < T) & (e[None, :] < E)
    score = tl.sigmoid(tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(Bias + e, mask=e < E, other=-float("inf"))
    rank = score + bias[None, :]
    kept = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for j in tl.static_range(K):
        best = tl.argmax(rank, 1, tie_break_left=True)
        hit = e[None, :] == best[:, None]
        kept = tl.where(slot[None, :] == j, tl.sum(tl.where(hit, score, 0.0), 1)[:, None], kept)
        tl.store(Index + t * K + j, best, mask=t < T)
        rank = tl.where(hit, -float("inf"), rank)
    out = t[:, None] * K + slot[None, :]
    live = (t[:, None] < T) & (slot[None, :] < K)
    tl.store(Score + out, kept, mask=live)
    tl.store(Weight + out, scale * kept / tl.sum(kept, 1)[:, None], mask=live)


def forward(logits, bias, k, scale=1.0):
    logits, bias = logits.contiguous(), bias.contiguous()
    T, E = logits.shape
    if k > E:
        raise ValueError(f"k = {k} experts cannot be chosen out of {E}")
    weight, score = (torch.empty(T, k, device=logits.device, dtype=torch.float32) for _ in range(2))
    index = torch.empty(T, k, device=logits.device, dtype=torch.int32)
    BLOCK_E = max(16, triton.next_power_of_2(E))
    BLOCK_T = max(1, 2048 // BLOCK_E)
    _sigmoid_router_fwd[(triton.cdiv(T, BLOCK_T),)](
        logits, bias, weight, score, index, T, E, scale,
        K=k, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, BLOCK_K=triton.next_power_of_2(k), num_warps=4,
    )  # fmt: skip
    return (weight, index), (score, index, logits.shape, logits.dtype, scale)


# --- backward ---
@triton.jit
def _sigmoid_router_bwd(
    DWeight, Score, Index, DLogits, T, E, scale, stride_t, stride_k,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, BLOCK_K)
    live = (t[:, None] < T) & (slot[None, :] < K)
    s = tl.load(Score + t[:, None] * K + slot[None, :], mask=live, other=0.0)
    e = tl.load(Index + t[:, None] * K + slot[None, :], mask=live, other=0)
    dw = tl.load(DWeight + t[:, None] * stride_t + slot[None, :] * stride_k, mask=live, other=0.0)
    # Rows past the end have no scores: one keeps their division finite.
    total = tl.where(t < T, tl.sum(s, 1), 1.0)
    mean = tl.sum(dw * s, 1) / total
    ds = scale * (dw - mean[:, None]) / total[:, None]
    # The k experts of a token are distinct, so no two stores meet.
    tl.store(DLogits + t[:, None] * E + e, ds * s * (1.0 - s), mask=live)


def backward(saved, grad_weight, grad_index=None, needs=None):
    score, index, (T, E), dtype, scale = saved
    K = score.shape[1]
    dlogits = torch.zeros(T, E, device=score.device, dtype=dtype)
    BLOCK_K = triton.next_power_of_2(K)
    BLOCK_T = max(16, 512 // BLOCK_K)
    _sigmoid_router_bwd[(triton.cdiv(T, BLOCK_T),)](
        grad_weight, score, index, dlogits, T, E, scale, grad_weight.stride(0), grad_weight.stride(1),
        K=K, BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"T": 64, "E": 32, "k": 4},
    {"T": 75, "E": 41, "k": 3},
    {"T": 48, "E": 64, "k": 8, "dtype": "bfloat16"},
    {"T": 30, "E": 16, "k": 2, "dtype": "float16"},
)
BENCH = ({"T": 131072, "E": 256, "k": 8, "dtype": "bfloat16"},)


def make_args(T, E, k, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The bias is a running statistic of the load, kept in fp32.
    return logits, (0.2 * torch.randn(E, generator=g)).to(device), k, 2.5


def reference(logits, bias, k, scale=1.0):
    score = torch.sigmoid(logits.float())
    index = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices[:, :k]
    kept = score.gather(-1, index)
    return scale * kept / kept.sum(-1, keepdim=True), index.to(torch.int32)
