"""Haar wavelet transform of images over several levels: orthonormal, so its adjoint runs from coarse to fine."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "haar_wavelet_2d",
    "family": "mixing_misc",
    "op": "haar_transform",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _haar_level(X, Low, Y, H2, W2, x_plane, x_row, y_plane, y_row, low_plane, low_row, BLOCK: tl.constexpr):
    # A 2 x 2 block becomes one mean and three details; means go to Low, details to the other quadrants of Y.
    plane = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r, c = i // W2, i % W2
    live = i < H2 * W2
    at = X + plane * x_plane + 2 * r * x_row + 2 * c
    p = tl.load(at, mask=live, other=0.0).to(tl.float32)
    q = tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
    s = tl.load(at + x_row, mask=live, other=0.0).to(tl.float32)
    t = tl.load(at + x_row + 1, mask=live, other=0.0).to(tl.float32)
    tl.store(Low + plane * low_plane + r * low_row + c, 0.5 * (p + q + s + t), mask=live)
    out = Y + plane * y_plane + r * y_row + c
    tl.store(out + W2, 0.5 * (p - q + s - t), mask=live)
    tl.store(out + H2 * y_row, 0.5 * (p + q - s - t), mask=live)
    tl.store(out + H2 * y_row + W2, 0.5 * (p - q - s + t), mask=live)


def forward(x, levels):
    x = x.contiguous()
    planes, H, W = x.shape
    y = torch.empty_like(x)
    source = x
    for level in range(levels):
        H2, W2 = H >> (level + 1), W >> (level + 1)
        # The last means belong into y; earlier ones only feed the next level and stay in fp32.
        low = y if level == levels - 1 else torch.empty(planes, H2, W2, device=x.device, dtype=torch.float32)
        _haar_level[(planes, triton.cdiv(H2 * W2, 256))](
            source, low, y, H2, W2,
            source.stride(0), source.stride(1), y.stride(0), y.stride(1), low.stride(0), low.stride(1), BLOCK=256,
        )  # fmt: skip
        source = low
    return y, (levels,)


# --- backward ---
@triton.jit
def _haar_level_adjoint(
    Low, G, DX, H2, W2, low_plane, low_row, low_col, g_plane, g_row, g_col, dx_plane, dx_row, BLOCK: tl.constexpr
):
    plane = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r, c = i // W2, i % W2
    live = i < H2 * W2
    mean = tl.load(Low + plane * low_plane + r * low_row + c * low_col, mask=live, other=0.0).to(tl.float32)
    quadrant = G + plane * g_plane + r * g_row + c * g_col
    across = tl.load(quadrant + W2 * g_col, mask=live, other=0.0).to(tl.float32)
    down = tl.load(quadrant + H2 * g_row, mask=live, other=0.0).to(tl.float32)
    both = tl.load(quadrant + H2 * g_row + W2 * g_col, mask=live, other=0.0).to(tl.float32)
    # The 4 x 4 matrix of the block is symmetric and orthogonal: the same signs lead back.
    out = DX + plane * dx_plane + 2 * r * dx_row + 2 * c
    tl.store(out, 0.5 * (mean + across + down + both), mask=live)
    tl.store(out + 1, 0.5 * (mean - across + down - both), mask=live)
    tl.store(out + dx_row, 0.5 * (mean + across - down - both), mask=live)
    tl.store(out + dx_row + 1, 0.5 * (mean - across - down + both), mask=live)


def backward(saved, grad_y, needs=None):
    (levels,) = saved
    planes, H, W = grad_y.shape
    low = grad_y
    for level in reversed(range(levels)):
        H2, W2 = H >> (level + 1), W >> (level + 1)
        dtype = grad_y.dtype if level == 0 else torch.float32
        dx = torch.empty(planes, 2 * H2, 2 * W2, device=grad_y.device, dtype=dtype)
        _haar_level_adjoint[(planes, triton.cdiv(H2 * W2, 128))](
            low, grad_y, dx, H2, W2, *low.stride(), *grad_y.stride(), dx.stride(0), dx.stride(1), BLOCK=128
        )
        low = dx
    return low


# --- check ---
SWEEP = (
    {"planes": 2, "rows": 4, "cols": 4, "levels": 2},
    {"planes": 3, "rows": 11, "cols": 17, "levels": 1, "dtype": "float16"},
    {"planes": 1, "rows": 1, "cols": 3, "levels": 3, "dtype": "bfloat16"},
)
BENCH = ({"planes": 64, "rows": 64, "cols": 64, "levels": 3, "dtype": "float32"},)


def make_args(planes, rows, cols, levels, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(planes, rows << levels, cols << levels, generator=g)
    return x.to(device=device, dtype=getattr(torch, dtype)), levels


def reference(x, levels):
    low, y = x.float(), x.float()
    for _ in range(levels):
        p, q, s, t = low[:, ::2, ::2], low[:, ::2, 1::2], low[:, 1::2, ::2], low[:, 1::2, 1::2]
        top = torch.cat((p + q + s + t, p - q + s - t), -1)
        block = torch.cat((top, torch.cat((p + q - s - t, p - q - s + t), -1)), -2) / 2
        H, W = block.shape[1:]
        y = torch.cat((torch.cat((block, y[:, :H, W:]), -1), y[:, H:]), 1)
        low = block[:, : H // 2, : W // 2]
    return y.to(x.dtype)
