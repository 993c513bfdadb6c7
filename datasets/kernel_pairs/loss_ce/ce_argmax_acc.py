"""Cross-entropy, entropy and accuracy of the same logits in one pass: two differentiable outputs share one softmax.

ce = lse - x[y],    H = lse - sum of p x,    hit = [argmax x = y]:
    dx = g_ce (p - onehot) - g_H p (x - lse + H).
The forward carries, beside the running maximum and sum, the sum weighted by the logits (for H) and the place of the
maximum (for the accuracy). lse and H are saved; of ce and H either cotangent may be missing, and is compiled out.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_argmax_acc",
    "family": "loss_ce",
    "op": "cross_entropy_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "saved-output", "optional-cotangent", "recompute"),
    "saves": ("lse: fp32 (M,)", "entropy: fp32 (M,)"),
    "grads": ("logits",),
    "nondiff_outputs": (2,),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ce_entropy_fwd(Logits, Target, Ce, Entropy, Hit, Lse, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = -float("inf")
    norm = 0.0
    moment = 0.0
    place = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        live = lane < V - start
        x = tl.load(Logits + row * V + start + lane, mask=live, other=-float("inf")).to(tl.float32)
        here = tl.max(x, 0)
        # A later tile must be larger to win: of equal logits the first counts.
        place = tl.where(here > top, start + tl.argmax(x, 0, tie_break_left=True), place)
        higher = tl.maximum(top, here)
        e = tl.exp(x - higher)
        shrink = tl.exp(top - higher)
        norm = norm * shrink + tl.sum(e, 0)
        moment = moment * shrink + tl.sum(e * tl.where(live, x, 0.0), 0)
        top = higher
    lse = top + tl.log(norm)
    target = tl.load(Target + row)
    tl.store(Lse + row, lse)
    tl.store(Ce + row, lse - tl.load(Logits + row * V + target).to(tl.float32))
    tl.store(Entropy + row, lse - moment / norm)
    tl.store(Hit + row, tl.where(place == target, 1, 0))


def _block(V):
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    return BLOCK, max(1, min(8, BLOCK // 512))


def forward(logits, target):
    logits, target = logits.contiguous(), target.contiguous()
    M, V = logits.shape
    ce, entropy, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    hit = torch.empty(M, device=logits.device, dtype=torch.int32)
    BLOCK, warps = _block(V)
    _ce_entropy_fwd[(M,)](logits, target, ce, entropy, hit, lse, V, BLOCK=BLOCK, num_warps=warps)
    return (ce, entropy, hit), (logits, target, lse, entropy)


# --- backward ---
@triton.jit
def _ce_entropy_bwd(
    DCe, DEntropy, Logits, Target, Lse, Entropy, DLogits, V, ce_stride, h_stride,
    HAS_CE: tl.constexpr, HAS_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_p = tl.load(Logits + row * V + v, mask=v < V, other=0.0).to(tl.float32) - tl.load(Lse + row)
    p = tl.exp(log_p)
    dx = tl.zeros((BLOCK,), tl.float32)
    if HAS_CE:
        onehot = tl.where(v == tl.load(Target + row), 1.0, 0.0)
        dx += tl.load(DCe + row * ce_stride) * (p - onehot)
    if HAS_H:
        dx -= tl.load(DEntropy + row * h_stride) * p * (log_p + tl.load(Entropy + row))
    tl.store(DLogits + row * V + v, dx, mask=v < V)


def backward(saved, grad_ce, grad_entropy, grad_hit=None, needs=None):
    logits, target, lse, entropy = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK, warps = _block(V)
    has_ce, has_h = grad_ce is not None, grad_entropy is not None
    _ce_entropy_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_ce, grad_entropy, logits, target, lse, entropy, dlogits, V,
        grad_ce.stride(0) if has_ce else 0, grad_entropy.stride(0) if has_h else 0,
        HAS_CE=has_ce, HAS_H=has_h, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 6, "V": 128},
    {"M": 9, "V": 201},
    {"M": 4, "V": 5000, "dtype": "bfloat16"},
    {"M": 5, "V": 90, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 32000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("one class has neither entropy nor error")
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(dtype=getattr(torch, dtype))
    # Every other row is classified rightly.
    target = torch.where(torch.arange(M) % 2 == 0, logits.float().argmax(-1), torch.randint(0, V, (M,), generator=g))
    return logits.to(device), target.to(device)


def reference(logits, target):
    log_p = torch.log_softmax(logits.float(), -1)
    ce = -log_p.gather(-1, target[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    # A stable sort puts the first of equal logits in front.
    best = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, 0]
    return ce, entropy, (best == target).to(torch.int32)
