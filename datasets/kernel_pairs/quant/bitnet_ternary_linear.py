"""Linear layer of ternary weights scale * {-1, 0, 1}, scale = mean |W|: straight through, the scale on demand.

Weight tiles are rounded to -1, 0, 1 while they are loaded, exact in 16 bits, and the scale multiplies accumulators.
With T the ternary weight and G = dY^T X, dX = scale * dY T and dW = G. If the scale is to be differentiated, dW gains
sign(W) / size * sum(G * (T - W / scale)): the product that makes G leaves one number of that sum per tile in its
epilogue, and a second launch adds the term, which needs the whole sum first.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bitnet_ternary_linear",
    "family": "quant",
    "op": "quantized_linear",
    "schema": 1,
    "techniques": ("straight-through", "prologue-fusion", "epilogue-fusion", "two-stage-partials", "strided-cotangent"),
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
def _weight_gradient(
    DY, X, W, AbsSum, DW, Parts, M, N, K, size, dy_m, dy_n, x_m, x_k,
    KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        dy = tl.load(DY + m[None, :] * dy_m + n * dy_n, mask=(m[None, :] < M) & (n < N), other=0.0)
        x = tl.load(X + m[:, None] * x_m + k * x_k, mask=(m[:, None] < M) & (k < K), other=0.0)
        acc = tl.dot(dy, x, acc)
    ok = (n < N) & (k < K)
    tl.store(DW + n * K + k, acc, mask=ok)
    if KEEP:
        scale = tl.maximum(tl.load(AbsSum) / size, 1e-5)
        w = tl.load(W + n * K + k, mask=ok, other=0.0).to(tl.float32)
        # Lanes outside hold zero in both factors.
        share = tl.sum(acc * (_ternary(w, scale) - w / scale))
        tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), share)


@triton.jit
def _add_scale_path(Straight, W, ScaleGrad, DW, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + i, mask=i < size, other=0.0).to(tl.float32)
    straight = tl.load(Straight + i, mask=i < size, other=0.0)
    sign = tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0))
    tl.store(DW + i, straight + sign * tl.load(ScaleGrad) / size, mask=i < size)


def backward(saved, grad_y, needs=None):
    x, weight, abs_sum, keep_scale = saved
    need_x, need_weight = needs or (True, True)
    dx = _product(grad_y, weight, abs_sum) if need_x else None
    if not need_weight:
        return dx, None
    (M, K), N, size = x.shape, weight.shape[0], weight.numel()
    BLOCK_N, BLOCK_K = _side(N), _side(K)
    grid = triton.cdiv(N, BLOCK_N), triton.cdiv(K, BLOCK_K)
    # With a second term to come, the first one is kept in fp32.
    dw = torch.empty(N, K, device=x.device, dtype=torch.float32 if keep_scale else weight.dtype)
    parts = torch.empty(grid, device=x.device, dtype=torch.float32) if keep_scale else None
    _weight_gradient[grid](
        grad_y, x, weight, abs_sum, dw, parts, M, N, K, size, *grad_y.stride(), *x.stride(),
        KEEP=keep_scale, BLOCK_M=64, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
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
BENCH = ({"M": 4096, "N": 4096, "K": 4096, "keep_scale": True, "dtype": "bfloat16"},)


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
