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
    DCe, DZ, Logits, Target, Lse, DLogits, M, V, size, ce_stride, z_stride,
    HAS_CE: tl.constexpr, HAS_Z: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Vocabularies are odd and rows unaligned. Tiles of the flat tensor are aligned, and no longer than a row: a tile
    # meets one border of rows at most, and what belongs to the rows are two sets of scalars.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = first // V
    after = tl.minimum(row + 1, M - 1)
    lane = tl.arange(0, BLOCK)
    border = ((row + 1) * V - first).to(tl.int32)
    lse, lse_after = tl.load(Lse + row), tl.load(Lse + after)
    factor, factor_after = 0.0, 0.0
    if HAS_Z:
        factor += 2.0 * lse * tl.load(DZ + row * z_stride)
        factor_after += 2.0 * lse_after * tl.load(DZ + after * z_stride)
    if HAS_CE:
        g, g_after = tl.load(DCe + row * ce_stride), tl.load(DCe + after * ce_stride)
        factor += g
        factor_after += g_after
    x = tl.load(Logits + first + lane, mask=first + lane < size, other=0.0).to(tl.float32)
    own = lane < border
    dx = tl.where(own, factor, factor_after) * tl.exp(x - tl.where(own, lse, lse_after))
    if HAS_CE:
        # Places of the two targets, counted from the tile's first element.
        place = border - V + tl.load(Target + row).to(tl.int32)
        place_after = border + tl.load(Target + after).to(tl.int32)
        dx = tl.where(own & (lane == place), dx - g, dx)
        dx = tl.where((lane >= border) & (lane == place_after), dx - g_after, dx)
    tl.store(DLogits + first + lane, dx, mask=first + lane < size)


def backward(saved, grad_ce, grad_z, needs=None):
    logits, target, lse = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    # The largest power of two within a row, up to 4096.
    BLOCK = min(4096, 1 << (V.bit_length() - 1))
    has_ce, has_z = grad_ce is not None, grad_z is not None
    _ce_z_bwd[(triton.cdiv(M * V, BLOCK),)](
        grad_ce, grad_z, logits, target, lse, dlogits, M, V, M * V,
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
