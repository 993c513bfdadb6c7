"""Gram matrix X X^T: half of it is multiplied, and the cotangent is symmetrised tile by tile as the product loads it.

C = X X^T,    dX = (G + G^T) X.
Forward: programs are numbered along the lower triangle of tiles, and each stores its tile and the transpose of it.
Backward: G need not be symmetric, so a step loads the tile (i, j) and the tile (j, i), adds them in registers and
multiplies once. G + G^T is never written, and the product is one instead of two.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gram_symmetric",
    "family": "matmul",
    "op": "gram",
    "schema": 1,
    "techniques": ("prologue-fusion", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gram_fwd(X, C, N, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    # Tile number r (r + 1) / 2 + c stands for row r and column c <= r; the root may be off by one in fp32.
    number = tl.program_id(0)
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    column = number - row * (row + 1) // 2
    i = row.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = column.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        left = tl.load(X + i[:, None] * D + d[None, :], mask=(i[:, None] < N) & (d[None, :] < D), other=0.0)
        right = tl.load(X + j[None, :] * D + d[:, None], mask=(j[None, :] < N) & (d[:, None] < D), other=0.0)
        c = tl.dot(left, right, c)
    tl.store(C + i[:, None] * N + j[None, :], c, mask=(i[:, None] < N) & (j[None, :] < N))
    if row != column:
        tl.store(C + j[:, None] * N + i[None, :], tl.trans(c), mask=(j[:, None] < N) & (i[None, :] < N))


def _side(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x):
    x = x.contiguous()
    N, D = x.shape
    c = torch.empty(N, N, device=x.device, dtype=x.dtype)
    BLOCK = _side(N, 128)
    tiles = triton.cdiv(N, BLOCK)
    _gram_fwd[(tiles * (tiles + 1) // 2,)](
        x, c, N, D, BLOCK=BLOCK, BLOCK_D=_side(D, 128 // x.element_size()), num_warps=8, num_stages=3
    )
    return c, (x,)


# --- backward ---
@triton.jit
def _gram_bwd(G, X, DX, N, D, g_i, g_j, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(1).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dx = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        pair = (i[:, None] < N) & (j[None, :] < N)
        here = tl.load(G + i[:, None] * g_i + j[None, :] * g_j, mask=pair, other=0.0)
        # The mirrored tile is loaded the way memory runs and turned on chip.
        mirror = tl.load(G + j[:, None] * g_i + i[None, :] * g_j, mask=(j[:, None] < N) & (i[None, :] < N), other=0.0)
        both = here.to(tl.float32) + tl.trans(mirror).to(tl.float32)
        x = tl.load(X + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        dx = tl.dot(both.to(x.dtype), x, dx)
    tl.store(DX + i[:, None] * D + d[None, :], dx, mask=(i[:, None] < N) & (d[None, :] < D))


def backward(saved, grad_c, needs=None):
    (x,) = saved
    N, D = x.shape
    dx = torch.empty_like(x)
    # A wide tile of D, since every column tile reads all of G twice.
    BLOCK_I, BLOCK_D = _side(N, 64), _side(D, 256 if x.element_size() == 2 else 128)
    _gram_bwd[(triton.cdiv(D, BLOCK_D), triton.cdiv(N, BLOCK_I))](
        grad_c, x, dx, N, D, grad_c.stride(0), grad_c.stride(1),
        BLOCK_I=BLOCK_I, BLOCK_J=_side(N, 128 // x.element_size()), BLOCK_D=BLOCK_D, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"N": 64, "D": 32},
    {"N": 201, "D": 41},
    {"N": 75, "D": 300, "dtype": "bfloat16"},
    {"N": 40, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 8192, "D": 1024, "dtype": "bfloat16"},)


def make_args(N, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(N, D, generator=g) * D**-0.25).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x @ x.T
