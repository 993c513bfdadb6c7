"""Rotary embedding of the first 2 * HALF of D dims; the gradient of the rest is the cotangent, copied in the same pass.

A program owns some rows of one head and reads their cosines once: turned lanes and tail go out in one launch, so that a
row of dx is written whole, and no second kernel or slice assignment touches it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_partial",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rope_head_rows(
    X, Cos, Sin, Y, S, H, D, HALF, x_b, x_h, x_s, x_d, SIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    s = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    source = X + (head // H).to(tl.int64) * x_b + (head % H).to(tl.int64) * x_h + s.to(tl.int64) * x_s
    target = Y + (head.to(tl.int64) * S + s) * D
    d = tl.arange(0, BLOCK_D)[None, :]
    turned = (s < S) & (d < HALF)
    cos = tl.load(Cos + s * HALF + d, mask=turned, other=0.0)
    sin = tl.load(Sin + s * HALF + d, mask=turned, other=0.0) * SIGN
    a = tl.load(source + d * x_d, mask=turned, other=0.0).to(tl.float32)
    b = tl.load(source + (HALF + d) * x_d, mask=turned, other=0.0).to(tl.float32)
    tl.store(target + d, a * cos - b * sin, mask=turned)
    tl.store(target + HALF + d, b * cos + a * sin, mask=turned)
    t = 2 * HALF + tl.arange(0, BLOCK_T)[None, :]
    passed = (s < S) & (t < D)
    tl.store(target + t, tl.load(source + t * x_d, mask=passed, other=0.0), mask=passed)


def _launch(x, cos, sin, sign):
    B, H, S, D = x.shape
    HALF = cos.shape[1]
    y = torch.empty(B, H, S, D, device=x.device, dtype=x.dtype)
    BLOCK_D, BLOCK_T = triton.next_power_of_2(HALF), triton.next_power_of_2(max(1, D - 2 * HALF))
    ROWS = max(1, min(32, 2048 // max(BLOCK_D, BLOCK_T)))
    _rope_head_rows[(triton.cdiv(S, ROWS), B * H)](
        x, cos, sin, y, S, H, D, HALF, *x.stride(), SIGN=sign, ROWS=ROWS, BLOCK_D=BLOCK_D, BLOCK_T=BLOCK_T
    )
    return y


def forward(x, cos, sin):
    cos, sin = cos.contiguous(), sin.contiguous()
    return _launch(x, cos, sin, 1), (cos, sin)


# --- backward ---
def backward(saved, grad_y, needs=None):
    # The map is a rotation beside an identity: its transpose is the same kernel, turning the other way.
    cos, sin = saved
    return _launch(grad_y, cos, sin, -1)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "S": 40, "HALF": 8, "TAIL": 32, "dtype": "float16"},
    {"B": 2, "H": 3, "S": 35, "HALF": 5, "TAIL": 19},
    {"B": 1, "H": 2, "S": 20, "HALF": 16, "TAIL": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "S": 4096, "HALF": 16, "TAIL": 96, "dtype": "bfloat16"},)


def make_args(B, H, S, HALF, TAIL, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, S, 2 * HALF + TAIL, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    return x, theta.cos().to(device), theta.sin().to(device)


def reference(x, cos, sin):
    HALF = cos.shape[1]
    a, b, tail = x[..., :HALF].float(), x[..., HALF : 2 * HALF].float(), x[..., 2 * HALF :]
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), tail), -1)
