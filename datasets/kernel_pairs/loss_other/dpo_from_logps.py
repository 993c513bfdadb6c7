"""DPO from token log-probabilities of packed answers: segment sums make one margin per pair, one number goes back.

s[i] = sum of the tokens of answer i,    m = (s[chosen] - s[rejected]) - (ref[chosen] - ref[rejected]),
    L = log(1 + exp(-beta m)),    dL/ds[chosen] = -beta sigmoid(-beta m) = -dL/ds[rejected].
Answers lie one after another, chosen ones first, with offsets. The forward's program owns a pair and walks over both
its segments. It saves the slope, so that the backward neither sums nor reads a token: it only spreads one number over
each segment, whose tiles are the grid; tiles past the end of a short answer leave at once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dpo_from_logps",
    "family": "loss_other",
    "op": "dpo_loss",
    "schema": 1,
    "techniques": ("varlen", "broadcast-adjoint", "saved-statistics", "grad-in-forward"),
    "saves": ("slope: fp32 (B,)",),
    "grads": ("logps",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _segment_sum(Logps, first, last, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += tl.load(Logps + t, mask=t < last, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _dpo_fwd(Logps, Offsets, Ref, Loss, Slope, B, beta, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    chosen = _segment_sum(Logps, tl.load(Offsets + pair), tl.load(Offsets + pair + 1), BLOCK)
    rejected = _segment_sum(Logps, tl.load(Offsets + B + pair), tl.load(Offsets + B + pair + 1), BLOCK)
    x = beta * (chosen - rejected - (tl.load(Ref + pair) - tl.load(Ref + B + pair)))
    e = tl.exp(-tl.abs(x))
    tl.store(Loss + pair, tl.where(x < 0.0, -x, 0.0) + tl.log(1.0 + e))
    # sigmoid(-x) by the same exponential.
    tl.store(Slope + pair, -beta * tl.where(x < 0.0, 1.0, e) / (1.0 + e))


def forward(logps, offsets, ref, longest, beta=0.1):
    # Answer i has the tokens offsets[i] to offsets[i + 1]; 0 to B - 1 are chosen, B to 2 B - 1 rejected.
    logps, ref = logps.contiguous(), ref.contiguous()
    B = ref.numel() // 2
    loss, slope = (torch.empty(B, device=logps.device, dtype=torch.float32) for _ in range(2))
    BLOCK = max(32, min(1024, triton.next_power_of_2(longest)))
    _dpo_fwd[(B,)](logps, offsets, ref, loss, slope, B, beta, BLOCK=BLOCK, num_warps=max(1, BLOCK // 256))
    return loss, (offsets, slope, logps.shape[0], logps.dtype, longest)


# --- backward ---
@triton.jit
def _dpo_spread(DLoss, Offsets, Slope, DLogps, B, stride_g, BLOCK: tl.constexpr):
    answer = tl.program_id(0)
    first = tl.load(Offsets + answer) + tl.program_id(1) * BLOCK
    last = tl.load(Offsets + answer + 1)
    if first >= last:
        return
    rejected = answer >= B
    pair = tl.where(rejected, answer - B, answer)
    slope = tl.load(DLoss + pair * stride_g) * tl.load(Slope + pair)
    t = first + tl.arange(0, BLOCK)
    tl.store(DLogps + t, tl.where(rejected, -slope, slope) + tl.zeros((BLOCK,), tl.float32), mask=t < last)


def backward(saved, grad_loss, needs=None):
    offsets, slope, tokens, dtype, longest = saved
    B = slope.numel()
    dlogps = torch.empty(tokens, device=slope.device, dtype=dtype)
    BLOCK = max(32, min(1024, triton.next_power_of_2(longest)))
    _dpo_spread[(2 * B, triton.cdiv(longest, BLOCK))](
        grad_loss, offsets, slope, dlogps, B, grad_loss.stride(0), BLOCK=BLOCK, num_warps=max(1, BLOCK // 256)
    )
    return dlogps


# --- check ---
SWEEP = (
    {"B": 8, "longest": 64},
    {"B": 5, "longest": 75},
    {"B": 6, "longest": 130, "dtype": "bfloat16"},
)
BENCH = ({"B": 4096, "longest": 4096, "dtype": "float32"},)


def make_args(B, longest, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (2 * B,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), length.cumsum(0)))
    logps = -torch.rand(int(offsets[-1]), generator=g)
    # The reference is near the policy, so that no margin is saturated.
    answer = torch.repeat_interleave(torch.arange(2 * B), length)
    ref = torch.zeros(2 * B).index_add_(0, answer, logps) + 3.0 * torch.randn(2 * B, generator=g)
    logps = logps.to(device=device, dtype=getattr(torch, dtype))
    return logps, offsets.to(device=device, dtype=torch.int32), ref.to(device), longest, 0.3


def reference(logps, offsets, ref, longest, beta=0.1):
    answers = ref.numel()
    token = torch.arange(logps.shape[0], device=logps.device)
    answer = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    total = torch.zeros(answers, device=logps.device).index_add_(0, answer, logps.float())
    chosen, rejected = (total - ref).view(2, -1)
    return torch.nn.functional.softplus(-beta * (chosen - rejected))
