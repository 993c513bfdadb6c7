"""Linear layer of frozen fp8 weights with a scale per 128 x 128 block: both passes quantise what meets the weights.

y = x W^T, W being e4m3 with one fp32 scale per block. Rows of x are cut into groups of 128 along the inputs, each group
is scaled to the range of e4m3 by its own maximum, and every group's product, summed by the tensor cores, is scaled and
added in fp32. dx = dy W is the same walk the other way: dy is quantised anew in groups along the outputs, whose borders
are those of W's blocks, so that again one scale per row and step leaves the inner sum. Square blocks are what lets one
copy of W serve both passes. Gradients pass the rounding straight through; nothing of x is kept.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fp8_block_scaled_linear",
    "family": "quant",
    "op": "quantized_linear",
    "schema": 1,
    "techniques": ("straight-through", "partial-gradient", "loop-swap", "prologue-fusion", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _quantise_groups(X, X8, Scale, M, K, x_m, x_k, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """e4m3 values and one scale for every row and group of columns."""
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    group = tl.program_id(1)
    k = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)[None, :]
    mask = (m < M) & (k < K)
    x = tl.load(X + m * x_m + k * x_k, mask=mask, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 1, keep_dims=True)
    # 448 is the largest e4m3 number. A group of zeros has no scale of its own; any keeps it zero.
    scale = tl.where(peak > 0.0, peak, 448.0) / 448.0
    tl.store(X8 + m * K + k, (x / scale).to(tl.float8e4nv), mask=mask)
    row = tl.arange(0, 1)[None, :]
    tl.store(Scale + m * tl.num_programs(1) + group + row, scale, mask=m < M)


def _quantised(x, group):
    """x in groups of columns: (M, K) e4m3 and (M, groups) fp32."""
    (M, K), groups = x.shape, triton.cdiv(x.shape[1], group)
    x8 = torch.empty(M, K, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(M, groups, device=x.device, dtype=torch.float32)
    _quantise_groups[(triton.cdiv(M, 16), groups)](x, x8, scale, M, K, *x.stride(), GROUP=group, BLOCK_M=16)
    return x8, scale


@triton.jit
def _scaled_fwd(X8, W8, XScale, WScale, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    groups = tl.cdiv(K, GROUP)
    rows, cols = m[:, None], n.to(tl.int64)[None, :]
    # A tile of outputs lies within one row of blocks.
    block = tl.program_id(1) * BLOCK_N // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(groups):
        k = step * GROUP + tl.arange(0, GROUP)
        x8 = tl.load(X8 + rows * K + k[None, :], mask=(rows < M) & (k[None, :] < K), other=0.0)
        w8 = tl.load(W8 + cols * K + k[:, None], mask=(k[:, None] < K) & (cols < N), other=0.0)
        scale = tl.load(XScale + m * groups + step, mask=m < M, other=0.0) * tl.load(WScale + block * groups + step)
        acc += tl.dot(x8, w8) * scale[:, None]
    tl.store(Y + rows * N + cols, acc, mask=(rows < M) & (cols < N))


def _side(size, group):
    return max(16, min(128, group, triton.next_power_of_2(size)))


def forward(x, weight, weight_scale, group=128):
    weight, weight_scale = weight.contiguous(), weight_scale.contiguous()
    M, (N, K) = x.shape[0], weight.shape
    x8, x_scale = _quantised(x, group)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = _side(M, 128), _side(N, group)
    _scaled_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x8, weight, x_scale, weight_scale, y, M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUP=group, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (weight, weight_scale, group)


# --- backward ---
@triton.jit
def _scaled_dx(G8, W8, GScale, WScale, DX, M, N, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows, cols = m[:, None], k.to(tl.int64)[None, :]
    groups, blocks = tl.cdiv(N, GROUP), tl.cdiv(K, GROUP)
    # A tile of inputs lies within one column of blocks.
    WScale += tl.program_id(1) * BLOCK_K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in range(groups):
        n = step * GROUP + tl.arange(0, GROUP)
        g8 = tl.load(G8 + rows * N + n[None, :], mask=(rows < M) & (n[None, :] < N), other=0.0)
        w8 = tl.load(W8 + n.to(tl.int64)[:, None] * K + cols, mask=(n[:, None] < N) & (cols < K), other=0.0)
        scale = tl.load(GScale + m * groups + step, mask=m < M, other=0.0) * tl.load(WScale + step * blocks)
        acc += tl.dot(g8, w8) * scale[:, None]
    tl.store(DX + rows * K + cols, acc, mask=(rows < M) & (cols < K))


def backward(saved, grad_y, needs=None):
    weight, weight_scale, group = saved
    M, (N, K) = grad_y.shape[0], weight.shape
    g8, g_scale = _quantised(grad_y, group)
    dx = torch.empty(M, K, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_M, BLOCK_K = _side(M, 128), _side(K, group)
    _scaled_dx[(triton.cdiv(M, BLOCK_M), triton.cdiv(K, BLOCK_K))](
        g8, weight, g_scale, weight_scale, dx, M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, GROUP=group, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"M": 32, "N": 128, "K": 256, "dtype": "bfloat16"},
    {"M": 37, "N": 75, "K": 91, "GROUP": 32, "dtype": "float16"},
    {"M": 16, "N": 96, "K": 64, "GROUP": 32, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, GROUP=128, dtype="bfloat16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=g).to(device=device, dtype=getattr(torch, dtype))
    weight = (100.0 * torch.randn(N, K, generator=g)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    scale = (0.5 + torch.rand(-(-N // GROUP), -(-K // GROUP), generator=g)) / 100.0
    return x, weight.to(device), scale.to(device), GROUP


def _dequantised(weight, weight_scale, group, dtype):
    N, K = weight.shape
    scale = weight_scale.repeat_interleave(group, 0)[:N].repeat_interleave(group, 1)[:, :K]
    return (weight.to(scale.dtype) * scale).to(dtype)


def reference(x, weight, weight_scale, group=128):
    K = x.shape[1]
    grouped = torch.nn.functional.pad(x.float(), (0, -K % group)).unflatten(1, (-1, group))
    peak = grouped.detach().abs().amax(2, keepdim=True)
    scale = torch.where(peak > 0, peak, 448.0) / 448.0
    rounded = (grouped.detach() / scale).to(torch.float8_e4m3fn).float() * scale
    straight = (grouped + (rounded - grouped).detach()).flatten(1)[:, :K].to(x.dtype)
    return straight @ _dequantised(weight, weight_scale, group, x.dtype).T


def surrogate(x, weight, weight_scale, group=128):
    return x @ _dequantised(weight, weight_scale, group, x.dtype).T
