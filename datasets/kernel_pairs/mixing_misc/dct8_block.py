"""Cosine transform of 8 x 8 blocks with learned quantisation weights: the way back is the transposed transform.

    y = w * (C x C^T) for every block,    dx = C^T (w * dy) C,    dw = sum over blocks of dy * (C x C^T)

C is orthonormal and built in registers. A persistent grid walks the blocks: the coefficients are computed again for
dw, which stays in registers and costs one partial 8 x 8 table per program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dct8_block",
    "family": "mixing_misc",
    "op": "block_dct",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "persistent-grid", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cosines():
    """The orthonormal DCT matrix (frequency, sample)."""
    u = tl.arange(0, 8)[:, None]
    i = tl.arange(0, 8)[None, :]
    wave = tl.cos((2 * i + 1) * u * 0.19634954084936207)
    return tl.where(u == 0, 0.3535533905932738, 0.5 * wave)


@triton.jit
def _both_sides(c, x):
    """c x c^T for a tile of blocks (block, row, column)."""
    half = tl.sum(c[None, :, :, None] * x[:, None, :, :], 2)
    return tl.sum(half[:, :, None, :] * c[None, None, :, :], 3)


@triton.jit
def _block_place(block, high, wide):
    """Plane, first row and first column of blocks counted along the width, then the height, then the planes."""
    plane = block // (high * wide)
    return plane, block // wide % high * 8, block % wide * 8


@triton.jit
def _dct_fwd(X, W, Y, blocks, high, wide, BLOCK: tl.constexpr):
    # Neighbouring blocks of a row of blocks form the tile: their rows of eight lie side by side.
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane, top, left = _block_place(block, high, wide)
    i = tl.arange(0, 8)
    row = (plane * high * 8 + top)[:, None, None] + i[None, :, None]
    at = row * wide * 8 + left[:, None, None] + i[None, None, :]
    ok = (block < blocks)[:, None, None]
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + i[:, None] * 8 + i[None, :]).to(tl.float32)
    tl.store(Y + at, w[None, :, :] * _both_sides(_cosines(), x), mask=ok)


def forward(x, weight):
    """x (planes, height, width) with sides that are multiples of 8, weight (8, 8)."""
    x, weight = x.contiguous(), weight.contiguous()
    planes, height, width = x.shape
    y = torch.empty_like(x)
    blocks = planes * (height // 8) * (width // 8)
    _dct_fwd[(triton.cdiv(blocks, 8),)](x, weight, y, blocks, height // 8, width // 8, BLOCK=8, num_warps=4)
    return y, (x, weight)


# --- backward ---
@triton.jit
def _dct_bwd(DY, X, W, DX, Parts, blocks, high, wide, dy_p, dy_h, dy_w, BLOCK: tl.constexpr):
    i = tl.arange(0, 8)
    square = i[:, None] * 8 + i[None, :]
    c = _cosines()
    w = tl.load(W + square).to(tl.float32)
    dw = tl.zeros((BLOCK, 8, 8), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, blocks, tl.num_programs(0) * BLOCK):
        block = start + tl.arange(0, BLOCK)
        plane, top, left = _block_place(block, high, wide)
        row = top[:, None, None] + i[None, :, None]
        column = left[:, None, None] + i[None, None, :]
        ok = (block < blocks)[:, None, None]
        at = (plane[:, None, None] * high * 8 + row) * wide * 8 + column
        dy_at = plane[:, None, None] * dy_p + row * dy_h + column * dy_w
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + at, _both_sides(tl.trans(c), w[None, :, :] * dy), mask=ok)
        dw += dy * _both_sides(c, x)
    tl.store(Parts + tl.program_id(0) * 64 + square, tl.sum(dw, 0))


def backward(saved, grad_y, needs=None):
    x, weight = saved
    planes, height, width = x.shape
    dx = torch.empty_like(x)
    blocks = planes * (height // 8) * (width // 8)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    # One wave: registers take four programs on a processor.
    programs = min(triton.cdiv(blocks, 8), 4 * processors)
    parts = torch.empty(programs, 8, 8, device=x.device, dtype=torch.float32)
    _dct_bwd[(programs,)](
        grad_y, x, weight, dx, parts, blocks, height // 8, width // 8, *grad_y.stride(), BLOCK=8, num_warps=4
    )
    return dx, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"planes": 2, "high": 2, "wide": 2},
    {"planes": 1, "high": 3, "wide": 17},
    {"planes": 3, "high": 1, "wide": 5, "dtype": "bfloat16"},
)
BENCH = ({"planes": 192, "high": 32, "wide": 64, "dtype": "float32"},)


def make_args(planes, high, wide, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(planes, 8 * high, 8 * wide, generator=g)
    weight = 0.2 + torch.rand(8, 8, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    planes, height, width = x.shape
    u = torch.arange(8, device=x.device)
    c = 0.5 * torch.cos((2 * u + 1) * u[:, None] * (torch.pi / 16))
    c = torch.where(u[:, None] == 0, 8**-0.5, c)
    blocks = x.float().view(planes, height // 8, 8, width // 8, 8).transpose(2, 3)
    y = weight.float() * (c @ blocks @ c.t())
    return y.transpose(2, 3).reshape(x.shape).to(x.dtype)
