"""Monarch product: block-diagonal, permutation, block-diagonal; the permutation is an address of the first's store.

    u[m, l, k] = sum over q of x[m, k, q] right[k, l, q],    y[m, l, s] = sum over k of u[m, l, k] left[l, s, k],
    du[m, k, l] = sum over s of dy[m, l, s] left[l, s, k],   dx[m, k, q] = sum over l of du[m, k, l] right[k, l, q].
Both halves of the chain are one pattern: a product by blocks that is stored with its two feature axes swapped, then one
that is stored as it is. The swapping kernel multiplies as many neighbouring blocks at once, as a batched product, as
fill a memory sector with the swapped tile's rows. u is recomputed, dleft and dright take splits of the rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "monarch_blocks",
    "family": "low_rank",
    "op": "monarch_linear",
    "schema": 1,
    "techniques": ("recompute", "inverse-map", "split-k", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "right", "left"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _blocks_swapped(
    IN, W, OUT, M, G, C, K, in_m, in_g, in_k, w_g, w_c, w_k,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT[m, c, g] = sum over k of IN[m, g, k] W[g, c, k] for GROUP neighbouring blocks g, stored side by side.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    rows_ok = (g[:, None, None] < G) & (m[None, :, None] < M)
    columns_ok = (g[:, None, None] < G) & (c[None, None, :] < C)
    rows = IN + m[None, :, None] * in_m + g.to(tl.int64)[:, None, None] * in_g
    columns = W + g.to(tl.int64)[:, None, None] * w_g + c[None, None, :] * w_c
    acc = tl.zeros((GROUP, BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = (start + k).to(tl.int64)
        a = tl.load(rows + kk[None, None, :] * in_k, mask=rows_ok & (kk[None, None, :] < K), other=0.0)
        b = tl.load(columns + kk[None, :, None] * w_k, mask=columns_ok & (kk[None, :, None] < K), other=0.0)
        acc = tl.dot(a, b, acc)
    tile = tl.permute(acc.to(OUT.dtype.element_ty), (1, 2, 0))
    at = OUT + (m[:, None, None] * C + c[None, :, None]) * G + g[None, None, :]
    tl.store(at, tile, mask=(m[:, None, None] < M) & (c[None, :, None] < C) & (g[None, None, :] < G))


@triton.jit
def _blocks_straight(
    IN, W, OUT, M, G, C, K, w_g, w_c, w_k, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):
    # OUT[m, g, c] = sum over k of IN[m, g, k] W[g, c, k], one block for each program.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        a_at = IN + (m[:, None] * G + g) * K + kk[None, :]
        a = tl.load(a_at, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        b_at = W + g * w_g + kk[:, None] * w_k + c[None, :] * w_c
        b = tl.load(b_at, mask=(kk[:, None] < K) & (c[None, :] < C), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(OUT + (m[:, None] * G + g) * C + c[None, :], acc, mask=(m[:, None] < M) & (c[None, :] < C))


def _side(size, most=64):
    return max(16, min(most, triton.next_power_of_2(size)))


def _swapped(source, weight, out):
    """out (M, C, G) from source (M, G, K) and weight (G, C, K), both of any strides."""
    M, G, K = source.shape
    C = weight.shape[1]
    # A sector of 32 bytes holds 16 or 8 numbers.
    group = min(32 // source.element_size(), triton.next_power_of_2(G))
    BLOCK_C = _side(C)
    _blocks_swapped[(triton.cdiv(M, 16), triton.cdiv(G, group), triton.cdiv(C, BLOCK_C))](
        source, weight, out, M, G, C, K, *source.stride(), *weight.stride(),
        GROUP=group, BLOCK_M=16, BLOCK_C=BLOCK_C, BLOCK_K=_side(K, 32), num_warps=8, num_stages=2,
    )  # fmt: skip


def _straight(source, weight, out):
    """out (M, G, C) from contiguous source (M, G, K) and weight (G, C, K) of any strides."""
    M, G, K = source.shape
    C = weight.shape[1]
    BLOCK_M, BLOCK_C = _side(M, 128), _side(C)
    _blocks_straight[(triton.cdiv(M, BLOCK_M), G, triton.cdiv(C, BLOCK_C))](
        source, weight, out, M, G, C, K, *weight.stride(),
        BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, BLOCK_K=_side(K), num_warps=4, num_stages=2,
    )  # fmt: skip


def forward(x, right, left):
    # x (M, P Q), right (P, L, Q), left (L, S, P), y (M, L S).
    x = x.contiguous()
    M, (P, L, Q), S = x.shape[0], right.shape, left.shape[1]
    u = torch.empty(M, L, P, device=x.device, dtype=x.dtype)
    y = torch.empty(M, L, S, device=x.device, dtype=x.dtype)
    _swapped(x.view(M, P, Q), right, u)
    _straight(u, left, y)
    return y.view(M, L * S), (x, right, left)


# --- backward ---
@triton.jit
def _block_weights(
    A, B, Parts, M, G, C, K, rows_each, a_m, a_g, a_c, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Parts[split, g, c, k] = sum over the split's rows of A[m, g, c] B[m, g, k].
    g = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    c = (tl.program_id(2) // tiles_k) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = (tl.program_id(2) % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    last = tl.minimum((split + 1) * rows_each, M)
    acc = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        a_at = A + m[None, :] * a_m + g.to(tl.int64) * a_g + c[:, None].to(tl.int64) * a_c
        a = tl.load(a_at, mask=(m[None, :] < last) & (c[:, None] < C), other=0.0)
        b = tl.load(B + (m[:, None] * G + g) * K + k[None, :], mask=(m[:, None] < last) & (k[None, :] < K), other=0.0)
        acc = tl.dot(a, b, acc)
    at = Parts + ((split * G + g) * C + c[:, None]) * K + k[None, :]
    tl.store(at, acc, mask=(c[:, None] < C) & (k[None, :] < K))


def _weights(outer, inner):
    """Gradient (G, C, K) of a block weight from the cotangent (M, G, C) and the contiguous input (M, G, K)."""
    M, G, C = outer.shape
    K = inner.shape[2]
    BLOCK_C, BLOCK_K = _side(C), _side(K)
    tiles = triton.cdiv(C, BLOCK_C) * triton.cdiv(K, BLOCK_K)
    # About four waves of 132 processors, and a few tiles of rows for each split.
    splits = max(1, min(528 // (G * tiles), triton.cdiv(M, 256)))
    rows_each = triton.cdiv(triton.cdiv(M, splits), 64) * 64
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, G, C, K, device=outer.device, dtype=torch.float32)
    _block_weights[(G, splits, tiles)](
        outer, inner, parts, M, G, C, K, rows_each, *outer.stride(),
        BLOCK_M=64, BLOCK_C=BLOCK_C, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).to(inner.dtype)


def backward(saved, grad_y, needs=(True, True, True)):
    x, right, left = saved
    M, (P, L, Q), S = x.shape[0], right.shape, left.shape[1]
    dy = grad_y.unflatten(1, (L, S))
    dx = dright = dleft = None
    if needs[2]:
        u = torch.empty(M, L, P, device=x.device, dtype=x.dtype)
        _swapped(x.view(M, P, Q), right, u)
        dleft = _weights(dy, u)
    if needs[0] or needs[1]:
        # The transposed blocks are views: left seen as (L, P, S) leads to du, right as (P, Q, L) to dx.
        du = torch.empty(M, P, L, device=x.device, dtype=x.dtype)
        _swapped(dy, left.transpose(1, 2), du)
    if needs[0]:
        dx = torch.empty_like(x)
        _straight(du, right.transpose(1, 2), dx)
    if needs[1]:
        dright = _weights(du, x.view(M, P, Q))
    return dx, dright, dleft


# --- check ---
SWEEP = (
    {"M": 32, "P": 16, "Q": 16, "L": 16, "S": 16},
    {"M": 37, "P": 11, "Q": 19, "L": 13, "S": 21, "dtype": "float16"},
    {"M": 20, "P": 8, "Q": 24, "L": 16, "S": 32, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "P": 64, "Q": 64, "L": 64, "S": 64, "dtype": "bfloat16"},)


def make_args(M, P, Q, L, S, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, P * Q, generator=g),
        torch.randn(P, L, Q, generator=g) * Q**-0.5,
        torch.randn(L, S, P, generator=g) * P**-0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, right, left):
    P, _, Q = right.shape
    u = torch.einsum("mkq,klq->mlk", x.view(-1, P, Q), right)
    return torch.einsum("mlk,lsk->mls", u, left).flatten(1)
