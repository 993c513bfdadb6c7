"""Query, key and value projections of one input: three products in a launch, and one accumulator for their common dx.

q = x Wq,  k = x Wk,  v = x Wv:    dx = dq Wq^T + dk Wk^T + dv Wv^T,    dWi = x^T di.
The widths differ, as with grouped heads. Column tiles of the three outputs are numbered one after another, and a
program finds its weight by its number, so that the narrow outputs do not need launches that cannot fill the device. dx
never exists in three parts. An output without a cotangent drops out of dx's loops at compile time; its dW is zeros.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "linear_multi_head_out",
    "family": "matmul",
    "op": "qkv_linear",
    "schema": 1,
    "techniques": ("head-reduction", "one-launch", "owner-grid", "optional-cotangent"),
    "saves": (),
    "grads": ("x", "wq", "wk", "wv"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _one_output(X, W, Y, m, column, M, D, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(X + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0)
        w = tl.load(W + d[:, None] * N + n[None, :], mask=(d[:, None] < D) & (n[None, :] < N), other=0.0)
        y = tl.dot(x, w, y)
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _qkv_fwd(
    X, WQ, WK, WV, Q, K, V, M, D, NQ, NK, NV, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0)
    to_k = tl.cdiv(NQ, BLOCK_N)
    to_v = to_k + tl.cdiv(NK, BLOCK_N)
    if column < to_k:
        _one_output(X, WQ, Q, m, column, M, D, NQ, BLOCK_M, BLOCK_N, BLOCK_D)
    elif column < to_v:
        _one_output(X, WK, K, m, column - to_k, M, D, NK, BLOCK_M, BLOCK_N, BLOCK_D)
    else:
        _one_output(X, WV, V, m, column - to_v, M, D, NV, BLOCK_M, BLOCK_N, BLOCK_D)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, wq, wk, wv):
    x, wq, wk, wv = x.contiguous(), wq.contiguous(), wk.contiguous(), wv.contiguous()
    M, D = x.shape
    widths = [w.shape[1] for w in (wq, wk, wv)]
    q, k, v = (torch.empty(M, n, device=x.device, dtype=x.dtype) for n in widths)
    BM, BN = _side(M), _side(min(widths))
    _qkv_fwd[(sum(triton.cdiv(n, BN) for n in widths), triton.cdiv(M, BM))](
        x, wq, wk, wv, q, k, v, M, D, *widths,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=_side(D, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return (q, k, v), (x, wq, wk, wv)


# --- backward ---
@triton.jit
def _add_output(dx, DY, W, m, d, N, BLOCK_N: tl.constexpr):
    """dx + dy W^T for the rows from m and the features from d."""
    for n in range(0, N, BLOCK_N):
        dx = tl.dot(DY.load([m, n]), W.load([d, n]).T, dx)
    return dx


@triton.jit
def _qkv_dx(
    DQ, DK, DV, WQ, WK, WV, DX, M, D, NQ, NK, NV,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # GROUP row tiles before the next column tile: programs in flight share rows of the cotangents and of the weights.
    tiles_d = tl.cdiv(D, BLOCK_D)
    band = tl.program_id(0) // (GROUP * tiles_d)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_d)
    m, d = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_D
    dx = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if HAS_Q:
        dx = _add_output(dx, DQ, WQ, m, d, NQ, BLOCK_N)
    if HAS_K:
        dx = _add_output(dx, DK, WK, m, d, NK, BLOCK_N)
    if HAS_V:
        dx = _add_output(dx, DV, WV, m, d, NV, BLOCK_N)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), d + tl.arange(0, BLOCK_D)
    tl.store(DX + rows[:, None] * D + cols[None, :], dx, mask=(rows[:, None] < M) & (cols[None, :] < D))


@triton.jit
def _one_dw(X, DY, DW, d, column, M, D, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = column * BLOCK_N
    dw = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        dw = tl.dot(X.load([m, d]).T, DY.load([m, n]), dw)
    rows, cols = d.to(tl.int64) + tl.arange(0, BLOCK_D), n + tl.arange(0, BLOCK_N)
    tl.store(DW + rows[:, None] * N + cols[None, :], dw, mask=(rows[:, None] < D) & (cols[None, :] < N))


@triton.jit
def _qkv_dw(
    DQ, DK, DV, X, DWQ, DWK, DWV, M, D, NQ, NK, NV,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Row tiles are the fast axis, so that programs in flight share a column tile of the cotangents.
    d = tl.program_id(0) * BLOCK_D
    column = tl.program_id(1)
    to_k = tl.cdiv(NQ, BLOCK_N)
    to_v = to_k + tl.cdiv(NK, BLOCK_N)
    # Branches side by side, not nested, share their shared memory.
    if HAS_Q:
        mine = column < to_k
        if mine:
            _one_dw(X, DQ, DWQ, d, column, M, D, NQ, BLOCK_M, BLOCK_N, BLOCK_D)
    if HAS_K:
        mine = (column >= to_k) & (column < to_v)
        if mine:
            _one_dw(X, DK, DWK, d, column - to_k, M, D, NK, BLOCK_M, BLOCK_N, BLOCK_D)
    if HAS_V:
        mine = column >= to_v
        if mine:
            _one_dw(X, DV, DWV, d, column - to_v, M, D, NV, BLOCK_M, BLOCK_N, BLOCK_D)


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) != 1 or matrix.stride(0) % step or matrix.stride(0) < width or matrix.storage_offset() % step:
        dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_q, grad_k, grad_v, needs=(True,) * 4):
    x, *weights = saved
    M, D = x.shape
    widths = [w.shape[1] for w in weights]
    grads = (grad_q, grad_k, grad_v)
    flags = {f"HAS_{name}": g is not None for name, g in zip("QKV", grads, strict=True)}
    step = 128 // x.element_size()
    dx, dws = None, (None, None, None)
    if needs[0]:
        dx = torch.empty_like(x)
        BM, BD, BN = min(256, _up(M)), min(128, _up(D)), min(step, _up(min(widths)))
        tiles = (*(g if g is None else _tiles(g, BM, BN) for g in grads), *(_tiles(w, BD, BN) for w in weights))
        _qkv_dx[(triton.cdiv(M, BM) * triton.cdiv(D, BD),)](
            *tiles, dx, M, D, *widths, **flags,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=BD, num_warps=8, num_stages=4,
        )  # fmt: skip
    if any(needs[1:]):
        dws = [torch.zeros_like(w) if g is None else torch.empty_like(w) for w, g in zip(weights, grads, strict=True)]
        BD, BN, BM = min(128, _up(D)), min(256, _up(min(widths))), min(step, _up(M))
        _qkv_dw[(triton.cdiv(D, BD), sum(triton.cdiv(n, BN) for n in widths))](
            *(g if g is None else _tiles(g, BM, BN) for g in grads), _tiles(x, BM, BD), *dws, M, D, *widths, **flags,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=BD, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, *dws


# --- check ---
SWEEP = (
    {"M": 64, "D": 48, "NQ": 64, "NKV": 16},
    {"M": 75, "D": 41, "NQ": 70, "NKV": 29},
    {"M": 40, "D": 136, "NQ": 40, "NKV": 20, "dtype": "bfloat16"},
    {"M": 33, "D": 20, "NQ": 36, "NKV": 18, "dtype": "float16"},
)
BENCH = ({"M": 8192, "D": 4096, "NQ": 4096, "NKV": 1024, "dtype": "bfloat16"},)


def make_args(M, D, NQ, NKV, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(M, D, generator=g)]
    tensors += [torch.randn(D, n, generator=g) * D**-0.5 for n in (NQ, NKV, NKV)]
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, wq, wk, wv):
    return x @ wq, x @ wk, x @ wv
