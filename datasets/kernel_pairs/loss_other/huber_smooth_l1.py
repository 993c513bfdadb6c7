"""Huber loss per element: the derivative is the residual clamped to plus or minus delta, negated for the target."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "huber_smooth_l1",
    "family": "loss_other",
    "op": "huber_loss",
    "schema": 1,
    "techniques": ("elementwise", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("pred", "target"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _huber_fwd(Pred, Target, Loss, numel, delta, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(Pred + i, mask=i < numel, other=0.0).to(tl.float32)
    t = tl.load(Target + i, mask=i < numel, other=0.0).to(tl.float32)
    size = tl.abs(p - t)
    loss = tl.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))
    tl.store(Loss + i, loss, mask=i < numel)


def forward(pred, target, delta=1.0):
    pred, target = pred.contiguous(), target.contiguous()
    loss = torch.empty_like(pred)
    _huber_fwd[(triton.cdiv(pred.numel(), 1024),)](pred, target, loss, pred.numel(), delta, BLOCK=1024)
    return loss, (pred, target, delta)


# --- backward ---
@triton.jit
def _huber_bwd(
    DLoss, Pred, Target, DPred, DTarget, rows, cols, stride_r, stride_c, delta,
    NEED_TARGET: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    live = (r < rows) & (c < cols)
    at = r * cols + c
    residual = tl.load(Pred + at, mask=live, other=0.0).to(tl.float32)
    residual -= tl.load(Target + at, mask=live, other=0.0).to(tl.float32)
    # A mean or sum behind this loss hands down one number with strides (0, 0): it is read from cache, not expanded.
    g = tl.load(DLoss + r * stride_r + c * stride_c, mask=live, other=0.0).to(tl.float32)
    slope = g * tl.minimum(tl.maximum(residual, -delta), delta)
    tl.store(DPred + at, slope, mask=live)
    if NEED_TARGET:
        tl.store(DTarget + at, -slope, mask=live)


def backward(saved, grad_loss, needs=(True, True)):
    pred, target, delta = saved
    rows, cols = pred.shape
    dpred = torch.empty_like(pred)
    dtarget = torch.empty_like(target) if needs[1] else None
    _huber_bwd[(triton.cdiv(rows, 8), triton.cdiv(cols, 128))](
        grad_loss, pred, target, dpred, dtarget, rows, cols, grad_loss.stride(0), grad_loss.stride(1), delta,
        NEED_TARGET=needs[1], BLOCK_R=8, BLOCK_C=128,
    )  # fmt: skip
    return dpred, dtarget


# --- check ---
SWEEP = ({"M": 8, "N": 128}, {"M": 13, "N": 101, "dtype": "float16"}, {"M": 4, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    pred, target = 2 * torch.randn(M, N, generator=g), torch.randn(M, N, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (pred, target)), 1.0)


def reference(pred, target, delta=1.0):
    return torch.nn.functional.huber_loss(pred.float(), target.float(), reduction="none", delta=delta).to(pred.dtype)
