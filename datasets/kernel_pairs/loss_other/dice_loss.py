"""Soft Dice per class from logits: a ratio of sums over everything, whose gradient needs two coefficients per class.

With p = sigmoid(x):    I = sum p t,  U = sum (p + t),    L = mean over classes of 1 - (2 I + s) / (U + s).
Quotient rule, per class:    dL/dp = a t + b,    a = -2 / (C (U + s)),    b = (2 I + s) / (C (U + s)^2).
Two stages: programs own a class and pieces of its pixels and leave two partial sums; one program joins them and leaves
a and b. The backward is then elementwise with a class's coefficients as scalars, and recomputes p.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dice_loss",
    "family": "loss_other",
    "op": "dice_loss",
    "schema": 1,
    "techniques": ("elementwise", "saved-statistics", "recompute", "broadcast-adjoint"),
    "saves": ("coefficients: fp32 (2, C)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _dice_sums(Logits, Target, Parts, N, C, S, BLOCK: tl.constexpr):
    # Pieces of all images of a class; a piece never crosses an image, whose classes lie in between.
    c = tl.program_id(1)
    pieces = tl.cdiv(S, BLOCK)
    common = tl.zeros((BLOCK,), tl.float32)
    union = tl.zeros((BLOCK,), tl.float32)
    for piece in range(tl.program_id(0), N * pieces, tl.num_programs(0)):
        s = (piece % pieces) * BLOCK + tl.arange(0, BLOCK)
        at = ((piece // pieces).to(tl.int64) * C + c) * S + s
        p = tl.sigmoid(tl.load(Logits + at, mask=s < S, other=0.0).to(tl.float32))
        p = tl.where(s < S, p, 0.0)
        t = tl.load(Target + at, mask=s < S, other=0).to(tl.float32)
        common += p * t
        union += p + t
    part = Parts + (tl.program_id(0) * C + c) * 2
    tl.store(part, tl.sum(common, 0))
    tl.store(part + 1, tl.sum(union, 0))


@triton.jit
def _dice_join(Parts, Loss, Coefficients, C, programs, smooth, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    live = c < C
    common = tl.zeros((BLOCK_C,), tl.float32)
    union = tl.zeros((BLOCK_C,), tl.float32)
    for program in range(programs):
        part = Parts + (program * C + c) * 2
        common += tl.load(part, mask=live, other=0.0)
        union += tl.load(part + 1, mask=live, other=0.0)
    below = 1.0 / (union + smooth)
    dice = (2.0 * common + smooth) * below
    tl.store(Loss, 1.0 - tl.sum(tl.where(live, dice, 0.0), 0) / C)
    tl.store(Coefficients + c, -2.0 * below / C, mask=live)
    tl.store(Coefficients + C + c, dice * below / C, mask=live)


def forward(logits, target, smooth=1.0):
    logits, target = logits.contiguous(), target.contiguous()
    N, C, S = logits.shape
    BLOCK = max(64, min(1024, triton.next_power_of_2(S)))
    programs = max(1, min(N * triton.cdiv(S, BLOCK), 1056 // C))
    parts = torch.empty(programs, C, 2, device=logits.device, dtype=torch.float32)
    coefficients = torch.empty(2, C, device=logits.device, dtype=torch.float32)
    loss = torch.empty((), device=logits.device, dtype=torch.float32)
    _dice_sums[(programs, C)](logits, target, parts, N, C, S, BLOCK=BLOCK, num_warps=4)
    _dice_join[(1,)](parts, loss, coefficients, C, programs, smooth, BLOCK_C=triton.next_power_of_2(C), num_warps=1)
    return loss, (logits, target, coefficients)


# --- backward ---
@triton.jit
def _dice_bwd(DLoss, Logits, Target, Coefficients, DLogits, C, S, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = plane % C
    g = tl.load(DLoss)
    a = g * tl.load(Coefficients + c)
    b = g * tl.load(Coefficients + C + c)
    p = tl.sigmoid(tl.load(Logits + plane * S + s, mask=s < S, other=0.0).to(tl.float32))
    t = tl.load(Target + plane * S + s, mask=s < S, other=0).to(tl.float32)
    tl.store(DLogits + plane * S + s, (a * t + b) * p * (1.0 - p), mask=s < S)


def backward(saved, grad_loss, needs=None):
    logits, target, coefficients = saved
    N, C, S = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK = max(64, min(2048, triton.next_power_of_2(S)))
    _dice_bwd[(N * C, triton.cdiv(S, BLOCK))](
        grad_loss, logits, target, coefficients, dlogits, C, S, BLOCK=BLOCK, num_warps=8 if BLOCK >= 2048 else 4
    )
    return dlogits


# --- check ---
SWEEP = (
    {"N": 2, "C": 4, "S": 256},
    {"N": 3, "C": 5, "S": 301},
    {"N": 1, "C": 19, "S": 130, "dtype": "bfloat16"},
    {"N": 2, "C": 1, "S": 90, "dtype": "float16"},
)
BENCH = ({"N": 4, "C": 16, "S": 1048576, "dtype": "bfloat16"},)


def make_args(N, C, S, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(N, C, S, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return logits, (torch.rand(N, C, S, generator=g) < 0.3).to(device=device, dtype=torch.uint8)


def reference(logits, target, smooth=1.0):
    p, t = torch.sigmoid(logits.float()), target.float()
    dice = (2.0 * (p * t).sum((0, 2)) + smooth) / ((p + t).sum((0, 2)) + smooth)
    return (1.0 - dice).mean()
