"""Cross-entropy on one shard of the vocabulary: what the other shards sum to comes as two numbers per row.

Tensor parallelism cuts the vocabulary into shards. From the others a shard needs their joint log-sum-exp and the
target's logit if it lies there. It joins its own, and every shard arrives at the same loss. Backward, all by itself:
    dlogits = g exp(x - lse)    and    - g at the target, only on the shard that owns it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_vocab_parallel",
    "family": "loss_ce",
    "op": "vocab_parallel_cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "masking", "recompute", "partial-gradient"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _shard_ce_fwd(Logits, Target, OtherLse, OtherPicked, Loss, Lse, V, first_word, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # The other shards are where the running maximum begins: joining them is one more term of the same sum.
    top = tl.load(OtherLse + row)
    total = 1.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    word = tl.load(Target + row) - first_word
    owned = (word >= 0) & (word < V)
    mine = tl.load(Logits + row * V + word, mask=owned, other=0.0).to(tl.float32)
    picked = tl.where(owned, mine, tl.load(OtherPicked + row))
    tl.store(Lse + row, lse)
    tl.store(Loss + row, lse - picked)


def forward(logits, target, other_lse, other_picked, first_word):
    # Words first_word to first_word + V - 1 live on this shard; targets are counted over all shards.
    logits = logits.contiguous()
    M, V = logits.shape
    loss, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _shard_ce_fwd[(M,)](
        logits, target, other_lse, other_picked, loss, lse, V, first_word,
        BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)),
    )  # fmt: skip
    return loss, (logits, target, lse, first_word)


# --- backward ---
@triton.jit
def _shard_ce_bwd(DLoss, Logits, Target, Lse, DLogits, M, V, first_word, stride_g, BLOCK: tl.constexpr):
    # Programs stride over rows with a fixed piece of the shard each; most rows have their target elsewhere.
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for row in range(tl.program_id(1), M, tl.num_programs(1)):
        at = row.to(tl.int64) * V + v
        g = tl.load(DLoss + row * stride_g)
        p = tl.exp(tl.load(Logits + at, mask=v < V, other=0.0).to(tl.float32) - tl.load(Lse + row))
        dx = g * p
        word = tl.load(Target + row) - first_word
        if (word >= tl.program_id(0) * BLOCK) & (word < tl.program_id(0) * BLOCK + BLOCK):
            dx = tl.where(v == word, dx - g, dx)
        tl.store(DLogits + at, dx, mask=v < V)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, first_word = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    pieces = triton.cdiv(V, BLOCK)
    # Sixteen programs for each of 132 processors, four rows each at least.
    walkers = max(1, min(triton.cdiv(M, 4), 2112 // pieces))
    _shard_ce_bwd[(pieces, walkers)](
        grad_loss, logits, target, lse, dlogits, M, V, first_word, grad_loss.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return dlogits


# --- check ---
SWEEP = (
    {"M": 12, "V": 128, "first_word": 0},
    {"M": 19, "V": 201, "first_word": 100},
    {"M": 8, "V": 96, "first_word": 96, "dtype": "bfloat16"},
    {"M": 9, "V": 150, "first_word": 40, "dtype": "float16"},
)
BENCH = ({"M": 8192, "V": 16032, "first_word": 16032, "dtype": "bfloat16"},)


def make_args(M, V, first_word, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    # Three shards as wide as this one lie elsewhere; about half of the targets is owned here.
    target = torch.randint(first_word - V // 2, first_word + V + V // 2 + 1, (M,), generator=g).clamp(min=0)
    other_lse = torch.log(torch.tensor(3.0 * V)) + 2.0 + 0.1 * torch.randn(M, generator=g)
    other_picked = 2 * torch.randn(M, generator=g)
    return logits, target.to(device), other_lse.to(device), other_picked.to(device), first_word


def reference(logits, target, other_lse, other_picked, first_word):
    x = logits.float()
    lse = torch.logaddexp(torch.logsumexp(x, -1), other_lse)
    word = target - first_word
    owned = (word >= 0) & (word < x.shape[1])
    mine = x.gather(1, word.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    return lse - torch.where(owned, mine, other_picked)
