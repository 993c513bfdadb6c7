"""Swish of every element, the same function as SiLU under another author's names."""

import torch
import triton
import triton.language as tl

META = {"slug": "swish_renamed", "family": "activation", "op": "swish", "schema": 1, "grads": ("inp",)}


# --- forward ---
@triton.jit
def swish_kernel(src_ptr, dst_ptr, numel, TILE: tl.constexpr):
    offs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    val = tl.load(src_ptr + offs, mask=offs < numel)
    tl.store(dst_ptr + offs, val * tl.sigmoid(val), mask=offs < numel)


def forward(inp):
    res = torch.empty_like(inp)
    swish_kernel[(triton.cdiv(inp.numel(), 128),)](inp, res, inp.numel(), TILE=128)
    return res, (inp,)


# --- backward ---
@triton.jit
def swish_grad_kernel(up_ptr, src_ptr, dst_ptr, numel, TILE: tl.constexpr):
    offs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    val = tl.load(src_ptr + offs, mask=offs < numel)
    gate = tl.sigmoid(val)
    tl.store(
        dst_ptr + offs,
        tl.load(up_ptr + offs, mask=offs < numel) * (gate * (1.0 + val * (1.0 - gate))),
        mask=offs < numel,
    )


def backward(saved, grad_res, needs=None):
    (inp,) = saved
    grad_inp = torch.empty_like(inp)
    swish_grad_kernel[(triton.cdiv(inp.numel(), 128),)](grad_res.contiguous(), inp, grad_inp, inp.numel(), TILE=128)
    return grad_inp


# --- check ---
SWEEP = [{"n": 100}]


def make_args(n, device="cpu", seed=0):
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device),)


def reference(inp):
    return inp * torch.sigmoid(inp)
