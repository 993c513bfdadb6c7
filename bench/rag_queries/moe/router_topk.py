import torch
import triton
import triton.language as tl


@triton.jit
def _router(logits, gates, chosen, E, K: tl.constexpr, BE: tl.constexpr):
    tok = tl.program_id(0)
    e = tl.arange(0, BE)
    z = tl.load(logits + tok * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.max(z, 0))
    p = p / tl.sum(p, 0)
    left = p
    norm = 0.0
    for j in tl.static_range(K):
        best = tl.argmax(left, 0)
        g = tl.max(left, 0)
        tl.store(chosen + tok * K + j, best)
        tl.store(gates + tok * K + j, g)
        norm += g
        left = tl.where(e == best, -1.0, left)
    for j in tl.static_range(K):
        tl.store(gates + tok * K + j, tl.load(gates + tok * K + j) / norm)


def topk_gating(router_logits, k):
    T, E = router_logits.shape
    gates = router_logits.new_empty(T, k, dtype=torch.float32)
    experts = router_logits.new_empty(T, k, dtype=torch.int32)
    _router[(T,)](router_logits, gates, experts, E, k, triton.next_power_of_2(E))
    return gates, experts
