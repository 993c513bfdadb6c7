"""Negative log-likelihood of given log-probabilities: one entry per row has a gradient, and only those are written.

L[row] = -w[y] logp[row, y], zero for ignored targets. The gradient is a memset at the full bandwidth of the device and
one scattered store per row; a kernel over the whole (M, V) tensor would compare every element with a target that one
of V meets. The log-probabilities are not needed at all, only their shape, so the backward keeps no (M, V) tensor alive.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nll_gather",
    "family": "loss_ce",
    "op": "nll_loss",
    "schema": 1,
    "techniques": ("gather-form", "argmax-routing", "masking"),
    "saves": (),
    "grads": ("log_probs",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _nll_fwd(LogP, Target, Weight, Loss, M, lp_row, lp_col, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(Target + row, mask=row < M, other=ignore)
    kept = (row < M) & (target != ignore)
    log_p = tl.load(LogP + row * lp_row + target * lp_col, mask=kept, other=0.0).to(tl.float32)
    weight = tl.load(Weight + target, mask=kept, other=0.0)
    tl.store(Loss + row, -weight * log_p, mask=row < M)


def forward(log_probs, target, weight, ignore_index=-100):
    target, weight = target.contiguous(), weight.contiguous()
    M = log_probs.shape[0]
    loss = torch.empty(M, device=log_probs.device, dtype=torch.float32)
    _nll_fwd[(triton.cdiv(M, 128),)](
        log_probs, target, weight, loss, M, *log_probs.stride(), ignore_index, BLOCK=128, num_warps=4
    )
    return loss, (target, weight, log_probs.shape, log_probs.dtype, ignore_index)


# --- backward ---
@triton.jit
def _nll_scatter(DLoss, Target, Weight, DLogP, M, V, stride_g, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(Target + row, mask=row < M, other=ignore)
    kept = (row < M) & (target != ignore)
    g = tl.load(DLoss + row * stride_g, mask=kept, other=0.0)
    weight = tl.load(Weight + target, mask=kept, other=0.0)
    # Rows are distinct, so no two stores meet.
    tl.store(DLogP + row * V + target, -g * weight, mask=kept)


def backward(saved, grad_loss, needs=None):
    target, weight, (M, V), dtype, ignore_index = saved
    dlog_probs = torch.zeros(M, V, device=target.device, dtype=dtype)
    _nll_scatter[(triton.cdiv(M, 128),)](
        grad_loss, target, weight, dlog_probs, M, V, grad_loss.stride(0), ignore_index, BLOCK=128, num_warps=4
    )
    return dlog_probs


# --- check ---
SWEEP = (
    {"M": 128, "V": 16},
    {"M": 301, "V": 37},
    {"M": 40, "V": 64, "dtype": "bfloat16"},
    {"M": 50, "V": 9, "dtype": "float16"},
)
BENCH = ({"M": 8192, "V": 32000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    log_probs = torch.log_softmax(torch.randn(M, V, generator=g), -1)
    target = torch.randint(0, V, (M,), generator=g)
    target[2::5] = -100
    weight = 0.5 + torch.rand(V, generator=g)
    return log_probs.to(device=device, dtype=getattr(torch, dtype)), target.to(device), weight.to(device)


def reference(log_probs, target, weight, ignore_index=-100):
    return torch.nn.functional.nll_loss(
        log_probs.float(), target, weight=weight, ignore_index=ignore_index, reduction="none"
    )
