"""Linear layer in fp8 with delayed scaling: scales come from the past, and the history of maxima has no gradient.

The scale of a tensor is the largest maximum of the last steps over 448, so that one pass rounds it to e4m3 while it
takes the maximum for the steps to come; that goes out as a new history beside y. Saved are the two e4m3 images in place
of the 16-bit tensors. Each widens to 16 bits without error in a pass of its own, and the scales are factors of the
accumulators: dx = s_w dy W8, dW = s_x dy^T X8, one kernel for both. Gradients pass rounding and saturation unchanged;
scales are constants of the step.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "fp8_delayed_scaling",
    "family": "quant",
    "op": "quantized_linear",
    "schema": 1,
    "techniques": ("straight-through", "owner-grid", "epilogue-fusion"),
    "saves": ("x8: fp8 (M, K)", "w8: fp8 (N, K)", "scales: fp32 (2)"),
    "grads": ("x", "weight"),
    "dtypes": ("bfloat16", "float16"),
    "nondiff_outputs": (1,),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _cast_with_peak(X, X8, Scale, Peaks, size, BLOCK: tl.constexpr):
    """One pass: e4m3 by the scale of the past, and each program's maximum for the future."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(Peaks + tl.program_id(0), tl.max(tl.abs(x), 0))
    # What outgrew the history saturates instead of becoming NaN.
    scaled = tl.minimum(tl.maximum(x / tl.load(Scale), -448.0), 448.0)
    tl.store(X8 + at, scaled.to(tl.float8e4nv), mask=at < size)


def _cast(x, scale):
    x8 = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    peaks = torch.empty(triton.cdiv(x.numel(), 4096), device=x.device, dtype=torch.float32)
    _cast_with_peak[(len(peaks),)](x, x8, scale, peaks, x.numel(), BLOCK=4096, num_warps=8)
    return x8, peaks.amax()


@triton.jit
def _fp8_product(X8, W8, Scales, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x8 = tl.load(X8 + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        w8 = tl.load(W8 + n * K + k[:, None], mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(x8, w8, acc)
    # Both scales are constants of the whole product.
    tl.store(Y + m * N + n, acc * (tl.load(Scales) * tl.load(Scales + 1)), mask=(m < M) & (n < N))


def _side(size):
    return max(32, min(128, triton.next_power_of_2(size)))


def forward(x, weight, history):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    scales = history.amax(1) / 448.0
    x8, x_peak = _cast(x, scales[0:1])
    w8, w_peak = _cast(weight, scales[1:2])
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _fp8_product[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x8, w8, scales, y, M, N, K, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=128, num_warps=8, num_stages=3
    )
    # The newest maximum comes first, the oldest is forgotten.
    newer = torch.cat((torch.stack((x_peak, w_peak))[:, None], history[:, :-1]), 1)
    return (y, newer), (x8, w8, scales)


# --- backward ---
@triton.jit
def _widen(R8, Out, cols, out_r, BLOCK: tl.constexpr):
    # Once, without error: every tile of the image is read by many programs of the product.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    image = tl.load(R8 + row * cols + at, mask=at < cols, other=0.0)
    tl.store(Out + row * out_r + at, image.to(tl.float32), mask=at < cols)


@triton.jit
def _times_fp8(
    L, R, Scale, OUT, M, N, K, TURN: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = scale * L (M, K) R (K, N), L turned tile by tile if it lies as (K, M): dy W8, and dy^T X8.
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    m, n = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = L.load([k, m]).T if TURN else L.load([m, k])
        acc = tl.dot(left, R.load([k, n]), acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    out = OUT + rows[:, None] * N + cols[None, :]
    tl.store(out, acc * tl.load(Scale), mask=(rows[:, None] < M) & (cols[None, :] < N))


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


def _product(left, right8, scale, turn):
    (K, N), M = right8.shape, left.shape[1 if turn else 0]
    out = torch.empty(M, N, device=left.device, dtype=left.dtype)
    right = _room(K, N, left)
    _widen[(K, triton.cdiv(N, 2048))](right8, right, N, right.stride(0), BLOCK=2048, num_warps=4)
    BM, BN, BK = min(128, _up(M)), min(256, _up(N)), min(64, _up(K))
    _times_fp8[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        _tiles(left, BK, BM) if turn else _tiles(left, BM, BK), _tiles(right, BK, BN), scale, out, M, N, K, TURN=turn,
        GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def backward(saved, grad_y, grad_history, needs=None):
    x8, w8, scales = saved
    need_x, need_weight = needs or (True, True)
    dx = _product(grad_y, w8, scales[1:2], False) if need_x else None
    return dx, _product(grad_y, x8, scales[0:1], True) if need_weight else None


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48, "dtype": "bfloat16"},
    {"M": 37, "N": 51, "K": 75, "dtype": "float16"},
    {"M": 33, "N": 64, "K": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="bfloat16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) * K**-0.5
    # Of sixteen steps; now and then an element is larger than all of them.
    history = torch.tensor((3.0, 3.0 * K**-0.5))[:, None] * (0.6 + 0.4 * torch.rand(2, 16, generator=g))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight)), history.to(device)


def _newer(x, weight, history):
    peaks = torch.stack((x.detach().abs().amax(), weight.detach().abs().amax())).to(history.dtype)
    return torch.cat((peaks[:, None], history[:, :-1]), 1)


def _image(x, scale, cast):
    """What the rounded x stands for, straight through."""
    image = cast((x.detach().to(scale.dtype) / scale).clamp(-448.0, 448.0)) * scale
    return x + (image.to(x.dtype) - x).detach()


def reference(x, weight, history):
    sx, sw = history.amax(1) / 448.0
    images = (_image(t, s, lambda v: v.to(torch.float8_e4m3fn).to(v.dtype)) for t, s in ((x, sx), (weight, sw)))
    x_image, w_image = images
    return x_image @ w_image.T, _newer(x, weight, history)


def surrogate(x, weight, history):
    # As the exact arithmetic of the check has it: saturated, not rounded.
    sx, sw = history.amax(1) / 448.0
    return _image(x, sx, lambda v: v) @ _image(weight, sw, lambda v: v).T, _newer(x, weight, history)
