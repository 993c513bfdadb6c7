"""Both gradients of x W in one grid: the first programs own tiles of dW, the rest tiles of dX, and none waits.

Two launches drain the device twice: when the last tiles of dX run, processors idle until dW may begin. In one grid the
tiles of dW, which sum over all rows and take longest, start first, and the short tiles of dX fill the gaps at the end.
Each program is of one kind throughout, so the branch on the program's number costs nothing inside the loops.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_dx_dw_one_launch",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("one-launch", "row-local", "column-owner"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile_product(
    L, R, OUT, tile, P, Q, S, l_p, l_s, r_s, r_q,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One tile of OUT (P, Q) = sum over s of L (P, S) R (S, Q), tiles counted row by row."""
    across = tl.cdiv(Q, BLOCK_Q)
    p = (tile // across).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = (tile % across).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    s = tl.arange(0, BLOCK_S).to(tl.int64)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for done in range(0, S, BLOCK_S):
        at = done + s
        left = tl.load(L + p[:, None] * l_p + at[None, :] * l_s, mask=(p[:, None] < P) & (at[None, :] < S), other=0.0)
        right = tl.load(R + at[:, None] * r_s + q[None, :] * r_q, mask=(at[:, None] < S) & (q[None, :] < Q), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(OUT + p[:, None] * Q + q[None, :], acc, mask=(p[:, None] < P) & (q[None, :] < Q))


@triton.jit
def _product_fwd(X, W, Y, M, N, K, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    _tile_product(X, W, Y, tl.program_id(0), M, N, K, K, 1, N, 1, BLOCK, BLOCK, BLOCK_S)


def _blocks(x, least):
    # The side of an output tile and the depth of one step of the sum.
    side = max(16, min(128, triton.next_power_of_2(least)))
    return side, min(side, 128 // x.element_size())


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    side, step = _blocks(x, min(M, N))
    _product_fwd[(triton.cdiv(M, side) * triton.cdiv(N, side),)](
        x, weight, y, M, N, K, BLOCK=side, BLOCK_S=step, num_warps=8 if side == 128 else 4, num_stages=3
    )
    return y, (x, weight)


# --- backward ---
@triton.jit
def _own_tile(
    L, R, OUT, tile, P, Q, S, TURN_L: tl.constexpr, TURN_R: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One tile of OUT (P, Q), the sum over s of L R. Operands that lie the other way round are turned tile by tile."""
    down, across = tl.cdiv(P, BLOCK_P), tl.cdiv(Q, BLOCK_Q)
    band = tile // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    inside = tile - band * GROUP * across
    p, q = (band * GROUP + inside % height) * BLOCK_P, inside // height * BLOCK_Q
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for s in range(0, S, BLOCK_S):
        left = L.load([s, p]).T if TURN_L else L.load([p, s])
        right = R.load([q, s]).T if TURN_R else R.load([s, q])
        acc = tl.dot(left, right, acc)
    row, col = p.to(tl.int64) + tl.arange(0, BLOCK_P), q + tl.arange(0, BLOCK_Q)
    tl.store(OUT + row[:, None] * Q + col[None, :], acc, mask=(row[:, None] < P) & (col[None, :] < Q))


@triton.jit
def _dx_dw(
    XT, DYR, DYL, W, DX, DW, M, N, K, NEED_X: tl.constexpr, NEED_W: tl.constexpr,
    GROUP: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_dw = 0
    if NEED_W:
        tiles_dw = tl.cdiv(K, HIGH) * tl.cdiv(N, WIDE)
        if tile < tiles_dw:
            _own_tile(XT, DYR, DW, tile, K, N, M, True, False, GROUP, HIGH, WIDE, STEP)
    if NEED_X:
        rest = tile - tiles_dw
        if rest >= 0:
            _own_tile(DYL, W, DX, rest, M, K, N, False, True, GROUP, HIGH, WIDE, STEP)


def _aligned(matrix):
    """The matrix, or a copy of it, with dense rows that start on sixteen bytes, as descriptors need them."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) == 1 and matrix.stride(0) >= width and not (matrix.stride(0) | matrix.storage_offset()) % step:
        return matrix
    dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
    dense.copy_(matrix)
    return dense


def _tiles(matrix, rows, cols):
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (M, K), N = x.shape, weight.shape[1]
    need_x, need_w = needs
    dx = torch.empty_like(x) if need_x else None
    dw = torch.empty_like(weight) if need_w else None
    # Both products share one tile: dX (M, K) sums over N, dW (K, N) over M.
    least = max(16, triton.next_power_of_2(min(M, N, K)))
    HIGH, WIDE, STEP = min(128, least), min(128, least), min(128 // x.element_size(), least)
    tiles = need_w * triton.cdiv(K, HIGH) * triton.cdiv(N, WIDE) + need_x * triton.cdiv(M, HIGH) * triton.cdiv(K, WIDE)
    x, weight, grad_y = _aligned(x), _aligned(weight), _aligned(grad_y)
    _dx_dw[(tiles,)](
        _tiles(x, STEP, HIGH), _tiles(grad_y, STEP, WIDE), _tiles(grad_y, HIGH, STEP), _tiles(weight, WIDE, STEP),
        dx, dw, M, N, K, NEED_X=need_x, NEED_W=need_w,
        GROUP=16, HIGH=HIGH, WIDE=WIDE, STEP=STEP, num_warps=8, num_stages=4,
    )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 150, "N": 71, "K": 41},
    {"M": 96, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 40, "N": 90, "K": 64, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 5632, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    return x @ weight
