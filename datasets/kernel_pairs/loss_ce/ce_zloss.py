"""Cross-entropy and its z-loss as two outputs: both pass through the log-sum-exp, so one factor on p serves both.

ce = lse - x[target],  z = lse^2:    dx = p (g_ce + 2 lse g_z) - onehot g_ce.
Either cotangent may be missing and is then left out at compile time; without g_ce not even the targets are read.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_zloss",
    "family": "loss_ce",
    "op": "cross_entropy_z_loss",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "optional-cotangent", "row-local"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ce_z_fwd(Logits, Target, Ce, Z, Lse, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = Logits + row * V
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_row + start + lane, mask=lane < V - start, other=0.0).to(tl.float32)
        x = tl.where(lane < V - start, x, -float("inf"))
        # A new maximum is rare after the first tiles: each lane rescales only its own sum.
        higher = tl.maximum(top, x)
        norm = norm * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    best = tl.max(top, 0)
    lse = best + tl.log(tl.sum(norm * tl.exp(top - best), 0))
    picked = tl.load(x_row + tl.load(Target + row)).to(tl.float32)
    tl.store(Lse + row, lse)
    tl.store(Ce + row, lse - picked)
    tl.store(Z + row, lse * lse)


def _block(V):
    return max(64, min(4096, triton.next_power_of_2(V)))


def forward(logits, target):
    logits, target = logits.contiguous(), target.contiguous()
    M, V = logits.shape
    ce, z, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    BLOCK = _block(V)
    _ce_z_fwd[(M,)](logits, target, ce, z, lse, V, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)))
    return (ce, z), (logits, target, lse)


# --- backward ---
@triton.jit
def _ce_z_bwd(
    DCe, DZ, Logits, Target, Lse, DLogits, V, ce_stride, z_stride,
    HAS_CE: tl.constexpr, HAS_Z: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(Lse + row)
    factor = 0.0
    if HAS_Z:
        factor += 2.0 * lse * tl.load(DZ + row * z_stride)
    if HAS_CE:
        g = tl.load(DCe + row * ce_stride)
        factor += g
    dx = factor * tl.exp(tl.load(Logits + row * V + v, mask=v < V, other=0.0).to(tl.float32) - lse)
    if HAS_CE:
        dx = tl.where(v == tl.load(Target + row), dx - g, dx)
    tl.store(DLogits + row * V + v, dx, mask=v < V)


def backward(saved, grad_ce, grad_z, needs=None):
    logits, target, lse = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK = _block(V)
    has_ce, has_z = grad_ce is not None, grad_z is not None
    _ce_z_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_ce, grad_z, logits, target, lse, dlogits, V,
        grad_ce.stride(0) if has_ce else 0, grad_z.stride(0) if has_z else 0,
        HAS_CE=has_ce, HAS_Z=has_z, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)),
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 6, "V": 128},
    {"M": 9, "V": 201},
    {"M": 4, "V": 5000, "dtype": "bfloat16"},
    {"M": 5, "V": 90, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 50257, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return logits, torch.randint(0, V, (M,), generator=g).to(device)


def reference(logits, target):
    lse = torch.logsumexp(logits.float(), -1)
    return lse - logits.gather(-1, target[:, None])[:, 0].float(), lse.square()
