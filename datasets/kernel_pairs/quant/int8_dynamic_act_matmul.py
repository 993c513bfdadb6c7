"""Product of activations quantised per token and frozen int8 weights: int8 forward, 16-bit backward straight through.

The forward rounds every row of x to int8 by its own maximum, multiplies in integers, and scales the accumulator by row
and column. Gradients pass the rounding unchanged and skip the row scale: dx = (dy * s_col) W. A pass over
the weights widens them to 16 bits with their column scales, dx is a plain product with that, and neither x nor its int8
image is kept.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "int8_dynamic_act_matmul",
    "family": "quant",
    "op": "quantized_matmul",
    "schema": 1,
    "techniques": ("straight-through", "partial-gradient", "loop-swap"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float16", "bfloat16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _quantise_rows(X, XQ, RowScale, K, x_m, x_k, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + lane
        x = tl.load(X + m * x_m + k * x_k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(x))
    peak = tl.max(top, 0)
    # A row of zeros has no scale of its own; any other than zero keeps it zero.
    scale = tl.where(peak > 0, peak, 127.0) / 127.0
    tl.store(RowScale + m, scale)
    for start in range(0, K, BLOCK):
        k = start + lane
        x = tl.load(X + m * x_m + k * x_k, mask=k < K, other=0.0).to(tl.float32)
        level = libdevice.rint(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
        tl.store(XQ + m * K + k, level.to(tl.int8), mask=k < K)


@triton.jit
def _int8_product(
    XQ, W, RowScale, ColScale, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, cols = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        xq = tl.load(XQ + rows * K + k[None, :], mask=(rows < M) & (k[None, :] < K), other=0)
        # Weights lie as (N, K), the order in which integer products want both operands.
        w = tl.load(W + cols * K + k[:, None], mask=(k[:, None] < K) & (cols < N), other=0)
        acc = tl.dot(xq, w, acc, out_dtype=tl.int32)
    row_scale = tl.load(RowScale + m, mask=m < M, other=0.0)[:, None]
    col_scale = tl.load(ColScale + n, mask=n < N, other=0.0)[None, :]
    tl.store(Y + rows * N + cols, acc.to(tl.float32) * row_scale * col_scale, mask=(rows < M) & (cols < N))


def _side(size):
    return max(32, min(128, triton.next_power_of_2(size)))


def forward(x, weight, col_scale):
    weight, col_scale = weight.contiguous(), col_scale.contiguous()
    M, (N, K) = x.shape[0], weight.shape
    x_int = torch.empty(M, K, device=x.device, dtype=torch.int8)
    row_scale = torch.empty(M, device=x.device, dtype=torch.float32)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _quantise_rows[(M,)](x, x_int, row_scale, K, *x.stride(), BLOCK=max(32, min(4096, triton.next_power_of_2(K) // 2)))
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _int8_product[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x_int, weight, row_scale, col_scale, y, M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=128, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (weight, col_scale)


# --- backward ---
@triton.jit
def _widened_rows(W, ColScale, Out, K, out_n, BLOCK: tl.constexpr):
    # Frozen weights times their scales in 16 bits, once: the product then reads them straight into shared memory.
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + n * K + k, mask=k < K, other=0)
    tl.store(Out + n * out_n + k, w.to(tl.float32) * tl.load(ColScale + n), mask=k < K)


@triton.jit
def _int8_weight_dx(
    DY, W, DX, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([m, n]), W.load([n, k]), acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < K))


def _room(rows, cols, like):
    """A matrix whose rows start on sixteen bytes, as descriptors need them."""
    step = 16 // like.element_size()
    return like.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    starts = (matrix.stride(0) | matrix.storage_offset()) * matrix.element_size()
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1] or starts % 16:
        dense = _room(*matrix.shape, matrix)
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    weight, col_scale = saved
    M, (N, K) = grad_y.shape[0], weight.shape
    dx = torch.empty(M, K, device=grad_y.device, dtype=grad_y.dtype)
    wide = _room(N, K, grad_y)
    _widened_rows[(N, triton.cdiv(K, 2048))](weight, col_scale, wide, K, wide.stride(0), BLOCK=2048, num_warps=4)
    BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(64, _up(N))
    _int8_weight_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
        _tiles(grad_y, BM, BN), _tiles(wide, BN, BK), dx, M, N, K,
        GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"M": 32, "N": 48, "K": 128, "dtype": "float16"},
    {"M": 37, "N": 51, "K": 91, "dtype": "float16"},
    {"M": 16, "N": 64, "K": 96, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=g).to(device=device, dtype=getattr(torch, dtype))
    weight = torch.randint(-127, 128, (N, K), generator=g, dtype=torch.int8)
    return x, weight.to(device), ((0.5 + torch.rand(N, generator=g)) / 127).to(device)


def reference(x, weight, col_scale):
    peak = x.float().abs().amax(1, keepdim=True)
    scale = torch.where(peak > 0, peak, 127.0) / 127.0
    return ((x.float() / scale).round() @ weight.float().t() * scale * col_scale).to(x.dtype)


def surrogate(x, weight, col_scale):
    return (x @ (weight.to(x.dtype) * col_scale[:, None].to(x.dtype)).t()).to(x.dtype)
