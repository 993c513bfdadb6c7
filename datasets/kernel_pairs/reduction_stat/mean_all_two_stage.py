"""Mean of a whole tensor by partial sums and a finishing program; its adjoint is one scalar, broadcast to the input."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mean_all_two_stage",
    "family": "reduction_stat",
    "op": "mean",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "elementwise"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _partial_sums(X, Parts, numel, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(pid * BLOCK, numel, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(Parts + pid, tl.sum(total, 0))


@triton.jit
def _finish_mean(Parts, Out, count, numel, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(Parts + i, mask=i < count, other=0.0), 0)
    tl.store(Out, total / numel)


def forward(x):
    x = x.contiguous()
    numel = x.numel()
    count = min(1024, triton.cdiv(numel, 512))
    parts = torch.empty(count, device=x.device, dtype=torch.float32)
    out = torch.empty((), device=x.device, dtype=x.dtype)
    _partial_sums[(count,)](x, parts, numel, BLOCK=256)
    _finish_mean[(1,)](parts, out, count, numel, BLOCK=triton.next_power_of_2(count))
    return out, (x,)


# --- backward ---
@triton.jit
def _mean_bwd(DOut, DX, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # The scalar is read on the device: asking the host for it would stall the stream.
    share = tl.load(DOut).to(tl.float32) / numel
    tl.store(DX + i, tl.zeros((BLOCK,), tl.float32) + share, mask=i < numel)


def backward(saved, grad_out, needs=None):
    (x,) = saved
    dx = torch.empty_like(x)
    _mean_bwd[(triton.cdiv(x.numel(), 2048),)](grad_out, dx, x.numel(), BLOCK=2048)
    return dx


# --- check ---
SWEEP = ({"M": 32, "N": 64}, {"M": 19, "N": 101, "dtype": "float16"}, {"M": 8, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) + 0.5).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().mean().to(x.dtype)
