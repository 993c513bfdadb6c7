"""Cross entropy of logits against class targets, one row per program; the log-sum-exp is saved."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cross_entropy_one_row",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
}


# --- forward ---
@triton.jit
def _cross_entropy_fwd(LOGITS, TARGET, LOSS, LSE, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    vocab = tl.arange(0, BLOCK)
    logits = tl.load(LOGITS + row * V + vocab, mask=vocab < V, other=-float("inf"))
    highest = tl.max(logits, 0)
    lse = highest + tl.log(tl.sum(tl.exp(logits - highest), 0))
    target = tl.load(TARGET + row)
    tl.store(LSE + row, lse)
    tl.store(LOSS + row, lse - tl.load(LOGITS + row * V + target))


def forward(logits, target):
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    _cross_entropy_fwd[(M,)](logits, target, loss, lse, V, BLOCK=triton.next_power_of_2(V))
    return loss, (logits, target, lse)


# --- backward ---
@triton.jit
def _cross_entropy_bwd(DLOSS, LOGITS, TARGET, LSE, DLOGITS, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    vocab = tl.arange(0, BLOCK)
    logits = tl.load(LOGITS + row * V + vocab, mask=vocab < V, other=-float("inf"))
    p = tl.exp(logits - tl.load(LSE + row))
    p = tl.where(vocab == tl.load(TARGET + row), p - 1.0, p)
    tl.store(DLOGITS + row * V + vocab, p * tl.load(DLOSS + row), mask=vocab < V)


def backward(saved, grad_loss, needs=None):
    logits, target, lse = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    _cross_entropy_bwd[(M,)](grad_loss.contiguous(), logits, target, lse, dlogits, V, BLOCK=triton.next_power_of_2(V))
    return dlogits


# --- check ---
SWEEP = [{"M": 3, "V": 20}]


def make_args(M, V, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, V, generator=g).to(device), torch.randint(0, V, (M,), generator=g).to(device)


def reference(logits, target):
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
