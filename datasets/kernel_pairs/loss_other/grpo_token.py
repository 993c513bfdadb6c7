"""GRPO's token loss with a KL term: group advantages and length weights are made once per sequence, the rest is local.

With A the reward standardised within its group of G answers, r = exp(new - old), k = ref - new:
    l = -min(r A, clip(r) A) + beta (exp(k) - k - 1),    dl/dnew = -r A [r decided] + beta (1 - exp(k)).
Tokens weigh 1 / (B length of their sequence) or 1 / (all tokens), by `per_sequence`. A sequence's program forms its
advantage from its group's rewards and leaves its sums; a join turns lengths into weights. The backward reads one
advantage and one weight per row and streams. Rewards, old and reference log-probabilities get no gradient.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "grpo_token",
    "family": "loss_other",
    "op": "grpo_loss",
    "schema": 1,
    "techniques": ("recompute", "saved-statistics", "masking", "partial-gradient", "broadcast-adjoint"),
    "saves": ("advantage: fp32 (B,)", "weight: fp32 (B,)"),
    "grads": ("new",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grpo_rows(
    New, Old, Ref, Reward, Mask, Advantage, Sums, Lengths, T, eps, beta,
    G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK_G)
    group = tl.load(Reward + b // G * G + member, mask=member < G, other=0.0)
    mean = tl.sum(group, 0) / G
    gap = tl.where(member < G, group - mean, 0.0)
    a = (tl.load(Reward + b) - mean) / (tl.sqrt(tl.sum(gap * gap, 0) / G) + 1e-4)
    total = tl.zeros((BLOCK_T,), tl.float32)
    length = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        kept = tl.load(Mask + b * T + t, mask=t < T, other=0) != 0
        new = tl.load(New + b * T + t, mask=kept, other=0.0).to(tl.float32)
        r = tl.exp(new - tl.load(Old + b * T + t, mask=kept, other=0.0).to(tl.float32))
        k = tl.load(Ref + b * T + t, mask=kept, other=0.0).to(tl.float32) - new
        clipped = tl.where(r > 1.0 + eps, 1.0 + eps, tl.where(r < 1.0 - eps, 1.0 - eps, r))
        gain = tl.where(r * a < clipped * a, r * a, clipped * a)
        total += tl.where(kept, beta * (tl.exp(k) - k - 1.0) - gain, 0.0)
        length += kept.to(tl.int32)
    tl.store(Advantage + b, a)
    tl.store(Sums + b, tl.sum(total, 0))
    tl.store(Lengths + b, tl.sum(length, 0))


@triton.jit
def _grpo_join(Sums, Lengths, Weight, Loss, B, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr):
    tokens = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        tokens += tl.load(Lengths + b, mask=b < B, other=0)
    everything = tl.maximum(tl.sum(tokens, 0), 1).to(tl.float32)
    loss = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        length = tl.load(Lengths + b, mask=b < B, other=0)
        if PER_SEQUENCE:
            weight = 1.0 / (tl.maximum(length, 1).to(tl.float32) * B)
        else:
            weight = 1.0 / everything + tl.zeros((BLOCK,), tl.float32)
        tl.store(Weight + b, weight, mask=b < B)
        loss += weight * tl.load(Sums + b, mask=b < B, other=0.0)
    tl.store(Loss, tl.sum(loss, 0))


def forward(new, old, ref, reward, mask, group, eps=0.2, beta=0.04, per_sequence=True):
    new, old, ref, reward, mask = (x.contiguous() for x in (new, old, ref, reward, mask))
    B, T = new.shape
    if B % group:
        raise ValueError("the batch must be made of whole groups")
    advantage, sums, weight = (torch.empty(B, device=new.device, dtype=torch.float32) for _ in range(3))
    lengths = torch.empty(B, device=new.device, dtype=torch.int32)
    loss = torch.empty((), device=new.device, dtype=torch.float32)
    BLOCK_T = max(64, min(1024, triton.next_power_of_2(T)))
    _grpo_rows[(B,)](
        new, old, ref, reward, mask, advantage, sums, lengths, T, eps, beta,
        G=group, BLOCK_G=triton.next_power_of_2(group), BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip
    _grpo_join[(1,)](sums, lengths, weight, loss, B, PER_SEQUENCE=per_sequence, BLOCK=256, num_warps=4)
    return loss, (new, old, ref, mask, advantage, weight, eps, beta)


# --- backward ---
@triton.jit
def _grpo_bwd(DLoss, New, Old, Ref, Mask, Advantage, Weight, DNew, T, eps, beta, BLOCK_T: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    a = tl.load(Advantage + b)
    g = tl.load(DLoss) * tl.load(Weight + b)
    kept = tl.load(Mask + b * T + t, mask=t < T, other=0) != 0
    new = tl.load(New + b * T + t, mask=kept, other=0.0).to(tl.float32)
    r = tl.exp(new - tl.load(Old + b * T + t, mask=kept, other=0.0).to(tl.float32))
    k = tl.load(Ref + b * T + t, mask=kept, other=0.0).to(tl.float32) - new
    # The advantage is the row's: its sign chooses which side of the clip is closed.
    if a >= 0.0:
        decided = r <= 1.0 + eps
    else:
        decided = r >= 1.0 - eps
    slope = beta * (1.0 - tl.exp(k)) - tl.where(decided, r * a, 0.0)
    tl.store(DNew + b * T + t, tl.where(kept, g * slope, 0.0), mask=t < T)


def backward(saved, grad_loss, needs=None):
    new, old, ref, mask, advantage, weight, eps, beta = saved
    B, T = new.shape
    dnew = torch.empty_like(new)
    BLOCK_T = max(64, min(1024, triton.next_power_of_2(T)))
    _grpo_bwd[(B, triton.cdiv(T, BLOCK_T))](
        grad_loss, new, old, ref, mask, advantage, weight, dnew, T, eps, beta, BLOCK_T=BLOCK_T, num_warps=4
    )
    return dnew


# --- check ---
SWEEP = (
    {"GROUPS": 4, "G": 4, "T": 128, "per_sequence": True},
    {"GROUPS": 3, "G": 5, "T": 201, "per_sequence": False},
    {"GROUPS": 2, "G": 8, "T": 75, "per_sequence": True, "dtype": "bfloat16"},
)
BENCH = ({"GROUPS": 64, "G": 16, "T": 8192, "per_sequence": True, "dtype": "float32"},)


def make_args(GROUPS, G, T, per_sequence, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    B, dt = GROUPS * G, getattr(torch, dtype)
    old = -2.0 * torch.rand(B, T, generator=g)
    new = old + 0.4 * torch.randn(B, T, generator=g)
    ref = old + 0.4 * torch.randn(B, T, generator=g)
    reward = torch.randn(B, generator=g)
    # Answers end at different tokens; one has none.
    length = torch.randint(1, T + 1, (B,), generator=g)
    length[0] = 0
    mask = (torch.arange(T) < length[:, None]).to(device)
    return *(t.to(device, dt) for t in (new, old, ref)), reward.to(device), mask, G, 0.2, 0.04, per_sequence


def reference(new, old, ref, reward, mask, group, eps=0.2, beta=0.04, per_sequence=True):
    groups = reward.view(-1, group)
    spread = groups.std(1, keepdim=True, unbiased=False) + 1e-4
    a = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
    r, k = torch.exp(new.float() - old.float()), ref.float() - new.float()
    token = beta * (torch.exp(k) - k - 1.0) - torch.minimum(r * a, r.clamp(1.0 - eps, 1.0 + eps) * a)
    token = torch.where(mask, token, 0.0)
    if per_sequence:
        return (token.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return token.sum() / mask.sum().clamp(min=1)
