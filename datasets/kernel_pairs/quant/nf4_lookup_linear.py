"""Linear layer with frozen 4-bit codebook weights: dX = dY W looks the weights up again, in the layout they have.

A byte holds two codes of one output row, the first in its high half; a code names one of sixteen levels, which a scale
per block of inputs stretches. y = x W^T takes the looked-up tile transposed, dX takes it as it lies: the walk changes
from inputs to outputs and the store of W stays the same. Few rows of dY look tiles up inside the product; many rows
would look each tile up once per tile of rows, so the weights are then written out once, rounded as the product takes
them. Codes, levels and scales get no gradient.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nf4_lookup_linear",
    "family": "quant",
    "op": "quantized_linear",
    "schema": 1,
    "techniques": ("partial-gradient", "loop-swap", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lookup(
    Codes, Levels, Scales, n, byte, N, K2, blocks, BLOCK2: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """Weights (TILE_N, TILE_K) of output rows n (TILE_N, 1) and bytes (1, TILE_K / 2) in fp32; zeros outside."""
    ok = (n < N) & (byte < K2)
    code = tl.load(Codes + n * K2 + byte, mask=ok, other=0).to(tl.int32)
    scale = tl.load(Scales + n * blocks + byte // BLOCK2, mask=ok, other=0.0).to(tl.float32)
    # Sixteen levels stay in the first-level cache: the lookup is a gather of one line.
    first = tl.load(Levels + ((code >> 4) & 15)) * scale
    second = tl.load(Levels + (code & 15)) * scale
    return tl.reshape(tl.join(first, second), (TILE_N, TILE_K))


@triton.jit
def _nf4_fwd(
    X, Codes, Levels, Scales, Y, M, N, K2, blocks, x_m, x_k,
    BLOCK2: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M))[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K2, TILE_K // 2):
        k = (2 * start + tl.arange(0, TILE_K))[None, :]
        x = tl.load(X + m * x_m + k * x_k, mask=(m < M) & (k < 2 * K2), other=0.0)
        byte = (start + tl.arange(0, TILE_K // 2))[None, :]
        w = _lookup(Codes, Levels, Scales, n.to(tl.int64)[:, None], byte, N, K2, blocks, BLOCK2, TILE_N, TILE_K)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    tl.store(Y + m * N + n[None, :], acc, mask=(m < M) & (n[None, :] < N))


def _rows(M):
    return max(16, min(128, triton.next_power_of_2(M)))


def forward(x, codes, levels, scales, block):
    if block % 2:
        raise ValueError(f"a block of {block} inputs is no whole number of bytes of two codes")
    codes, levels, scales = codes.contiguous(), levels.contiguous(), scales.contiguous()
    M, (N, K2) = x.shape[0], codes.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    TILE_M = _rows(M)
    _nf4_fwd[(triton.cdiv(M, TILE_M), triton.cdiv(N, 128))](
        x, codes, levels, scales, y, M, N, K2, scales.shape[1], *x.stride(),
        BLOCK2=block // 2, TILE_M=TILE_M, TILE_N=128, TILE_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (codes, levels, scales, block)


# --- backward ---
@triton.jit
def _nf4_unpack(
    Codes, Levels, Scales, W, N, K2, blocks, BLOCK2: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    n = (tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N))[:, None]
    half = tl.program_id(1) * (TILE_K // 2)
    byte = (half + tl.arange(0, TILE_K // 2))[None, :]
    w = _lookup(Codes, Levels, Scales, n, byte, N, K2, blocks, BLOCK2, TILE_N, TILE_K)
    k = (2 * half + tl.arange(0, TILE_K))[None, :]
    tl.store(W + n * (2 * K2) + k, w, mask=(n < N) & (k < 2 * K2))


@triton.jit
def _nf4_dx(
    DY, Codes, Levels, Scales, W, DX, M, N, K2, blocks, dy_m, dy_n,
    UNPACKED: tl.constexpr, BLOCK2: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M))[:, None]
    byte = (tl.program_id(1) * (TILE_K // 2) + tl.arange(0, TILE_K // 2))[None, :]
    k = (tl.program_id(1) * TILE_K + tl.arange(0, TILE_K))[None, :]
    acc = tl.zeros((TILE_M, TILE_K), tl.float32)
    for start in range(0, N, TILE_N):
        n = (start + tl.arange(0, TILE_N)).to(tl.int64)
        dy = tl.load(DY + m * dy_m + n[None, :] * dy_n, mask=(m < M) & (n[None, :] < N), other=0.0)
        if UNPACKED:
            w = tl.load(W + n[:, None] * (2 * K2) + k, mask=(n[:, None] < N) & (k < 2 * K2), other=0.0)
        else:
            w = _lookup(Codes, Levels, Scales, n[:, None], byte, N, K2, blocks, BLOCK2, TILE_N, TILE_K).to(dy.dtype)
        acc = tl.dot(dy, w, acc)
    tl.store(DX + m * (2 * K2) + k, acc, mask=(m < M) & (k < 2 * K2))


def backward(saved, grad_y, needs=None):
    codes, levels, scales, block = saved
    M, (N, K2), blocks = grad_y.shape[0], codes.shape, scales.shape[1]
    dx = torch.empty(M, 2 * K2, device=grad_y.device, dtype=grad_y.dtype)
    TILE_M, TILE_N, TILE_K = _rows(M), 64, 256
    unpacked = M > 4 * TILE_M
    weight = dx
    if unpacked:
        weight = torch.empty(N, 2 * K2, device=grad_y.device, dtype=grad_y.dtype)
        _nf4_unpack[(triton.cdiv(N, 4), triton.cdiv(2 * K2, TILE_K))](
            codes, levels, scales, weight, N, K2, blocks, BLOCK2=block // 2, TILE_N=4, TILE_K=TILE_K, num_warps=4
        )
    _nf4_dx[(triton.cdiv(M, TILE_M), triton.cdiv(2 * K2, TILE_K))](
        grad_y, codes, levels, scales, weight, dx, M, N, K2, blocks, *grad_y.stride(),
        UNPACKED=unpacked, BLOCK2=block // 2, TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"M": 32, "N": 48, "K2": 64, "block": 32, "dtype": "float16"},
    {"M": 19, "N": 51, "K2": 37, "block": 16, "dtype": "float16"},
    {"M": 16, "N": 32, "K2": 32, "block": 64, "dtype": "bfloat16"},
    {"M": 520, "N": 21, "K2": 18, "block": 16, "dtype": "float16"},
)
BENCH = ({"M": 4096, "N": 4096, "K2": 2048, "block": 64, "dtype": "bfloat16"},)


def make_args(M, N, K2, block, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, 2 * K2, generator=g).to(device=device, dtype=getattr(torch, dtype))
    codes = torch.randint(0, 256, (N, K2), generator=g, dtype=torch.uint8)
    scales = 0.05 + 0.05 * torch.rand(N, triton.cdiv(2 * K2, block), generator=g)
    # Sixteen levels at equal steps of probability of a normal variable, in the range from -1 to 1.
    levels = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))
    return x, codes.to(device), (levels / levels.abs().max()).to(device), scales.to(device), block


def reference(x, codes, levels, scales, block):
    pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(1).long()
    column = torch.arange(pairs.shape[1], device=x.device) // block
    weight = levels[pairs] * scales[:, column]
    return x @ weight.to(x.dtype).t()
