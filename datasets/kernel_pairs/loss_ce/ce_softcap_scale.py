"""Cross-entropy of logits under a scale and a soft cap: the cap is recomputed, and replaces the running maximum.

x = cap tanh(scale z / cap),  loss = lse(x) - x[target],    dz = (p - onehot) (1 - (x / cap)^2) scale g.
No x exceeds the cap, so exp(x - cap) cannot overflow and the forward adds without looking for a maximum first.
The backward forms x from z again: with it come both the probability and the slope of the cap.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_softcap_scale",
    "family": "loss_ce",
    "op": "cross_entropy_softcap",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "elementwise", "chunked"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _capped_fraction(z, slope):
    """tanh(slope z) by one exponential of a number that is never positive."""
    e = tl.exp(-2.0 * slope * tl.abs(z))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(z < 0.0, -t, t)


@triton.jit
def _softcap_ce_fwd(Logits, Target, Loss, Lse, V, cap, slope, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(Logits + row * V + v, mask=v < V, other=0.0).to(tl.float32)
        below = cap * (_capped_fraction(z, slope) - 1.0)
        total += tl.where(v < V, tl.exp(below), 0.0)
    lse = cap + tl.log(tl.sum(total, 0))
    z = tl.load(Logits + row * V + tl.load(Target + row)).to(tl.float32)
    tl.store(Lse + row, lse)
    tl.store(Loss + row, lse - cap * _capped_fraction(z, slope))


def forward(logits, target, cap=30.0, scale=1.0):
    if not 0.0 < cap <= 40.0:
        raise ValueError("exp(-2 cap) must be an fp32 number: the cap may be at most 40")
    logits, target = logits.contiguous(), target.contiguous()
    M, V = logits.shape
    loss, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    _softcap_ce_fwd[(M,)](logits, target, loss, lse, V, cap, scale / cap, BLOCK=BLOCK, num_warps=4)
    return loss, (logits, target, lse, cap, scale)


# --- backward ---
@triton.jit
def _softcap_ce_bwd(
    DLoss, Logits, Target, Lse, DLogits, V, cap, slope, scale, stride_g, BLOCK: tl.constexpr, TILES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    g = scale * tl.load(DLoss + row * stride_g)
    lse = tl.load(Lse + row)
    target = tl.load(Target + row)
    # A few tiles per program spread the loads of the row's scalars and the start of the program.
    for tile in tl.static_range(TILES):
        v = (tl.program_id(1) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(Logits + row * V + v, mask=v < V, other=0.0).to(tl.float32)
        t = _capped_fraction(z, slope)
        p = tl.exp(cap * t - lse)
        dx = tl.where(v == target, p - 1.0, p)
        tl.store(DLogits + row * V + v, g * dx * (1.0 - t * t), mask=v < V)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, cap, scale = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK = max(64, min(1024, triton.next_power_of_2(V) // 4))
    _softcap_ce_bwd[(M, triton.cdiv(V, 4 * BLOCK))](
        grad_loss, logits, target, lse, dlogits, V, cap, scale / cap, scale, grad_loss.stride(0),
        BLOCK=BLOCK, TILES=4, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 6, "V": 256, "cap": 3.0},
    {"M": 9, "V": 301, "cap": 30.0},
    {"M": 4, "V": 150, "cap": 5.0, "dtype": "bfloat16"},
    {"M": 5, "V": 90, "cap": 15.0, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 32000, "cap": 30.0, "dtype": "bfloat16"},)


def make_args(M, V, cap, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("a softmax over one class is constant")
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return logits, torch.randint(0, V, (M,), generator=g).to(device), cap, 0.5


def reference(logits, target, cap=30.0, scale=1.0):
    capped = cap * torch.tanh(scale * logits.float() / cap)
    return torch.nn.functional.cross_entropy(capped, target, reduction="none")
