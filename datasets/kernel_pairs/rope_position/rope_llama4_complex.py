"""Rotary embedding as a complex product with freqs_cis: the backward multiplies by the conjugate, and nothing else.

Neighbouring lanes are real and imaginary part, in x and in the table alike, so that both are read dense and split in
registers alike. A program owns the heads of one token, which share one row of the table. The conjugate is a sign on the
imaginary parts of the table, known at compile time.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_llama4_complex",
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
def _complex_product(
    X, Cis, Y, S, H, D, x_b, x_s, x_h, x_d, CONJUGATE: tl.constexpr, BLOCK_H: tl.constexpr, PAIRS: tl.constexpr
):
    token = tl.program_id(0)
    position = token % S
    lane = tl.arange(0, 2 * PAIRS)[None, :]
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    mask = (h < H) & (lane < D)
    cis = tl.load(Cis + position * D + lane, mask=lane < D, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(cis, (1, PAIRS, 2)))
    if CONJUGATE:
        imaginary = -imaginary
    source = X + (token // S).to(tl.int64) * x_b + position.to(tl.int64) * x_s + h * x_h + lane * x_d
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (BLOCK_H, PAIRS, 2)))
    y = tl.join(a * real - b * imaginary, a * imaginary + b * real)
    out = Y + (token.to(tl.int64) * H + h) * D + lane
    tl.store(out, tl.reshape(y, (BLOCK_H, 2 * PAIRS)), mask=mask)


def _product(x, freqs_cis, conjugate):
    B, S, H, D = x.shape
    y = torch.empty(B, S, H, D, device=x.device, dtype=x.dtype)
    PAIRS = triton.next_power_of_2(D // 2)
    BLOCK_H = max(1, min(triton.next_power_of_2(H), 1024 // PAIRS))
    _complex_product[(B * S, triton.cdiv(H, BLOCK_H))](
        x, freqs_cis, y, S, H, D, *x.stride(), CONJUGATE=conjugate, BLOCK_H=BLOCK_H, PAIRS=PAIRS
    )
    return y


def forward(x, freqs_cis):
    freqs_cis = freqs_cis.contiguous()
    return _product(x, freqs_cis, False), (freqs_cis,)


# --- backward ---
def backward(saved, grad_y, needs=None):
    (freqs_cis,) = saved
    return _product(grad_y, freqs_cis, True)


# --- check ---
SWEEP = (
    {"B": 2, "S": 6, "H": 4, "PAIRS": 16, "dtype": "float16"},
    {"B": 1, "S": 9, "H": 3, "PAIRS": 21},
    {"B": 1, "S": 5, "H": 2, "PAIRS": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "H": 40, "PAIRS": 64, "dtype": "bfloat16"},)


def make_args(B, S, H, PAIRS, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, H, 2 * PAIRS, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(S)[:, None] * 500000.0 ** (-torch.arange(PAIRS) / PAIRS)
    # (S, PAIRS, 2): torch.view_as_real of the complex exponentials.
    return x, torch.stack((theta.cos(), theta.sin()), -1).to(device)


def reference(x, freqs_cis):
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turned = z * torch.view_as_complex(freqs_cis)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
