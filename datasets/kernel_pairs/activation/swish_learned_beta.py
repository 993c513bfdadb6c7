"""Swish with one learned beta, x * sigmoid(beta * x): dx beside a scalar gradient that is summed in two launches.

dbeta = sum(dy * x^2 * s * (1 - s)). Every program of the first launch writes its block of dx and one partial sum; the
second is a single program that adds the partials in a fixed order, so that dbeta does not change from run to run.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swish_learned_beta",
    "family": "activation",
    "op": "swish",
    "schema": 1,
    "techniques": ("elementwise", "scalar-gradient", "two-stage-partials", "recompute"),
    "saves": (),
    "grads": ("x", "beta"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _swish_fwd(X, Beta, Y, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    beta = tl.load(Beta).to(tl.float32)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Y + i, x * tl.sigmoid(beta * x), mask=i < size)


def _block(size):
    return 4096 if size >= 1 << 20 else 256


def forward(x, beta):
    x = x.contiguous()
    size = x.numel()
    y = torch.empty_like(x)
    BLOCK = _block(size)
    _swish_fwd[(triton.cdiv(size, BLOCK),)](x, beta, y, size, BLOCK=BLOCK, num_warps=8)
    return y, (x, beta)


# --- backward ---
@triton.jit
def _swish_bwd(DY, X, Beta, DX, Parts, size, NEED_BETA: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    beta = tl.load(Beta).to(tl.float32)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    dy = tl.load(DY + i, mask=i < size, other=0.0).to(tl.float32)
    s = tl.sigmoid(beta * x)
    # x * s' is what both derivatives have in common: dx = s + beta * bend, dbeta = x * bend.
    bend = x * s * (1.0 - s)
    tl.store(DX + i, dy * (s + beta * bend), mask=i < size)
    if NEED_BETA:
        tl.store(Parts + tl.program_id(0), tl.sum(dy * x * bend, 0))


@triton.jit
def _add_parts(Parts, DBeta, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(Parts + start + lane, mask=start + lane < count, other=0.0)
    tl.store(DBeta, tl.sum(total, 0))


def backward(saved, grad_y, needs=None):
    x, beta = saved
    _, need_beta = needs or (True, True)
    size = x.numel()
    BLOCK = _block(size)
    programs = triton.cdiv(size, BLOCK)
    dx = torch.empty_like(x)
    dbeta = torch.empty_like(beta) if need_beta else None
    parts = torch.empty(programs, device=x.device, dtype=torch.float32) if need_beta else None
    _swish_bwd[(programs,)](
        grad_y.contiguous(), x, beta, dx, parts, size, NEED_BETA=need_beta, BLOCK=BLOCK, num_warps=8
    )
    if need_beta:
        _add_parts[(1,)](parts, dbeta, programs, BLOCK=2048, num_warps=8)
    return dx, dbeta


# --- check ---
SWEEP = ({"M": 16, "N": 128, "dtype": "float16"}, {"M": 13, "N": 101}, {"M": 4, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.full((1,), 1.3, device=device)


def reference(x, beta):
    return (x.float() * torch.sigmoid(beta * x.float())).to(x.dtype)
