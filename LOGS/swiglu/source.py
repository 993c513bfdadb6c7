"""SwiGLU: `silu(gate) * up`, elementwise over tensors of any shape."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def swiglu_fwd_kernel(GATE, UP, OUT, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    b_gate = tl.load(GATE + offsets, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(UP + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + offsets, b_gate * tl.sigmoid(b_gate) * b_up, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def swiglu(gate, up):
    """`gate * sigmoid(gate) * up` of two tensors of the same shape."""
    assert gate.shape == up.shape
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n_elements = out.numel()
    BLOCK = 1024
    swiglu_fwd_kernel[(triton.cdiv(n_elements, BLOCK),)](gate, up, out, n_elements, BLOCK=BLOCK)
    return out


SWEEP = [
    dict(tokens=4096, hidden=11008),
    dict(tokens=4096, hidden=11008, dtype="bfloat16"),
    dict(tokens=33, hidden=257),
]


def make_args(tokens, hidden, dtype="float32", device="cuda"):
    gate, up = torch.randn(2, tokens, hidden, device=device).to(getattr(torch, dtype))
    return gate, up


def reference(gate, up):
    return torch.nn.functional.silu(gate) * up
