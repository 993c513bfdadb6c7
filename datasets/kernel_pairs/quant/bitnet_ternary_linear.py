"""Linear layer of ternary weights scale * {-1, 0, 1}, scale = mean |W|: straight through, the scale on demand.

Weights are rounded to -1, 0, 1, exact in 16 bits: in the forward as their tiles load, for dX by a pass beforehand. The
scale multiplies accumulators.
With T the ternary weight and G = dY^T X, dX = scale * dY T and dW = G. If the scale is to be differentiated, dW gains
sign(W) / size * sum(G * (T - W / scale)): the product that makes G leaves one number of that sum per tile in its
epilogue, and a second launch adds the term, which needs the whole sum first.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "bitnet_ternary_linear",
    "family": "quant",
    "op": "quantized_linear",
    "schema": 1,
    "techniques": ("straight-through", "epilogue-fusion", "two-stage-partials"),
    "saves": ("abs_sum: fp32 (1,)",),
    "grads": ("x", "weight"),
    "dtypes": ("float16", "bfloat16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _abs_sums(W, Parts, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Parts + tl.program_id(0), tl.sum(tl.abs(w), 0))


@triton.jit
def _ternary(w, scale):
    """-1, 0 or 1, in fp32: w / scale to the nearest level, ties to zero, without the division."""
    w = w.to(tl.float32)
    return tl.where(w > 0.5 * scale, 1.0, tl.where(w < -0.5 * scale, -1.0, 0.0))


@triton.jit
def _ternary_product(
    L, W, AbsSum, OUT, M, N, K, size, l_m, l_k, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = scale * L (M, K) T (K, N): the forward with W transposed, dX with W as it lies.
    scale = tl.maximum(tl.load(AbsSum) / size, 1e-5)
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(L + m * l_m + k[None, :] * l_k, mask=(m < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None] * w_k + n * w_n, mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(left, _ternary(w, scale).to(left.dtype), acc)
    tl.store(OUT + m * N + n, acc * scale, mask=(m < M) & (n < N))


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def _product(left, weight, abs_sum):
    """scale * left @ ternary(weight), weight being (K, N) in any strides."""
    (M, K), N = left.shape, weight.shape[1]
    out = torch.empty(M, N, device=left.device, dtype=left.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _ternary_product[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        left, weight, abs_sum, out, M, N, K, weight.numel(), *left.stride(), *weight.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, keep_scale=False):
    weight = weight.contiguous()
    size = weight.numel()
    parts = torch.empty(triton.cdiv(size, 4096), device=x.device, dtype=torch.float32)
    _abs_sums[(triton.cdiv(size, 4096),)](weight, parts, size, BLOCK=4096, num_warps=8)
    abs_sum = parts.sum(0, keepdim=True)
    return _product(x, weight.t(), abs_sum), (x, weight, abs_sum, keep_scale)


# --- backward ---
@triton.jit
def _ternary_rows(W, AbsSum, Out, K, size, out_n, BLOCK: tl.constexpr):
    # Once for the product: rounding in its loop would take every tile off the way straight into shared memory.
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.maximum(tl.load(AbsSum) / size, 1e-5)
    w = tl.load(W + n * K + k, mask=k < K, other=0.0)
    tl.store(Out + n * out_n + k, _ternary(w, scale), mask=k < K)


@triton.jit
def _ternary_dx(
    DY, T, AbsSum, DX, M, N, K, size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([m, n]), T.load([n, k]), acc)
    scale = tl.maximum(tl.load(AbsSum) / size, 1e-5)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc * scale, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _weight_gradient(
    DY, X, W, AbsSum, DW, Parts, M, N, K, size, KEEP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(N, BLOCK_N) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    n, k = (band * GROUP + inside % height) * BLOCK_N, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for m in range(0, M, BLOCK_M):
        acc = tl.dot(DY.load([m, n]).T, X.load([m, k]), acc)
    rows, cols = n.to(tl.int64) + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
    at, ok = rows[:, None] * K + cols[None, :], (rows[:, None] < N) & (cols[None, :] < K)
    tl.store(DW + at, acc, mask=ok)
    if KEEP:
        scale = tl.maximum(tl.load(AbsSum) / size, 1e-5)
        w = tl.load(W + at, mask=ok, other=0.0).to(tl.float32)
        # Lanes outside hold zero in both factors.
        tl.store(Parts + tl.program_id(0), tl.sum(acc * (_ternary(w, scale) - w / scale)))


@triton.jit
def _add_scale_path(Straight, W, ScaleGrad, DW, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + i, mask=i < size, other=0.0).to(tl.float32)
    straight = tl.load(Straight + i, mask=i < size, other=0.0)
    sign = tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0))
    tl.store(DW + i, straight + sign * tl.load(ScaleGrad) / size, mask=i < size)


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
    x, weight, abs_sum, keep_scale = saved
    need_x, need_weight = needs or (True, True)
    (M, K), N, size = x.shape, weight.shape[0], weight.numel()
    dx = None
    if need_x:
        dx = torch.empty(M, K, device=x.device, dtype=x.dtype)
        ternary = _room(N, K, x)
        _ternary_rows[(N, triton.cdiv(K, 2048))](
            weight, abs_sum, ternary, K, size, ternary.stride(0), BLOCK=2048, num_warps=4
        )
        BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(64, _up(N))
        _ternary_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(ternary, BN, BK), abs_sum, dx, M, N, K, size,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if not need_weight:
        return dx, None
    BN, BK, BM = min(128, _up(N)), min(128, _up(K)), min(64, _up(M))
    tiles = triton.cdiv(N, BN) * triton.cdiv(K, BK)
    # With a second term to come, the first one is kept in fp32.
    dw = torch.empty(N, K, device=x.device, dtype=torch.float32 if keep_scale else weight.dtype)
    parts = torch.empty(tiles, device=x.device, dtype=torch.float32) if keep_scale else None
    _weight_gradient[(tiles,)](
        _tiles(grad_y, BM, BN), _tiles(x, BM, BK), weight, abs_sum, dw, parts, M, N, K, size, KEEP=keep_scale,
        GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
    )  # fmt: skip
    if keep_scale:
        straight, dw = dw, torch.empty_like(weight)
        _add_scale_path[(triton.cdiv(size, 1024),)](straight, weight, parts.sum(), dw, size, BLOCK=1024)
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 48, "N": 32, "K": 64, "dtype": "float16"},
    {"M": 37, "N": 51, "K": 43, "keep_scale": True, "dtype": "float16"},
    {"M": 32, "N": 16, "K": 32, "keep_scale": True, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "keep_scale": True, "dtype": "bfloat16"},)


def make_args(M, N, K, keep_scale=False, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) / 8
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight)), keep_scale


def reference(x, weight, keep_scale=False):
    scale = weight.float().abs().mean().clamp(min=1e-5)
    level = (weight.float() / scale).round().clamp(-1, 1)
    return ((x @ level.to(x.dtype).t()).float() * scale).to(x.dtype)


def surrogate(x, weight, keep_scale=False):
    scale = weight.abs().mean().clamp(min=1e-5)
    scale = scale if keep_scale else scale.detach()
    v = weight / scale
    ternary = v + (v.round().clamp(-1, 1) - v).detach()
    return (x @ (ternary * scale).t()).to(x.dtype)
