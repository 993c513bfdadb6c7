"""Local response normalisation across channels: the adjoint of a window sum is a window sum, of saved scales.

y_c = x_c s_c^-beta with s_c = k + alpha / n * sum of x^2 over the n channels around c. A channel's gradient gathers
from the channels that it helped to scale, which are the same n for odd n: dx_c = dy_c s_c^-beta - 2 alpha beta / n *
x_c * sum over the window of dy x s^(-beta - 1). Powers cost more than reading, and an element stands in n windows:
saved are s and x s^(-beta - 1), from which x returns. Images are (B, C, S), S running over pixels. A program owns a
tile (channel, pixel) and reads it once per place in the window, shifted by whole rows, which are aligned and all but
the first of which the cache has.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "local_response_norm",
    "family": "norm_channel",
    "op": "local_response_norm",
    "schema": 1,
    "techniques": ("halo", "gather-form", "saved-statistics", "strided-cotangent"),
    "saves": ("pulled: fp32 (B, C, S)", "scale: fp32 (B, C, S)"),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lrn_fwd(
    X, Y, Scale, Pulled, C, S, k, share, beta, HALF: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64) * C * S
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    s = (tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :]
    at = image + c.to(tl.int64) * S + s
    energy = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for offset in tl.static_range(-HALF, HALF + 1):
        near = (c + offset >= 0) & (c + offset < C) & (s < S)
        x = tl.load(X + at + offset * S, mask=near, other=0.0).to(tl.float32)
        energy += x * x
    scale = k + share * energy
    mask = (c < C) & (s < S)
    tl.store(Scale + at, scale, mask=mask)
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.exp2(-beta * tl.log2(scale))
    tl.store(Y + at, y, mask=mask)
    tl.store(Pulled + at, y / scale, mask=mask)


def _blocks(C, S):
    """A stretch of channels, whose halo is read again by its neighbours, and one of pixels."""
    BLOCK_C = min(32, triton.next_power_of_2(C))
    return BLOCK_C, max(16, min(1024 // BLOCK_C, triton.next_power_of_2(S)))


def forward(x, size=5, alpha=1e-4, beta=0.75, k=2.0):
    if size % 2 == 0:
        raise ValueError("the window has a channel in its middle: size must be odd")
    x = x.contiguous()
    B, C, S = x.shape
    y = torch.empty_like(x)
    scale, pulled = (torch.empty(B, C, S, device=x.device, dtype=torch.float32) for _ in range(2))
    BLOCK_C, BLOCK_S = _blocks(C, S)
    _lrn_fwd[(B, triton.cdiv(C, BLOCK_C), triton.cdiv(S, BLOCK_S))](
        x, y, scale, pulled, C, S, k, alpha / size, beta, HALF=size // 2, BLOCK_C=BLOCK_C, BLOCK_S=BLOCK_S, num_warps=4
    )
    return y, (pulled, scale, size, alpha, beta)


# --- backward ---
@triton.jit
def _lrn_bwd(
    DY, Pulled, Scale, DX, C, S, pull, beta, dy_b, dy_c, dy_s,
    HALF: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    s = (tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :]
    at = (image * C + c) * S + s
    dy_at = image * dy_b + c.to(tl.int64) * dy_c + s.to(tl.int64) * dy_s
    around = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for offset in tl.static_range(-HALF, HALF + 1):
        near = (c + offset >= 0) & (c + offset < C) & (s < S)
        dy = tl.load(DY + dy_at + offset * dy_c, mask=near, other=0.0).to(tl.float32)
        around += dy * tl.load(Pulled + at + offset * S, mask=near, other=0.0)
    mask = (c < C) & (s < S)
    dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(Scale + at, mask=mask, other=1.0)
    power = tl.exp2(-beta * tl.log2(scale))
    x = tl.load(Pulled + at, mask=mask, other=0.0) * scale / power
    tl.store(DX + at, dy * power - pull * x * around, mask=mask)


def backward(saved, grad_y, needs=None):
    pulled, scale, size, alpha, beta = saved
    B, C, S = scale.shape
    dx = torch.empty(B, C, S, device=scale.device, dtype=grad_y.dtype)
    BLOCK_C, BLOCK_S = _blocks(C, S)
    _lrn_bwd[(B, triton.cdiv(C, BLOCK_C), triton.cdiv(S, BLOCK_S))](
        grad_y, pulled, scale, dx, C, S, 2.0 * alpha * beta / size, beta, *grad_y.stride(),
        HALF=size // 2, BLOCK_C=BLOCK_C, BLOCK_S=BLOCK_S, num_warps=8,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "C": 16, "S": 32},
    {"B": 2, "C": 37, "S": 45, "SIZE": 3, "dtype": "float16"},
    {"B": 1, "C": 6, "S": 70, "SIZE": 9, "dtype": "bfloat16"},
)
BENCH = ({"B": 128, "C": 192, "S": 784, "dtype": "float32"},)


def make_args(B, C, S, SIZE=5, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # A strength at which neighbours matter: the customary 1e-4 is meant for pixels of 0 to 255.
    x = torch.randn(B, C, S, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, SIZE, 0.8, 0.75, 1.0


def reference(x, size=5, alpha=1e-4, beta=0.75, k=2.0):
    return torch.nn.functional.local_response_norm(x.float(), size, alpha, beta, k).to(x.dtype)
