"""Cross-entropy with ignored targets, one row per program: the log-sum-exp is saved, logits are met again in tiles."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_row",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "elementwise"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ce_fwd(Logits, Target, Loss, Lse, V, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + row * V + c, mask=c < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    target = tl.load(Target + row)
    kept = target != ignore
    picked = tl.load(Logits + row * V + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(Lse + row, lse)
    tl.store(Loss + row, tl.where(kept, lse - picked, 0.0))


def forward(logits, target, ignore_index=-100):
    logits = logits.contiguous()
    M, V = logits.shape
    loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    BLOCK = max(32, min(8192, triton.next_power_of_2(V) // 2))
    _ce_fwd[(M,)](logits, target, loss, lse, V, ignore_index, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return loss, (logits, target, lse, ignore_index)


# --- backward ---
@triton.jit
def _ce_bwd(DLoss, Logits, Target, Lse, DLogits, V, ignore, stride_g, BLOCK: tl.constexpr):
    # Tiles of a row are independent once the log-sum-exp is known, so the vocabulary is a grid axis, not a loop.
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(Target + row)
    out = DLogits + row * V + c
    if target == ignore:
        tl.store(out, tl.zeros((BLOCK,), tl.float32), mask=c < V)
    else:
        g = tl.load(DLoss + row * stride_g)
        lse = tl.load(Lse + row)
        x = tl.load(Logits + row * V + c, mask=c < V, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - lse)
        tl.store(out, g * tl.where(c == target, p - 1.0, p), mask=c < V)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, ignore_index = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK = max(32, min(4096, triton.next_power_of_2(V) // 2))
    _ce_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_loss, logits, target, lse, dlogits, V, ignore_index, grad_loss.stride(0),
        BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)),
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = ({"M": 6, "V": 64}, {"M": 11, "V": 150, "dtype": "float16"}, {"M": 4, "V": 128, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "V": 32000, "dtype": "float32"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(0, V, (M,), generator=g)
    target[2::5] = -100
    return logits, target.to(device)


def reference(logits, target, ignore_index=-100):
    return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
