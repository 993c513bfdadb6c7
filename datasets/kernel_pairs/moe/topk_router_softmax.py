"""Router softmax over all experts, then top-k: only kept probabilities carry a gradient, yet every logit receives one.

With w[j] = p[index[j]]:    dlogits = p (scatter(dw) - sum over j of dw[j] w[j]).
The indices and the log-sum-exp are saved. The backward rebuilds p once and scatters by comparing the expert axis with
the k indices while the tile lies in registers, so no zero-filled (T, E) cotangent is made.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "topk_router_softmax",
    "family": "moe",
    "op": "topk_softmax_router",
    "schema": 1,
    "techniques": ("saved-lse", "argmax-routing", "multi-row-tile", "row-local", "strided-cotangent"),
    "saves": ("index: int32 (T, K)", "lse: fp32 (T,)"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _router_softmax_fwd(
    Logits, Weight, Index, Lse, T, E, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where(e[None, :] < E, x, -float("inf"))
    top = tl.max(x, 1)
    lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
    tl.store(Lse + t, lse, mask=t < T)
    left = x
    for j in tl.static_range(K):
        # Of equal logits the lower index wins. The value is read at the index, so that it stands for one expert.
        best = tl.argmax(left, 1, tie_break_left=True)
        hit = e[None, :] == best[:, None]
        logit = tl.sum(tl.where(hit, x, 0.0), 1)
        tl.store(Weight + t * K + j, tl.exp(logit - lse), mask=t < T)
        tl.store(Index + t * K + j, best, mask=t < T)
        left = tl.where(hit, -float("inf"), left)


def _tile(E):
    BLOCK_E = max(8, triton.next_power_of_2(E))
    return max(1, 2048 // BLOCK_E), BLOCK_E


def forward(logits, k):
    logits = logits.contiguous()
    T, E = logits.shape
    if k > E:
        raise ValueError(f"k = {k} experts cannot be chosen out of {E}")
    weight = torch.empty(T, k, device=logits.device, dtype=torch.float32)
    index = torch.empty(T, k, device=logits.device, dtype=torch.int32)
    lse = torch.empty(T, device=logits.device, dtype=torch.float32)
    BLOCK_T, BLOCK_E = _tile(E)
    _router_softmax_fwd[(triton.cdiv(T, BLOCK_T),)](
        logits, weight, index, lse, T, E, K=k, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=4
    )
    return (weight, index), (logits, index, lse)


# --- backward ---
@triton.jit
def _router_softmax_bwd(
    DWeight, Logits, Index, Lse, DLogits, T, E, stride_t, stride_k,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    # Rows past the end: minus infinity against a finite lse gives p = 0.
    lse = tl.load(Lse + t, mask=t < T, other=0.0)
    p = tl.exp(x - lse[:, None])
    dp = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for j in tl.static_range(K):
        index = tl.load(Index + t * K + j, mask=t < T, other=0)
        dw = tl.load(DWeight + t * stride_t + j * stride_k, mask=t < T, other=0.0)
        dp += tl.where(e[None, :] == index[:, None], dw[:, None], 0.0)
    dot = tl.sum(p * dp, 1)
    tl.store(DLogits + t[:, None] * E + e[None, :], p * (dp - dot[:, None]), mask=inside)


def backward(saved, grad_weight, grad_index=None, needs=None):
    logits, index, lse = saved
    (T, E), K = logits.shape, index.shape[1]
    dlogits = torch.empty_like(logits)
    BLOCK_T, BLOCK_E = _tile(E)
    _router_softmax_bwd[(triton.cdiv(T, BLOCK_T),)](
        grad_weight, logits, index, lse, dlogits, T, E, grad_weight.stride(0), grad_weight.stride(1),
        K=K, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"T": 32, "E": 64, "k": 2},
    {"T": 75, "E": 37, "k": 4},
    {"T": 16, "E": 128, "k": 8, "dtype": "bfloat16"},
    {"T": 20, "E": 8, "k": 1, "dtype": "float16"},
)
BENCH = ({"T": 131072, "E": 128, "k": 8, "dtype": "float32"}, {"T": 1048576, "E": 64, "k": 2, "dtype": "bfloat16"})


def make_args(T, E, k, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=g).to(device=device, dtype=getattr(torch, dtype)), k


def reference(logits, k):
    p = torch.softmax(logits.float(), -1)
    # A stable sort lets the lower index win among equals, as the kernel does.
    index = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :k]
    return p.gather(-1, index), index.to(torch.int32)
