"""fp32 product on bf16 tensor cores: every operand is split into three parts, in the gradients' products as well.

a = a0 + a1 + a2 with a0 = bf16(a), a1 = bf16(a - a0), a2 = bf16(a - a0 - a1): eight bits each, the twenty-four of fp32
together. Of the nine products of parts the six with the largest share are taken, a0 b0, a0 b1, a1 b0, a1 b1, a0 b2 and
a2 b0, smallest first, so that the accumulator rounds the small ones least. Gradients are products of the same kind: a
dX or dW on plain bf16 or tf32 would undo in training what the forward paid for. One kernel takes all three in their
strides, dW with its rows split, as its output alone is too small to fill the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_bf16_split",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("owner-grid", "split-k", "two-stage-partials", "prologue-fusion", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _parts(a):
    """Three bf16 tiles that add up to an fp32 one."""
    first = a.to(tl.bfloat16)
    rest = a - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_product(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n, k_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Slice program_id(2) of OUT (slices, M, N) = L (M, K) R (K, N) over its share of K.
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    first = tl.program_id(2).to(tl.int64) * k_each
    last = tl.minimum(first + k_each, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(L + m * l_m + k[None, :] * l_k, mask=(m < M) & (k[None, :] < last), other=0.0)
        right = tl.load(R + k[:, None] * r_k + n * r_n, mask=(k[:, None] < last) & (n < N), other=0.0)
        a0, a1, a2 = _parts(left)
        b0, b1, b2 = _parts(right)
        small = tl.dot(a2, b0)
        small = tl.dot(a0, b2, small)
        small = tl.dot(a1, b1, small)
        small = tl.dot(a1, b0, small)
        small = tl.dot(a0, b1, small)
        acc += tl.dot(a0, b0, small)
    out = OUT + tl.program_id(2).to(tl.int64) * M * N
    tl.store(out + m * N + n, acc, mask=(m < M) & (n < N))


def _product(left, right, slices=1):
    (M, K), N = left.shape, right.shape[1]
    BLOCK_M, BLOCK_N = (max(16, min(64, triton.next_power_of_2(size))) for size in (M, N))
    k_each = triton.cdiv(triton.cdiv(K, slices), 32) * 32
    slices = triton.cdiv(K, k_each)
    out = torch.empty(slices, M, N, device=left.device, dtype=torch.float32)
    _split_product[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N), slices)](
        left, right, out, M, N, K, *left.stride(), *right.stride(), k_each,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight):
    return _product(x, weight)[0], (x, weight)


# --- backward ---
@triton.jit
def _add_slices(Slices, OUT, size, slices, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(slices):
        total += tl.load(Slices + part * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
    tl.store(OUT + at, total, mask=at < size)


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_weight = needs or (True, True)
    dx = _product(grad_y, weight.t())[0] if need_x else None
    if not need_weight:
        return dx, None
    # About four tiles for each of 132 processors, and at least four steps of the loop in each.
    tiles = triton.cdiv(weight.shape[0], 64) * triton.cdiv(weight.shape[1], 64)
    slices = _product(x.t(), grad_y, max(1, min(triton.cdiv(x.shape[0], 128), 528 // tiles)))
    if len(slices) == 1:
        return dx, slices[0]
    dweight = torch.empty_like(slices[0])
    size = dweight.numel()
    _add_slices[(triton.cdiv(size, 1024),)](slices, dweight, size, len(slices), BLOCK=1024, num_warps=4)
    return dx, dweight


# --- check ---
SWEEP = ({"M": 64, "N": 32, "K": 48}, {"M": 301, "N": 75, "K": 37}, {"M": 20, "N": 70, "K": 100})
BENCH = ({"M": 8192, "N": 1024, "K": 1024},)


def make_args(M, N, K, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=g).to(device), torch.randn(K, N, generator=g).to(device)


def reference(x, weight):
    return x @ weight
