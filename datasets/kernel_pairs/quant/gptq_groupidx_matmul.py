"""4-bit product in activation order: each input row names its group, whose scale and zero are gathered in both passes.

Ordering rows by importance leaves neighbours in different groups. The word of a row is found by its number, its scale
and zero point through the group index; zero points are packed, too, eight columns to a word. The backward owns a tile
of dx, so that its K rows and their groups stay the same for the whole walk along N, and only scale rows are gathered.
Where dx has many tiles of rows, each would gather the same weights: they are then written out once, rounded as the
product takes them, before it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gptq_groupidx_matmul",
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
def _ordered_weight(Words, Scales, Zeros, k, group, n, K, N, N8):
    """Weights of rows k (K, 1) in groups `group` (K, 1) and columns n (1, N) in fp32; zeros outside."""
    ok = (k < K) & (n < N)
    level = (tl.load(Words + (k // 8) * N + n, mask=ok, other=0) >> (4 * (k % 8))) & 15
    zero = (tl.load(Zeros + group * N8 + n // 8, mask=ok, other=0) >> (4 * (n % 8))) & 15
    scale = tl.load(Scales + group * N + n, mask=ok, other=0.0).to(tl.float32)
    return (level - zero).to(tl.float32) * scale


@triton.jit
def _ordered_fwd(
    X, Words, Scales, Zeros, Group, Y, M, N, K, N8, x_m, x_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        group = tl.load(Group + k, mask=k < K, other=0)[:, None]
        x = tl.load(X + m * x_m + k[None, :] * x_k, mask=(m < M) & (k[None, :] < K), other=0.0)
        weight = _ordered_weight(Words, Scales, Zeros, k[:, None], group, n, K, N, N8)
        acc = tl.dot(x, weight.to(x.dtype), acc)
    tl.store(Y + m * N + n, acc, mask=(m < M) & (n < N))


def _rows(M):
    return max(16, min(128, triton.next_power_of_2(M)))


def forward(x, words, scales, zeros, group):
    words, scales, zeros, group = words.contiguous(), scales.contiguous(), zeros.contiguous(), group.contiguous()
    (M, K), (N8, N) = x.shape, (zeros.shape[1], scales.shape[1])
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_M = _rows(M)
    _ordered_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, 128))](
        x, words, scales, zeros, group, y, M, N, K, N8, *x.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (words, scales, zeros, group)


# --- backward ---
@triton.jit
def _ordered_unpack(Words, Scales, Zeros, Group, W, N, K, N8, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    group = tl.load(Group + k, mask=k < K, other=0)[:, None]
    weight = _ordered_weight(Words, Scales, Zeros, k[:, None], group, n, K, N, N8)
    tl.store(W + k.to(tl.int64)[:, None] * N + n, weight, mask=(k[:, None] < K) & (n < N))


@triton.jit
def _ordered_dx(
    DY, Words, Scales, Zeros, Group, W, DX, M, N, K, N8, dy_m, dy_n,
    UNPACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.load(Group + k, mask=k < K, other=0)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N))[None, :]
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=(m < M) & (n < N), other=0.0)
        # (K, N) with columns along memory, as the forward builds it, and transposed in registers or shared memory.
        if UNPACKED:
            weight = tl.load(W + k.to(tl.int64)[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        else:
            weight = _ordered_weight(Words, Scales, Zeros, k[:, None], group, n, K, N, N8).to(dy.dtype)
        acc = tl.dot(dy, tl.trans(weight), acc)
    tl.store(DX + m * K + k[None, :], acc, mask=(m < M) & (k[None, :] < K))


def backward(saved, grad_y, needs=None):
    words, scales, zeros, group = saved
    (M, N), K, N8 = grad_y.shape, group.shape[0], zeros.shape[1]
    dx = torch.empty(M, K, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_M = _rows(M)
    unpacked = M > 4 * BLOCK_M
    weight = dx
    if unpacked:
        weight = torch.empty(K, N, device=grad_y.device, dtype=grad_y.dtype)
        _ordered_unpack[(triton.cdiv(K, 8), triton.cdiv(N, 256))](
            words, scales, zeros, group, weight, N, K, N8, BLOCK_K=8, BLOCK_N=256, num_warps=4
        )
    _ordered_dx[(triton.cdiv(M, BLOCK_M), triton.cdiv(K, 128))](
        grad_y, words, scales, zeros, group, weight, dx, M, N, K, N8, *grad_y.stride(),
        UNPACKED=unpacked, BLOCK_M=BLOCK_M, BLOCK_N=64 if unpacked else 32, BLOCK_K=128, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"M": 32, "N8": 8, "K8": 16, "groups": 4, "dtype": "float16"},
    {"M": 19, "N8": 11, "K8": 13, "groups": 3, "dtype": "float16"},
    {"M": 16, "N8": 6, "K8": 8, "groups": 2, "dtype": "bfloat16"},
    {"M": 520, "N8": 3, "K8": 4, "groups": 2, "dtype": "float16"},
)
BENCH = ({"M": 2048, "N8": 512, "K8": 512, "groups": 32, "dtype": "float16"},)


def make_args(M, N8, K8, groups, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    x, scales = torch.randn(M, 8 * K8, generator=g), 0.02 + 0.03 * torch.rand(groups, 8 * N8, generator=g)
    words = torch.randint(-(2**31), 2**31, (K8, 8 * N8), generator=g, dtype=torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (groups, N8), generator=g, dtype=torch.int32)
    # Groups of nearly equal size, their rows scattered over the whole input.
    group = (torch.randperm(8 * K8, generator=g) * groups // (8 * K8)).to(torch.int32)
    return x.to(device, dt), words.to(device), scales.to(device, dt), zeros.to(device), group.to(device)


def reference(x, words, scales, zeros, group):
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    levels = ((words[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
    zero = ((zeros[..., None] >> shifts) & 15).flatten(1)
    row = group.long()
    return x @ ((levels - zero[row]).float() * scales.float()[row]).to(x.dtype)
