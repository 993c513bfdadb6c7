"""Cosine embedding loss with a margin: pairs beyond the margin are never read again, only their zeros are written.

For y = 1: L = 1 - cos(a, b); for y = -1: L = max(0, cos(a, b) - margin). With s = dL/dcos in {-1, 0, 1}:
    da = s g (b / (|a| |b|) - cos a / |a|^2),    db likewise.
The forward saves the cosine, which decides s before anything is loaded. Rows that stay are read once: the norms are
summed again out of registers, where the row already is, rather than saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cosine_embedding_loss",
    "family": "loss_other",
    "op": "cosine_embedding_loss",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "recompute", "masking", "one-launch"),
    "saves": ("cosine: fp32 (M,)",),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}

TINY = 1e-12
"""Added to both squared norms: a zero vector has cosine 0 with everything."""


# --- forward ---
@triton.jit
def _cosine_loss_fwd(A, B, Label, Loss, Cosine, D, margin, tiny, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    a = tl.load(A + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(B + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    aa = tl.sum(a * a, 0) + tiny
    bb = tl.sum(b * b, 0) + tiny
    cosine = tl.sum(a * b, 0) * tl.rsqrt(aa) * tl.rsqrt(bb)
    apart = tl.where(cosine > margin, cosine - margin, 0.0)
    tl.store(Loss + row, tl.where(tl.load(Label + row) > 0, 1.0 - cosine, apart))
    tl.store(Cosine + row, cosine)


def _block(D):
    BLOCK = triton.next_power_of_2(D)
    return BLOCK, max(1, min(16, BLOCK // 512))


def forward(a, b, label, margin=0.0):
    a, b, label = a.contiguous(), b.contiguous(), label.contiguous()
    M, D = a.shape
    loss, cosine = (torch.empty(M, device=a.device, dtype=torch.float32) for _ in range(2))
    BLOCK, warps = _block(D)
    _cosine_loss_fwd[(M,)](a, b, label, loss, cosine, D, margin, TINY, BLOCK=BLOCK, num_warps=warps)
    return loss, (a, b, label, cosine, margin)


# --- backward ---
@triton.jit
def _cosine_loss_bwd(
    DLoss, A, B, Label, Cosine, DA, DB, D, margin, tiny, stride_g,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    cosine = tl.load(Cosine + row)
    together = tl.load(Label + row) > 0
    if together | (cosine > margin):
        g = tl.load(DLoss + row * stride_g)
        s = tl.where(together, -g, g)
        a = tl.load(A + row * D + d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(B + row * D + d, mask=inside, other=0.0).to(tl.float32)
        a_inv = tl.rsqrt(tl.sum(a * a, 0) + tiny)
        b_inv = tl.rsqrt(tl.sum(b * b, 0) + tiny)
        if NEED_A:
            tl.store(DA + row * D + d, s * a_inv * (b * b_inv - cosine * a_inv * a), mask=inside)
        if NEED_B:
            tl.store(DB + row * D + d, s * b_inv * (a * a_inv - cosine * b_inv * b), mask=inside)
    else:
        zero = tl.zeros((BLOCK,), tl.float32)
        if NEED_A:
            tl.store(DA + row * D + d, zero, mask=inside)
        if NEED_B:
            tl.store(DB + row * D + d, zero, mask=inside)


def backward(saved, grad_loss, needs=(True, True)):
    a, b, label, cosine, margin = saved
    M, D = a.shape
    da = torch.empty_like(a) if needs[0] else None
    db = torch.empty_like(b) if needs[1] else None
    BLOCK, warps = _block(D)
    _cosine_loss_bwd[(M,)](
        grad_loss, a, b, label, cosine, da, db, D, margin, TINY, grad_loss.stride(0),
        NEED_A=needs[0], NEED_B=needs[1], BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"M": 16, "D": 128},
    {"M": 21, "D": 75},
    {"M": 12, "D": 260, "dtype": "bfloat16"},
    {"M": 10, "D": 64, "dtype": "float16"},
)
BENCH = ({"M": 65536, "D": 1024, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(M, D, generator=g)
    # Shared directions, so that cosines lie on both sides of the margin.
    b = torch.randn(M, D, generator=g) + torch.linspace(-1.0, 1.0, M)[:, None] * a
    label = torch.where(torch.rand(M, generator=g) < 0.5, 1, -1)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b)), label.to(device), 0.2)


def reference(a, b, label, margin=0.0):
    cosine = (a.float() * b.float()).sum(-1)
    cosine = cosine * (a.float().square().sum(-1) + TINY).rsqrt() * (b.float().square().sum(-1) + TINY).rsqrt()
    return torch.where(label > 0, 1.0 - cosine, torch.relu(cosine - margin))
