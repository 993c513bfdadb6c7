"""Patch embedding: patches are rows of a product by an index map alone, and dx goes back through the same map.

Number (channel, i, j) of patch (image, row, column) lies at the patch's corner plus an offset that all patches share:
the address is a sum of one term for the product's row and one for its inner index, so tiles of the patch matrix are
loaded in place, and nothing is unfolded. Patches do not overlap: tiles of dy W are stored by the map into dx without
atomics. dweight splits the patches over programs, and those of the first tile of inner indices sum dy to dbias.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "patch_embed_linear",
    "family": "pool_vision",
    "op": "patch_embed",
    "schema": 1,
    "techniques": ("inverse-map", "split-k", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _patch_corner(m, DOWN, ACROSS, C, PATCH: tl.constexpr):
    """Where patch m = (image, row, column) of DOWN x ACROSS begins in the images."""
    row = m // ACROSS
    line = (row // DOWN * C * DOWN + row % DOWN) * PATCH
    return line.to(tl.int64) * ACROSS * PATCH + m % ACROSS * PATCH


@triton.jit
def _patch_offset(k, DOWN, ACROSS, PATCH: tl.constexpr):
    """Where number k = (channel, i, j) of a patch lies behind its corner."""
    line = k // PATCH
    return (line // PATCH * DOWN * PATCH + line % PATCH) * ACROSS * PATCH + k % PATCH


@triton.jit
def _patch_embed_fwd(
    X, Weight, Bias, Y, patches, DOWN, ACROSS, C, E, PATCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    K = C * PATCH * PATCH
    corner = X + _patch_corner(m, DOWN, ACROSS, C, PATCH)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = corner[:, None] + _patch_offset(k, DOWN, ACROSS, PATCH)[None, :]
        x = tl.load(x_at, mask=(m[:, None] < patches) & (k[None, :] < K), other=0.0)
        w = tl.load(Weight + n[None, :] * K + k[:, None], mask=(n[None, :] < E) & (k[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc)
    acc += tl.load(Bias + n, mask=n < E, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + m.to(tl.int64)[:, None] * E + n[None, :], acc, mask=(m[:, None] < patches) & (n[None, :] < E))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    B, C, H, W = x.shape
    E, _, _, PATCH = weight.shape
    down, across = H // PATCH, W // PATCH
    patches = B * down * across
    y = torch.empty(B, down * across, E, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = _tile(patches, 128), _tile(E, 128)
    _patch_embed_fwd[(triton.cdiv(patches, BLOCK_M), triton.cdiv(E, BLOCK_N))](
        x, weight, bias, y, patches, down, across, C, E, PATCH=PATCH, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_K=_tile(C * PATCH * PATCH, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, bias)


# --- backward ---
@triton.jit
def _patch_embed_dx(
    DY, Weight, DX, patches, DOWN, ACROSS, C, E, dy_m, dy_e, PATCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    K = C * PATCH * PATCH
    row = DY + m.to(tl.int64) * dy_m
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, E, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dy_at = row[:, None] + n.to(tl.int64)[None, :] * dy_e
        dy = tl.load(dy_at, mask=(m[:, None] < patches) & (n[None, :] < E), other=0.0)
        w = tl.load(Weight + n[:, None] * K + k[None, :], mask=(n[:, None] < E) & (k[None, :] < K), other=0.0)
        acc = tl.dot(dy, w, acc)
    x_at = _patch_corner(m, DOWN, ACROSS, C, PATCH)[:, None] + _patch_offset(k, DOWN, ACROSS, PATCH)[None, :]
    tl.store(DX + x_at, acc, mask=(m[:, None] < patches) & (k[None, :] < K))


@triton.jit
def _patch_embed_dparams(
    X, DY, WParts, BParts, patches, DOWN, ACROSS, C, E, dy_m, dy_e, patches_each, PATCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    split = tl.program_id(2)
    K = C * PATCH * PATCH
    offset = X + _patch_offset(k, DOWN, ACROSS, PATCH)
    last = tl.minimum((split + 1) * patches_each, patches)
    dweight = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * patches_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dy_at = DY + m.to(tl.int64)[None, :] * dy_m + n.to(tl.int64)[:, None] * dy_e
        dy = tl.load(dy_at, mask=(m[None, :] < last) & (n[:, None] < E), other=0.0)
        x_at = _patch_corner(m, DOWN, ACROSS, C, PATCH)[:, None] + offset[None, :]
        x = tl.load(x_at, mask=(m[:, None] < last) & (k[None, :] < K), other=0.0)
        dweight = tl.dot(dy, x, dweight)
        if tl.program_id(1) == 0:
            dbias += tl.sum(dy.to(tl.float32), 1)
    w_at = WParts + (split * E + n[:, None]).to(tl.int64) * K + k[None, :]
    tl.store(w_at, dweight, mask=(n[:, None] < E) & (k[None, :] < K))
    tl.store(BParts + split * E + n, dbias, mask=(n < E) & (tl.program_id(1) == 0))


def backward(saved, grad_y, needs=None):
    x, weight, bias = saved
    need_x, need_w, need_b = needs or (True, True, True)
    B, C, H, W = x.shape
    E, _, _, PATCH = weight.shape
    down, across = H // PATCH, W // PATCH
    patches, K = B * down * across, C * PATCH * PATCH
    # Patches of dy in one axis: a view, unless the cotangent's axes lie askew.
    grad_y = grad_y.flatten(0, 1)
    inner = 128 // x.element_size()
    dx = dweight = dbias = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_M, BLOCK_K = _tile(patches, 128), _tile(K, 128)
        _patch_embed_dx[(triton.cdiv(patches, BLOCK_M), triton.cdiv(K, BLOCK_K))](
            grad_y, weight, dx, patches, down, across, C, E, *grad_y.stride(), PATCH=PATCH,
            BLOCK_M=BLOCK_M, BLOCK_N=_tile(E, inner), BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_w or need_b:
        BLOCK_N, BLOCK_K, BLOCK_M = _tile(E, 128), _tile(K, 128), _tile(patches, inner)
        # Two programs for each of 132 processors, but splits of at least eight tiles of patches.
        tiles = triton.cdiv(E, BLOCK_N) * triton.cdiv(K, BLOCK_K)
        splits = max(1, min(patches // (8 * BLOCK_M), 264 // tiles))
        patches_each = triton.cdiv(triton.cdiv(patches, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(patches, patches_each)
        w_parts = torch.empty(splits, *weight.shape, device=x.device, dtype=torch.float32)
        b_parts = torch.empty(splits, E, device=x.device, dtype=torch.float32)
        _patch_embed_dparams[(triton.cdiv(E, BLOCK_N), triton.cdiv(K, BLOCK_K), splits)](
            x, grad_y, w_parts, b_parts, patches, down, across, C, E, *grad_y.stride(), patches_each, PATCH=PATCH,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
        dweight, dbias = w_parts.sum(0).to(weight.dtype), b_parts.sum(0).to(bias.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"B": 2, "C": 3, "DOWN": 4, "ACROSS": 8, "PATCH": 4, "E": 32},
    {"B": 3, "C": 2, "DOWN": 5, "ACROSS": 9, "PATCH": 3, "E": 21},
    {"B": 1, "C": 3, "DOWN": 2, "ACROSS": 9, "PATCH": 7, "E": 16, "dtype": "bfloat16"},
    {"B": 2, "C": 1, "DOWN": 3, "ACROSS": 1, "PATCH": 8, "E": 24, "dtype": "float16"},
    {"B": 2, "C": 1, "DOWN": 18, "ACROSS": 17, "PATCH": 2, "E": 20},  # two splits of patches
)
BENCH = ({"B": 256, "C": 3, "DOWN": 14, "ACROSS": 14, "PATCH": 16, "E": 768, "dtype": "bfloat16"},)


def make_args(B, C, DOWN, ACROSS, PATCH, E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(B, C, DOWN * PATCH, ACROSS * PATCH, generator=g), torch.randn(E, generator=g)
    weight = torch.randn(E, C, PATCH, PATCH, generator=g) * (C * PATCH * PATCH) ** -0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias):
    return torch.nn.functional.conv2d(x, weight, bias, stride=weight.shape[3]).flatten(2).transpose(1, 2)
