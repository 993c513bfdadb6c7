"""Both gradients of x W in one grid: the first programs own tiles of dW, the rest tiles of dX, and none waits.

Two launches drain the device twice: when the last tiles of dX run, processors idle until dW may begin. In one grid the
tiles of dW, which sum over all rows and take longest, start first, and the short tiles of dX fill the gaps at the end.
Each program is of one kind throughout, so the branch on the program's number costs nothing inside the loops.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_dx_dw_one_launch",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("one-launch", "row-local", "column-owner", "strided-cotangent"),
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
def _dx_dw(
    DY, X, W, DX, DW, M, N, K, dy_m, dy_n,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_dw = 0
    if NEED_W:
        tiles_dw = tl.cdiv(K, BLOCK) * tl.cdiv(N, BLOCK)
        if tile < tiles_dw:
            _tile_product(X, DY, DW, tile, K, N, M, 1, K, dy_m, dy_n, BLOCK, BLOCK, BLOCK_S)
    if NEED_X:
        rest = tile - tiles_dw
        if rest >= 0:
            _tile_product(DY, W, DX, rest, M, K, N, dy_m, dy_n, 1, N, BLOCK, BLOCK, BLOCK_S)


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (M, K), N = x.shape, weight.shape[1]
    need_x, need_w = needs
    dx = torch.empty_like(x) if need_x else None
    dw = torch.empty_like(weight) if need_w else None
    side, step = _blocks(x, min(M, N, K))
    down = triton.cdiv(K, side)
    tiles = need_w * down * triton.cdiv(N, side) + need_x * down * triton.cdiv(M, side)
    _dx_dw[(tiles,)](
        grad_y, x, weight, dx, dw, M, N, K, grad_y.stride(0), grad_y.stride(1),
        NEED_X=need_x, NEED_W=need_w, BLOCK=side, BLOCK_S=step, num_warps=8 if side == 128 else 4, num_stages=3,
    )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 150, "N": 71, "K": 41},
    {"M": 96, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 40, "N": 90, "K": 64, "dtype": "float16"},
)
BENCH = ({"M": 4096, "N": 2048, "K": 1408, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    return x @ weight
