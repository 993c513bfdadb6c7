"""Product with frozen 4-bit weights: dX = dY W^T unpacks each weight tile in registers and multiplies by its transpose.

A word holds eight weights that follow each other along K; a group of K rows shares a scale and a zero point. Both
passes load a word once, spread its nibbles along a third axis and fold that into K. The forward walks K for a tile of
y; the backward owns a tile of dx and walks N, so that no full weight is ever built. Weights, scales and zeros are
frozen.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "int4_dequant_matmul",
    "family": "quant",
    "op": "quantized_matmul",
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
def _unpack(Words, Scales, Zeros, w, n, K8, N, GROUP8: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr):
    """Weights of rows 8 * w to 8 * w + 7 and columns n as fp32 (8 * BLOCK_W, BLOCK_N); zeros outside."""
    ok = (w[:, None] < K8) & (n[None, :] < N)
    words = tl.load(Words + w[:, None] * N + n[None, :], mask=ok, other=0)
    # A group is a multiple of eight rows, so that a word has one scale.
    at = (w[:, None] // GROUP8) * N + n[None, :]
    scale = tl.load(Scales + at, mask=ok, other=0.0).to(tl.float32)
    zero = tl.load(Zeros + at, mask=ok, other=0.0).to(tl.float32)
    nibble = (words[:, None, :] >> (4 * tl.arange(0, 8))[None, :, None]) & 15
    weight = (nibble.to(tl.float32) - zero[:, None, :]) * scale[:, None, :]
    return tl.reshape(weight, (8 * BLOCK_W, BLOCK_N))


@triton.jit
def _int4_fwd(
    X, Words, Scales, Zeros, Y, M, N, K8, x_m, x_k,
    GROUP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K8, BLOCK_W):
        k = (8 * start + tl.arange(0, 8 * BLOCK_W))[None, :]
        x = tl.load(X + m * x_m + k * x_k, mask=(m < M) & (k < 8 * K8), other=0.0)
        w = start + tl.arange(0, BLOCK_W)
        weight = _unpack(Words, Scales, Zeros, w, n, K8, N, GROUP8, BLOCK_W, BLOCK_N)
        acc = tl.dot(x, weight.to(x.dtype), acc)
    tl.store(Y + m * N + n[None, :], acc, mask=(m < M) & (n[None, :] < N))


def _rows(M):
    return max(16, min(128, triton.next_power_of_2(M)))


def forward(x, words, scales, zeros, group):
    if group % 8:
        raise ValueError(f"a group of {group} rows is no whole number of words of eight")
    words, scales, zeros = words.contiguous(), scales.contiguous(), zeros.contiguous()
    M, (K8, N) = x.shape[0], words.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_M = _rows(M)
    _int4_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, 128))](
        x, words, scales, zeros, y, M, N, K8, *x.stride(), GROUP8=group // 8,
        BLOCK_M=BLOCK_M, BLOCK_N=128, BLOCK_W=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (words, scales, zeros, group)


# --- backward ---
@triton.jit
def _int4_dx(
    DY, Words, Scales, Zeros, DX, M, N, K8, dy_m, dy_n,
    GROUP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    acc = tl.zeros((BLOCK_M, 8 * BLOCK_W), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        wide = n[None, :].to(tl.int64)
        dy = tl.load(DY + m * dy_m + wide * dy_n, mask=(m < M) & (n[None, :] < N), other=0.0)
        weight = _unpack(Words, Scales, Zeros, w, n, K8, N, GROUP8, BLOCK_W, BLOCK_N)
        acc = tl.dot(dy, tl.trans(weight.to(dy.dtype)), acc)
    k = (8 * BLOCK_W * tl.program_id(1) + tl.arange(0, 8 * BLOCK_W))[None, :]
    tl.store(DX + m * (8 * K8) + k, acc, mask=(m < M) & (k < 8 * K8))


def backward(saved, grad_y, needs=None):
    words, scales, zeros, group = saved
    M, (K8, N) = grad_y.shape[0], words.shape
    dx = torch.empty(M, 8 * K8, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_M = _rows(M)
    _int4_dx[(triton.cdiv(M, BLOCK_M), triton.cdiv(K8, 16))](
        grad_y, words, scales, zeros, dx, M, N, K8, *grad_y.stride(), GROUP8=group // 8,
        BLOCK_M=BLOCK_M, BLOCK_N=64, BLOCK_W=16, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"M": 32, "N": 64, "K8": 16, "group": 32, "dtype": "float16"},
    {"M": 19, "N": 75, "K8": 21, "group": 40, "dtype": "float16"},
    {"M": 16, "N": 48, "K8": 8, "group": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 4096, "K8": 512, "group": 128, "dtype": "float16"},)


def make_args(M, N, K8, group, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = triton.cdiv(8 * K8, group)
    x, scales = torch.randn(M, 8 * K8, generator=g), 0.02 + 0.03 * torch.rand(groups, N, generator=g)
    words = torch.randint(-(2**31), 2**31, (K8, N), generator=g, dtype=torch.int32)
    zeros = torch.randint(6, 10, (groups, N), generator=g)
    dt = getattr(torch, dtype)
    return x.to(device, dt), words.to(device), scales.to(device, dt), zeros.to(device, dt), group


def reference(x, words, scales, zeros, group):
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
    levels = ((words[:, None] >> shifts) & 15).flatten(0, 1).float()
    row = torch.arange(levels.shape[0], device=words.device) // group
    weight = (levels - zeros.float()[row]) * scales.float()[row]
    return x @ weight.to(x.dtype)
