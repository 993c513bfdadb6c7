"""Attention along one axis of an image: the axis is a pair of strides, and a whole line is one tile.

Lines of up to 128 pixels fit a program, so that nothing is saved but the inputs: the backward computes the softmax of
the line again, its delta is a row sum of p dp in the tile, and all three gradients leave one launch. Rows and columns
take the same kernel; the cotangent comes with strides of its own.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "axial_attention_2d",
    "family": "attention",
    "op": "axial_attention",
    "schema": 1,
    "techniques": ("row-local", "one-launch", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _line(X, s_pixel, s_d, L, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_L, BLOCK_D): the pixels of one line and head."""
    i = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    at = i[:, None].to(tl.int64) * s_pixel + d[None, :] * s_d
    return tl.load(X + at, mask=(i[:, None] < L) & (d[None, :] < D), other=0.0)


@triton.jit
def _line_softmax(q, k, L, scale_log2, BLOCK_L: tl.constexpr):
    s = tl.dot(q, tl.trans(k)) * scale_log2
    s = tl.where(tl.arange(0, BLOCK_L)[None, :] < L, s, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _axial_fwd(
    Q, K, V, Out, lines, heads, s_b, s_line, s_pixel, L, scale_log2, D: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    line = tl.program_id(0) // heads
    base = (line // lines).to(tl.int64) * s_b + (line % lines).to(tl.int64) * s_line + head * D
    q = _line(Q + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    k = _line(K + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    v = _line(V + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    o = tl.dot(_line_softmax(q, k, L, scale_log2, BLOCK_L).to(v.dtype), v)
    i = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    at = base + i[:, None].to(tl.int64) * s_pixel + d[None, :]
    tl.store(Out + at, o, mask=(i[:, None] < L) & (d[None, :] < D))


def _geometry(x, axis):
    """(number of lines of an image, its strides s_b, s_line, s_pixel, pixels of a line)."""
    other = 3 - axis
    return x.shape[other], x.stride(0), x.stride(other), x.stride(axis), x.shape[axis]


def _tiles(q, axis):
    block = max(16, triton.next_power_of_2(q.shape[axis]))
    return {
        "D": q.shape[4], "BLOCK_L": block, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[4])),
        "num_warps": 8 if block > 64 else 4,
    }  # fmt: skip


def forward(q, k, v, axis):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, _, _, H, D = q.shape
    if axis not in (1, 2) or q.shape[axis] > 128:
        raise ValueError(f"axis {axis} of {tuple(q.shape)}: it must be 1 or 2, with at most 128 pixels")
    lines, s_b, s_line, s_pixel, L = _geometry(q, axis)
    o = torch.empty_like(q)
    _axial_fwd[(B * lines * H,)](
        q, k, v, o, lines, H, s_b, s_line, s_pixel, L, D**-0.5 * 1.4426950408889634, **_tiles(q, axis)
    )
    return o, (q, k, v, axis)


# --- backward ---
@triton.jit
def _axial_bwd(
    Q, K, V, DO, DQ, DK, DV, lines, heads, s_b, s_line, s_pixel, do_b, do_line, do_pixel, do_h, do_d, L,
    scale, scale_log2, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    line = tl.program_id(0) // heads
    batch = (line // lines).to(tl.int64)
    line = (line % lines).to(tl.int64)
    base = batch * s_b + line * s_line + head * D
    q = _line(Q + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    k = _line(K + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    v = _line(V + base, s_pixel, 1, L, D, BLOCK_L, BLOCK_D)
    do = _line(DO + batch * do_b + line * do_line + head * do_h, do_pixel, do_d, L, D, BLOCK_L, BLOCK_D)
    i = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    at = base + i[:, None].to(tl.int64) * s_pixel + d[None, :]
    inside = (i[:, None] < L) & (d[None, :] < D)
    # Pixels past L are zero rows of q and do: they leave nothing in dk and dv.
    p = _line_softmax(q, k, L, scale_log2, BLOCK_L)
    tl.store(DV + at, tl.dot(tl.trans(p.to(do.dtype)), do), mask=inside)
    dp = tl.dot(do, tl.trans(v))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
    tl.store(DQ + at, tl.dot(ds, k) * scale, mask=inside)
    tl.store(DK + at, tl.dot(tl.trans(ds), q) * scale, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, axis = saved
    B, _, _, H, D = q.shape
    lines, s_b, s_line, s_pixel, L = _geometry(q, axis)
    _, do_b, do_line, do_pixel, _ = _geometry(grad_o, axis)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _axial_bwd[(B * lines * H,)](
        q, k, v, grad_o, dq, dk, dv, lines, H, s_b, s_line, s_pixel, do_b, do_line, do_pixel, *grad_o.stride()[3:], L,
        D**-0.5, D**-0.5 * 1.4426950408889634, **_tiles(q, axis),
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "Y": 8, "X": 32, "H": 2, "D": 16, "axis": 2},
    {"B": 2, "Y": 29, "X": 5, "H": 1, "D": 20, "axis": 1, "dtype": "float16"},
    {"B": 1, "Y": 4, "X": 75, "H": 2, "D": 16, "axis": 2, "dtype": "bfloat16"},
)
BENCH = (
    {"B": 16, "Y": 64, "X": 64, "H": 8, "D": 64, "axis": 1, "dtype": "bfloat16"},
    {"B": 4, "Y": 128, "X": 128, "H": 8, "D": 32, "axis": 2, "dtype": "bfloat16"},
)


def make_args(B, Y, X, H, D, axis, dtype="float32", device="cpu", seed=0):
    if (Y, X)[axis - 1] > 128:
        raise ValueError("at most 128 pixels along the axis")
    g = torch.Generator().manual_seed(seed)
    return (*(torch.randn(B, Y, X, H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3)), axis)


def reference(q, k, v, axis):
    q, k, v = (x.movedim(axis, 3) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).movedim(3, axis)
