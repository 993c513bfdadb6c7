"""Pointwise conv2d: forward, dx and dweight are one product kernel that is called with three sets of strides.

For each image y = W x, dx = W^T dy and dW = sum over images of dy x^T, with planes flattened to a pixel axis. The
kernel adds left[b] right[b] over a group of b and knows operands by strides alone: a transposed W is W with strides
swapped, W has stride 0 over images, and an image in channels-last order is an image with other strides. In the backward
descriptors follow those strides. For dW the pixels of all images are one line, cut into pieces whose fp32 partials are
summed.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "conv2d_1x1",
    "family": "conv",
    "op": "conv2d_pointwise",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_product(
    L, R, Out, M, N, K, batches, group, l_b, l_m, l_k, r_b, r_k, r_n, o_g, o_m, o_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Out[g] (M, N) = sum over the batches b of group g of L[b] (M, K) R[b] (K, N).
    rows = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % rows * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first = tl.program_id(1) * group
    chunks = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.minimum(group, batches - first) * chunks):
        b = (first + step // chunks).to(tl.int64)
        k = (step % chunks * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(
            L + b * l_b + m[:, None] * l_m + k[None, :] * l_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
        )
        right = tl.load(
            R + b * r_b + k[:, None] * r_k + n[None, :] * r_n, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0
        )
        acc = tl.dot(left, right, acc)
    out_at = Out + tl.program_id(1).to(tl.int64) * o_g + m[:, None] * o_m + n[None, :] * o_n
    tl.store(out_at, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def _product(left, right, out, group):
    """out (groups, M, N) = left (batches, M, K) @ right (batches, K, N), added over `group` batches each."""
    batches, M, K = left.shape
    N = right.shape[2]
    BLOCK_M, BLOCK_N = _tile(M, 128), _tile(N, 128)
    _grouped_product[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), triton.cdiv(batches, group))](
        left, right, out, M, N, K, batches, group, *left.stride(), *right.stride(), *out.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(K, 128 // left.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip


def forward(x, weight):
    B, _, H, W = x.shape
    # A view for NCHW and channels-last alike; only a cropped image is copied.
    pixels = x.flatten(2)
    CO = weight.shape[0]
    # In the input's own order: channels last stays channels last.
    if pixels.stride(1) == 1:
        y = torch.empty(B, H * W, CO, device=x.device, dtype=x.dtype).transpose(1, 2)
    else:
        y = torch.empty(B, CO, H * W, device=x.device, dtype=x.dtype)
    _product(weight.expand(B, -1, -1), pixels, y, 1)
    return y.unflatten(2, (H, W)), (pixels, weight, H, W)


# --- backward ---
@triton.jit
def _split_product(
    L, R, Out, M, N, K, steps, each, o_b, o_m, o_n, SPLIT: tl.constexpr,
    TURN_L: tl.constexpr, TURN_R: tl.constexpr, ONE_L: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Out[p] (M, N) is L R of one image, or with SPLIT the sum over a run of steps through all images: K of the first,
    # K of the second and so on are one line. What lies the other way round in memory is turned as a tile.
    rows = tl.cdiv(M, BLOCK_M)
    m, n = tl.program_id(0) % rows * BLOCK_M, tl.program_id(0) // rows * BLOCK_N
    part = tl.program_id(1)
    chunks = tl.cdiv(K, BLOCK_K)
    first = part * each if SPLIT else part * chunks
    last = tl.minimum(first + each, steps) if SPLIT else first + chunks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        image, k = step // chunks, step % chunks * BLOCK_K
        at = 0 if ONE_L else image
        if TURN_L:
            left = tl.reshape(L.load([at, k, m]), (BLOCK_K, BLOCK_M)).T
        else:
            left = tl.reshape(L.load([at, m, k]), (BLOCK_M, BLOCK_K))
        if TURN_R:
            right = tl.reshape(R.load([image, n, k]), (BLOCK_N, BLOCK_K)).T
        else:
            right = tl.reshape(R.load([image, k, n]), (BLOCK_K, BLOCK_N))
        acc = tl.dot(left, right, acc)
    i, j = m.to(tl.int64) + tl.arange(0, BLOCK_M), n.to(tl.int64) + tl.arange(0, BLOCK_N)
    out_at = Out + part.to(tl.int64) * o_b + i[:, None] * o_m + j[None, :] * o_n
    tl.store(out_at, acc, mask=(i[:, None] < M) & (j[None, :] < N))


def _turned(batch):
    """Whether the matrices of a batch lie transposed in memory."""
    return batch.stride(1) == 1 and batch.stride(2) != 1


def _tiles(batch, rows, cols):
    """A descriptor of (rows, cols) tiles as they lie in memory, or of a copy where none can follow the strides."""
    block = [1, rows, cols]
    if _turned(batch):
        batch, block = batch.transpose(1, 2), [1, cols, rows]
    step, width = 16 // batch.element_size(), batch.shape[2]
    starts = (batch.stride(0), batch.stride(1), batch.storage_offset())
    if batch.stride(2) != 1 or batch.stride(1) < width or any(start % step for start in starts):
        dense = batch.new_empty(*batch.shape[:2], triton.cdiv(width, step) * step)[:, :, :width]
        dense.copy_(batch)
        batch = dense
    strides = [batch.stride(0) or batch.shape[1] * batch.stride(1), batch.stride(1), 1]
    return TensorDescriptor(batch, list(batch.shape), strides, block)


def _joined(pixels):
    """Images in channels-last order are one image with all their pixels in a row."""
    B, C, P = pixels.shape
    if pixels.stride(1) == 1 and pixels.stride(0) == P * pixels.stride(2):
        return pixels.transpose(1, 2).reshape(1, B * P, C).transpose(1, 2)
    return pixels


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    pixels, weight, H, W = saved
    need_x, need_w = needs or (True, True)
    CO, CI = weight.shape
    x, dy = _joined(pixels), _joined(grad_y.flatten(2))
    if x.shape[2] != dy.shape[2]:
        # One of the two keeps its images apart: so does the other.
        x, dy = pixels, grad_y.flatten(2)
    B, _, P = x.shape
    depth = 128 // x.element_size()
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(pixels)
        out = _joined(dx)
        if out.shape[2] != P:
            out = dx
        left = weight[None].transpose(1, 2)
        BM, BN, BK = min(128, _up(CI)), min(256, _up(P)), min(depth, _up(CO))
        _split_product[(triton.cdiv(CI, BM) * triton.cdiv(P, BN), B)](
            _tiles(left, BM, BK), _tiles(dy, BK, BN), out, CI, P, CO, 0, 0, *out.stride(), SPLIT=False,
            TURN_L=_turned(left), TURN_R=_turned(dy), ONE_L=True,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dx = dx.unflatten(2, (H, W))
    if need_w:
        right = x.transpose(1, 2)
        BM, BN, BK = min(128, _up(CO)), min(256, _up(CI)), min(depth, _up(P))
        # One wave on 132 processors.
        tiles = triton.cdiv(CO, BM) * triton.cdiv(CI, BN)
        steps = B * triton.cdiv(P, BK)
        each = triton.cdiv(steps, max(1, 132 // tiles))
        splits = triton.cdiv(steps, each)
        parts = torch.empty(splits, CO, CI, device=weight.device, dtype=torch.float32)
        _split_product[(tiles, splits)](
            _tiles(dy, BM, BK), _tiles(right, BK, BN), parts, CO, CI, P, steps, each, *parts.stride(), SPLIT=True,
            TURN_L=_turned(dy), TURN_R=_turned(right), ONE_L=False,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "CI": 16, "CO": 32, "H": 8, "W": 8, "channels_last": False},
    {"B": 5, "CI": 18, "CO": 21, "H": 9, "W": 11, "channels_last": True},
    {"B": 1, "CI": 32, "CO": 16, "H": 5, "W": 7, "channels_last": False, "dtype": "bfloat16"},
    {"B": 2, "CI": 16, "CO": 16, "H": 4, "W": 3, "channels_last": True, "dtype": "float16"},
)
BENCH = (
    {"B": 64, "CI": 512, "CO": 512, "H": 56, "W": 56, "channels_last": False, "dtype": "bfloat16"},
    {"B": 64, "CI": 256, "CO": 1024, "H": 56, "W": 56, "channels_last": True, "dtype": "bfloat16"},
)


def make_args(B, CI, CO, H, W, channels_last, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(B, CI, H, W, generator=g), torch.randn(CO, CI, generator=g) * CI**-0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format), weight


def reference(x, weight):
    return torch.nn.functional.conv2d(x, weight[:, :, None, None])
