"""Overlapping frames of a signal, as before a short-time Fourier transform: the adjoint, overlap-add, as a gather.

Adding frames into the signal would collide wherever they overlap. Instead a sample asks which frames cover it, at most
ceil(width / hop), and sums what they hold at its place: each sample is written once, without atomics.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "unfold_1d_frames",
    "family": "gather_scatter",
    "op": "frame",
    "schema": 1,
    "techniques": ("gather-form", "halo", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _frame_fwd(X, Y, L, frames, width, hop, BLOCK_F: tl.constexpr, BLOCK_W: tl.constexpr):
    signal = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)[:, None]
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)[None, :]
        ok = (f < frames) & (w < width)
        x = tl.load(X + signal * L + f * hop + w, mask=ok)
        tl.store(Y + (signal * frames + f) * width + w, x, mask=ok)


def forward(x, width, hop):
    """x (B, L), L at least `width`; the result is (B, frames, width) with the frames that fit."""
    x = x.contiguous()
    B, L = x.shape
    frames = (L - width) // hop + 1
    y = torch.empty(B, frames, width, device=x.device, dtype=x.dtype)
    BLOCK_W = min(512, triton.next_power_of_2(width))
    BLOCK_F = 2048 // BLOCK_W
    _frame_fwd[(triton.cdiv(frames, BLOCK_F), B)](
        x, y, L, frames, width, hop, BLOCK_F=BLOCK_F, BLOCK_W=BLOCK_W, num_warps=4
    )
    return y, (L, width, hop)


# --- backward ---
@triton.jit
def _overlap_add(DY, DX, L, frames, width, hop, dy_b, dy_f, dy_w, COVER: tl.constexpr, BLOCK: tl.constexpr):
    signal = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    newest = sample // hop
    total = tl.zeros((BLOCK,), tl.float32)
    # From the newest frame that has begun back to the oldest that can still reach here.
    for age in tl.static_range(COVER):
        f = newest - age
        place = sample - f * hop
        covers = (sample < L) & (f >= 0) & (f < frames) & (place < width)
        total += tl.load(DY + signal * dy_b + f * dy_f + place * dy_w, mask=covers, other=0.0).to(tl.float32)
    # Samples behind the last whole frame are covered by none and get zero.
    tl.store(DX + signal * L + sample, total, mask=sample < L)


def backward(saved, grad_y, needs=None):
    L, width, hop = saved
    B, frames, _ = grad_y.shape
    dx = torch.empty(B, L, device=grad_y.device, dtype=grad_y.dtype)
    _overlap_add[(triton.cdiv(L, 1024), B)](
        grad_y, dx, L, frames, width, hop, *grad_y.stride(), COVER=triton.cdiv(width, hop), BLOCK=1024, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "L": 256, "width": 32, "hop": 16},
    {"B": 3, "L": 403, "width": 50, "hop": 13},
    {"B": 1, "L": 90, "width": 16, "hop": 20, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "L": 480000, "width": 400, "hop": 160, "dtype": "float32"},)


def make_args(B, L, width, hop, dtype="float32", device="cpu", seed=0):
    if width > L:
        raise ValueError("a frame fits into the signal")
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, L, generator=g).to(device=device, dtype=getattr(torch, dtype)), width, hop


def reference(x, width, hop):
    return x.unfold(1, width, hop).contiguous()
