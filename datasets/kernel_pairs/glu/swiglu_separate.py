"""SwiGLU of two tensors, silu(gate) * up: both gradients leave one pass, the activation is recomputed from the gate."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_separate",
    "family": "glu",
    "op": "swiglu",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "one-launch"),
    "saves": (),
    "grads": ("gate", "up"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _swiglu_fwd(Gate, Up, Out, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < numel
    a = tl.load(Gate + i, mask=live, other=0.0).to(tl.float32)
    b = tl.load(Up + i, mask=live, other=0.0).to(tl.float32)
    tl.store(Out + i, a * tl.sigmoid(a) * b, mask=live)


def forward(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _swiglu_fwd[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024)
    return out, (gate, up)


# --- backward ---
@triton.jit
def _swiglu_bwd(DOut, Gate, Up, DGate, DUp, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < numel
    g = tl.load(DOut + i, mask=live, other=0.0).to(tl.float32)
    a = tl.load(Gate + i, mask=live, other=0.0).to(tl.float32)
    b = tl.load(Up + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    silu = a * s
    # silu' = s + a*s*(1 - s) = s + silu*(1 - s)
    tl.store(DGate + i, g * b * (s + silu * (1.0 - s)), mask=live)
    tl.store(DUp + i, g * silu, mask=live)


def backward(saved, grad_out, needs=None):
    gate, up = saved
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _swiglu_bwd[(triton.cdiv(gate.numel(), 1024),)](
        grad_out.contiguous(), gate, up, dgate, dup, gate.numel(), BLOCK=1024
    )
    return dgate, dup


# --- check ---
SWEEP = ({"M": 8, "D": 128}, {"M": 11, "D": 99, "dtype": "float16"}, {"M": 8, "D": 256, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "D": 11008, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(M, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(2))


def reference(gate, up):
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
