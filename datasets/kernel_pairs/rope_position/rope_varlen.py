"""Rotary embedding of packed sequences: positions come out of cu_seqlens, found anew by every program in both passes.

The start of a token's sequence is the largest offset that does not exceed the token. One load of all offsets and one
maximum find it, with a single wait for memory where a binary search has one for each of its steps; no tensor of
positions is built or saved. A program then turns all heads of its token.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_varlen",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("varlen", "orthogonal-adjoint", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rope_packed(
    X, Offsets, Cos, Sin, Y, sequences, H, HALF, x_t, x_h, x_d, SIGN: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK_B)
    # Beyond the last sequence every lane reads the first offset, zero, which no maximum minds.
    offsets = tl.load(Offsets + i, mask=i < sequences, other=0)
    position = token - tl.max(tl.where(offsets <= token, offsets, 0), 0)
    d = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(Cos + position * HALF + d, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + position * HALF + d, mask=d < HALF, other=0.0) * SIGN
    wide = token.to(tl.int64)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)[:, None]
        mask = (h < H) & (d < HALF)
        source = X + wide * x_t + h * x_h + d * x_d
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
        target = Y + (wide * H + h) * (2 * HALF) + d
        tl.store(target, a * cos - b * sin, mask=mask)
        tl.store(target + HALF, b * cos + a * sin, mask=mask)


def _launch(x, offsets, cos, sin, sign):
    T, H, D = x.shape
    y = torch.empty(T, H, D, device=x.device, dtype=x.dtype)
    sequences = offsets.numel() - 1
    BLOCK_D = triton.next_power_of_2(D // 2)
    _rope_packed[(T,)](
        x, offsets, cos, sin, y, sequences, H, D // 2, *x.stride(), SIGN=sign,
        BLOCK_B=triton.next_power_of_2(sequences), BLOCK_D=BLOCK_D,
        BLOCK_H=max(1, min(triton.next_power_of_2(H), 1024 // BLOCK_D)),
    )  # fmt: skip
    return y


def forward(x, offsets, cos, sin):
    cos, sin = cos.contiguous(), sin.contiguous()
    return _launch(x, offsets, cos, sin, 1), (offsets, cos, sin)


# --- backward ---
def backward(saved, grad_y, needs=None):
    offsets, cos, sin = saved
    return _launch(grad_y, offsets, cos, sin, -1)


# --- check ---
SWEEP = (
    {"lengths": (7, 0, 20, 5), "H": 4, "HALF": 16, "dtype": "float16"},
    {"lengths": (1, 13, 9), "H": 3, "HALF": 20},
    {"lengths": (12, 4, 1, 1, 6), "H": 2, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"lengths": (4096, 1, 3000, 8192, 517, 10000, 578), "H": 32, "HALF": 64, "dtype": "bfloat16"},)


def make_args(lengths, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    x = torch.randn(sum(lengths), H, 2 * HALF, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(max(lengths))[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    return x, offsets.to(device), theta.cos().to(device), theta.sin().to(device)


def reference(x, offsets, cos, sin):
    token = torch.arange(x.shape[0], device=x.device)
    position = token - offsets[torch.searchsorted(offsets, token.to(offsets.dtype), right=True) - 1]
    c, s = cos[position][:, None], sin[position][:, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)
