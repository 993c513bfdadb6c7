"""Top-k of the router's softmax, renormalised to one: the full softmax cancels, k weights and indices carry all.

w[j] = p[i[j]] / sum of p over the k kept = softmax of the k kept logits, so    dlogits[i[j]] = w[j] (dw[j] - <dw, w>)
and zero for every expert that was not chosen. The backward reads neither logits nor normaliser, only the saved output
of k numbers per token, and writes each row of dlogits in one go with its zeros, instead of a fill and a scatter.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "topk_router_renorm",
    "family": "moe",
    "op": "topk_renorm_router",
    "schema": 1,
    "techniques": ("saved-output", "argmax-routing", "multi-row-tile", "gather-form", "strided-cotangent"),
    "saves": ("weight: fp32 (T, K)", "index: int32 (T, K)"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _router_renorm_fwd(
    Logits, Weight, Index, T, E, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    inside = (t[:, None] < T) & (e[None, :] < E)
    x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    left = tl.where(e[None, :] < E, x, -float("inf"))
    kept = tl.full((BLOCK_T, BLOCK_K), -float("inf"), tl.float32)
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(left, 1, tie_break_left=True)
        hit = e[None, :] == best[:, None]
        logit = tl.sum(tl.where(hit, x, 0.0), 1)
        kept = tl.where(slot[None, :] == j, logit[:, None], kept)
        chosen = tl.where(slot[None, :] == j, best[:, None], chosen)
        left = tl.where(hit, -float("inf"), left)
    # The first choice is the largest: it serves as the maximum of the softmax over the kept.
    top = tl.max(kept, 1)
    shifted = tl.exp(kept - top[:, None])
    weight = shifted / tl.sum(shifted, 1)[:, None]
    out = t[:, None] * K + slot[None, :]
    stored = (t[:, None] < T) & (slot[None, :] < K)
    tl.store(Weight + out, weight, mask=stored)
    tl.store(Index + out, chosen, mask=stored)


def forward(logits, k):
    logits = logits.contiguous()
    T, E = logits.shape
    if k > E:
        raise ValueError(f"k = {k} experts cannot be chosen out of {E}")
    weight = torch.empty(T, k, device=logits.device, dtype=torch.float32)
    index = torch.empty(T, k, device=logits.device, dtype=torch.int32)
    BLOCK_E = max(8, triton.next_power_of_2(E))
    BLOCK_T = max(1, 2048 // BLOCK_E)
    _router_renorm_fwd[(triton.cdiv(T, BLOCK_T),)](
        logits, weight, index, T, E,
        K=k, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, BLOCK_K=triton.next_power_of_2(k), num_warps=4,
    )  # fmt: skip
    return (weight, index), (weight, index, logits.shape, logits.dtype)


# --- backward ---
@triton.jit
def _router_renorm_bwd(
    DWeight, Weight, Index, DLogits, T, E, stride_t, stride_k,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    live = (t[:, None] < T) & (slot[None, :] < K)
    w = tl.load(Weight + t[:, None] * K + slot[None, :], mask=live, other=0.0)
    dw = tl.load(DWeight + t[:, None] * stride_t + slot[None, :] * stride_k, mask=live, other=0.0)
    dot = tl.sum(w * dw, 1)
    row = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for j in tl.static_range(K):
        # K small loads that hit the cache are cheaper than taking column j out of the register tile.
        index = tl.load(Index + t * K + j, mask=t < T, other=0)
        w_j = tl.load(Weight + t * K + j, mask=t < T, other=0.0)
        dw_j = tl.load(DWeight + t * stride_t + j * stride_k, mask=t < T, other=0.0)
        row = tl.where(e[None, :] == index[:, None], (w_j * (dw_j - dot))[:, None], row)
    inside = (t[:, None] < T) & (e[None, :] < E)
    tl.store(DLogits + t[:, None] * E + e[None, :], row, mask=inside)


def backward(saved, grad_weight, grad_index=None, needs=None):
    weight, index, (T, E), dtype = saved
    K = weight.shape[1]
    dlogits = torch.empty(T, E, device=weight.device, dtype=dtype)
    BLOCK_E = max(8, triton.next_power_of_2(E))
    BLOCK_T = max(1, 2048 // BLOCK_E)
    _router_renorm_bwd[(triton.cdiv(T, BLOCK_T),)](
        grad_weight, weight, index, dlogits, T, E, grad_weight.stride(0), grad_weight.stride(1),
        K=K, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, BLOCK_K=triton.next_power_of_2(K), num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"T": 32, "E": 64, "k": 2},
    {"T": 45, "E": 29, "k": 6},
    {"T": 16, "E": 128, "k": 8, "dtype": "bfloat16"},
    {"T": 20, "E": 16, "k": 3, "dtype": "float16"},
)
BENCH = ({"T": 524288, "E": 128, "k": 8, "dtype": "bfloat16"},)


def make_args(T, E, k, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=g).to(device=device, dtype=getattr(torch, dtype)), k


def reference(logits, k):
    p = torch.softmax(logits.float(), -1)
    index = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :k]
    weight = p.gather(-1, index)
    return weight / weight.sum(-1, keepdim=True), index.to(torch.int32)
