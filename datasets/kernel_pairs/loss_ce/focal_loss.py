"""Binary focal loss over logits, divided by the number of positives: the product rule in logarithms.

With z = x for positives and -x for negatives, q = sigmoid(z) and n = -log q = log(1 + exp(-z)):
    L = sum of a (1 - q)^gamma n / positives,    dL/dz = -a (1 - q)^gamma (gamma q n + 1 - q) / positives.
log(1 - q) is -(z + n), so the power is one exponential of gamma times it, exact where q is nearly one and 1 - q would
round to zero. The count of positives is a sum over the labels that runs beside the loss. Special functions cost more
than the bytes: the backward takes logarithms and powers to base two, and both sigmoids from one reciprocal.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "focal_loss",
    "family": "loss_ce",
    "op": "sigmoid_focal_loss",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "broadcast-adjoint"),
    "saves": ("positives: fp32 ()",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _focal_parts(x, positive):
    """z, -log sigmoid(z) and sigmoid(z), all from exp(-|z|)."""
    z = tl.where(positive, x, -x)
    e = tl.exp(-tl.abs(z))
    n = tl.where(z < 0.0, -z, 0.0) + tl.log(1.0 + e)
    return z, n, tl.where(z < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _focal_sums(Logits, Label, Sums, numel, alpha, gamma, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(program.to(tl.int64) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + i, mask=i < numel, other=0.0).to(tl.float32)
        positive = tl.load(Label + i, mask=i < numel, other=0) != 0
        z, n, _ = _focal_parts(x, positive)
        weight = tl.where(positive, alpha, 1.0 - alpha) * tl.exp(-gamma * (z + n))
        total += tl.where(i < numel, weight * n, 0.0)
        count += positive.to(tl.int32)
    tl.store(Sums + 2 * program, tl.sum(total, 0))
    tl.store(Sums + 2 * program + 1, tl.sum(count, 0).to(tl.float32))


@triton.jit
def _focal_normalise(Sums, Loss, Positives, programs, BLOCK: tl.constexpr):
    p = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(Sums + 2 * p, mask=p < programs, other=0.0), 0)
    # An image without objects is divided by one.
    positives = tl.maximum(tl.sum(tl.load(Sums + 2 * p + 1, mask=p < programs, other=0.0), 0), 1.0)
    tl.store(Loss, total / positives)
    tl.store(Positives, positives)


def forward(logits, label, alpha=0.25, gamma=2.0):
    logits, label = logits.contiguous(), label.contiguous()
    numel = logits.numel()
    programs = min(triton.cdiv(numel, 1024), 1024)
    sums = torch.empty(programs, 2, device=logits.device, dtype=torch.float32)
    loss, positives = (torch.empty((), device=logits.device, dtype=torch.float32) for _ in range(2))
    _focal_sums[(programs,)](logits, label, sums, numel, alpha, gamma, BLOCK=1024, num_warps=4)
    _focal_normalise[(1,)](sums, loss, positives, programs, BLOCK=triton.next_power_of_2(programs), num_warps=4)
    return loss, (logits, label, positives, alpha, gamma)


# --- backward ---
@triton.jit
def _focal_bwd(DLoss, Logits, Label, Positives, DLogits, numel, alpha, gamma, BLOCK: tl.constexpr):
    # 64 bits to find the block, 32 within it.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    left = tl.minimum(numel - first, BLOCK).to(tl.int32)
    x = tl.load(Logits + first + i, mask=i < left, other=0.0).to(tl.float32)
    positive = tl.load(Label + first + i, mask=i < left, other=0) != 0
    share = tl.load(DLoss) / tl.load(Positives)
    # z and n in units of log 2: powers of two and logarithms to base two are single instructions.
    z = tl.where(positive, x, -x) * 1.4426950408889634
    e = tl.exp2(-tl.abs(z))
    n = tl.maximum(-z, 0.0) + libdevice.fast_log2f(1.0 + e)
    # q and 1 - q without a difference: one is 1 / (1 + e), the other e / (1 + e).
    larger = libdevice.fast_dividef(tl.full(e.shape, 1.0, tl.float32), 1.0 + e)
    smaller = e * larger
    q = tl.where(z < 0.0, smaller, larger)
    hard = tl.where(z < 0.0, larger, smaller)
    # Toward the label for positives, away from it for negatives.
    weight = tl.where(positive, -alpha * share, (1.0 - alpha) * share) * tl.exp2(-gamma * (z + n))
    slope = weight * (gamma * 0.6931471805599453 * q * n + hard)
    tl.store(DLogits + first + i, slope, mask=i < left)


def backward(saved, grad_loss, needs=None):
    logits, label, positives, alpha, gamma = saved
    dlogits = torch.empty_like(logits)
    _focal_bwd[(triton.cdiv(logits.numel(), 2048),)](
        grad_loss, logits, label, positives, dlogits, logits.numel(), alpha, gamma, BLOCK=2048, num_warps=4
    )
    return dlogits


# --- check ---
SWEEP = (
    {"N": 64, "C": 32, "gamma": 2.0},
    {"N": 75, "C": 41, "gamma": 1.5},
    {"N": 20, "C": 90, "gamma": 2.0, "dtype": "bfloat16"},
    {"N": 33, "C": 7, "gamma": 0.5, "dtype": "float16"},
)
BENCH = ({"N": 786432, "C": 80, "gamma": 2.0, "dtype": "bfloat16"},)


def make_args(N, C, gamma, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(N, C, generator=g) - 1.0).to(device=device, dtype=getattr(torch, dtype))
    label = (torch.rand(N, C, generator=g) < 0.05).to(device=device, dtype=torch.uint8)
    return logits, label, 0.25, gamma


def reference(logits, label, alpha=0.25, gamma=2.0):
    x, y = logits.float(), label.float()
    p = torch.sigmoid(x)
    ce = torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none")
    miss = torch.where(label != 0, 1.0 - p, p)
    weight = torch.where(label != 0, alpha, 1.0 - alpha)
    return (weight * miss.pow(gamma) * ce).sum() / y.sum().clamp(min=1.0)
