"""Channel dropout of (N, C, H, W): one random number decides for a whole plane, and dx is dy times that constant.

The number is drawn again in the backward from the seed and the plane's index. A dropped plane reads nothing in either
direction: its program only writes zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dropout_channel",
    "family": "dropout_rng",
    "op": "dropout2d",
    "schema": 1,
    "techniques": ("rng-replay", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scale_planes(X, Y, C, L, x_n, x_c, x_l, p, scale, seed, BLOCK: tl.constexpr):
    # Y is contiguous, X of any strides: forward and backward are the same map, applied to x and to dy.
    plane = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = Y + plane.to(tl.int64) * L + at
    # A scalar draw: all elements of the plane take the same branch.
    if tl.rand(seed, plane) >= p:
        base = (plane // C).to(tl.int64) * x_n + (plane % C).to(tl.int64) * x_c
        x = tl.load(X + base + at.to(tl.int64) * x_l, mask=at < L, other=0.0).to(tl.float32)
        tl.store(out, x * scale, mask=at < L)
    else:
        tl.store(out, tl.zeros((BLOCK,), tl.float32), mask=at < L)


def _scaled(x, p, seed):
    N, C, H, W = x.shape
    L = H * W
    # Positions of a plane lie at one distance in every common layout; where not, this copies.
    flat = x.flatten(2)
    y = torch.empty(N, C, H, W, device=x.device, dtype=x.dtype)
    BLOCK = min(4096, triton.next_power_of_2(L))
    _scale_planes[(N * C, triton.cdiv(L, BLOCK))](
        flat, y, C, L, *flat.stride(), p, 1.0 / (1.0 - p), seed, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512))
    )
    return y


def forward(x, p, seed):
    return _scaled(x, p, seed), (p, seed)


# --- backward ---
def backward(saved, grad_y, needs=None):
    p, seed = saved
    return _scaled(grad_y, p, seed)


# --- check ---
SWEEP = (
    {"N": 3, "C": 8, "H": 8, "W": 8},
    {"N": 2, "C": 11, "H": 9, "W": 13, "dtype": "float16"},
    {"N": 3, "C": 5, "H": 7, "W": 7, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "C": 256, "H": 56, "W": 56, "dtype": "bfloat16"},)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)), 0.3, 99 + seed


def _philox_uniform(seed, counters):
    """The first word of Philox4x32-10 at counters (i, 0, 0, 0), as a float in [0, 1), in 64-bit integer arithmetic."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # 32 x 32 -> 64 bit products by halves, because int64 has no unsigned high part.
        products = []
        for factor, word in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])):
            upper = factor * (word >> 16)
            lower = factor * (word & 0xFFFF)
            total = ((upper & 0xFFFF) << 16) + lower
            products.append(((upper >> 16) + (total >> 32), total & low))
        (hi_a, lo_a), (hi_b, lo_b) = products
        c = [(hi_b ^ c[1] ^ k0) & low, lo_b, (hi_a ^ c[3] ^ k1) & low, lo_a]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    signed = torch.where(c[0] >= 2**31, c[0] - 2**32, c[0])
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, p, seed):
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    keep = (_philox_uniform(seed, planes) >= p).view(*x.shape[:2], 1, 1)
    return (x.float() * keep / (1.0 - p)).to(x.dtype)
