"""SwiGLU MLP with LoRA on its three frozen projections: two wide buffers serve the whole backward.

    e = lora(x; gate), u = lora(x; up), h = silu(e) * u, y = lora(h; down),    lora(x) = x W^T + s (x A^T) B^T

Saved are e, u and the thin x A^T, not h. dh is a product into the first wide buffer; one elementwise launch then writes
de over dh and du into the second. h is needed once more, for dA of the down projection: that product recomputes it from
e and u while it loads its tiles, so h never takes memory in the backward.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "lora_mlp_swiglu",
    "family": "low_rank",
    "op": "lora_mlp",
    "schema": 1,
    "techniques": ("partial-gradient", "in-place", "recompute", "prologue-fusion", "split-k", "two-stage-partials"),
    "saves": (
        "e: fp32 or bf16 or fp16 (M, F)",
        "u: fp32 or bf16 or fp16 (M, F)",
        "low_g: fp32 or bf16 or fp16 (M, R)",
        "low_u: fp32 or bf16 or fp16 (M, R)",
        "low_d: fp32 or bf16 or fp16 (M, R)",
    ),
    "grads": ("x", "a_g", "b_g", "a_u", "b_u", "a_d", "b_d"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _thin(
    L, R, OUT, M, K, RANK, scale, l_m, l_k, r_k, r_r,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # OUT (M, RANK) = scale * L (M, K) R (K, RANK).
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(L + m[:, None] * l_m + k[None, :] * l_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(R + k[:, None] * r_k + r[None, :] * r_r, mask=(k[:, None] < K) & (r[None, :] < RANK), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(OUT + m[:, None] * RANK + r[None, :], acc * scale, mask=(m[:, None] < M) & (r[None, :] < RANK))


@triton.jit
def _wide_step(
    acc, L, W, Low, V, m, n, M, N, K, RANK, l_m, l_k, w_k, w_n, v_r, v_n, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):
    """acc + L W + Low V on the tile (m, n): the frozen product, and the thin one as a slice of the summed axis."""
    r = tl.arange(0, BLOCK_R)
    low = tl.load(Low + m[:, None] * RANK + r[None, :], mask=(m[:, None] < M) & (r[None, :] < RANK), other=0.0)
    v = tl.load(V + r[:, None] * v_r + n[None, :] * v_n, mask=(r[:, None] < RANK) & (n[None, :] < N), other=0.0)
    acc = tl.dot(low, v, acc)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(L + m[:, None] * l_m + k[None, :] * l_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None] * w_k + n[None, :] * w_n, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, w, acc)
    return acc


@triton.jit
def _wide(
    L, W, Low, V, L2, W2, Low2, V2, OUT, M, N, K, RANK, l_m, l_k, w_k, w_n, v_r, v_n, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = _wide_step(acc, L, W, Low, V, m, n, M, N, K, RANK, l_m, l_k, w_k, w_n, v_r, v_n, BLOCK_K, BLOCK_R)
    if PAIRS == 2:
        # A second pair of the same layout: dx is the sum over gate and up.
        acc = _wide_step(acc, L2, W2, Low2, V2, m, n, M, N, K, RANK, l_m, l_k, w_k, w_n, v_r, v_n, BLOCK_K, BLOCK_R)
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _swiglu(E, U, H, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(E + i, mask=i < size, other=0.0).to(tl.float32)
    u = tl.load(U + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(H + i, e * tl.sigmoid(e) * u, mask=i < size)


def _rank_block(rank):
    return max(16, triton.next_power_of_2(rank))


def _thin_product(left, right, scale=1.0):
    """scale * left @ right, (M, K) by (K, R), both of any strides."""
    M, K = left.shape
    R = right.shape[1]
    out = torch.empty(M, R, device=left.device, dtype=right.dtype)
    # Few rows for each program: a thin product has nothing else to fill a device with.
    BLOCK_M = max(16, min(64, triton.next_power_of_2(M) // 256))
    _thin[(triton.cdiv(M, BLOCK_M),)](
        left, right, out, M, K, R, scale, *left.stride(), *right.stride(),
        BLOCK_M=BLOCK_M, BLOCK_K=256 // right.element_size(), BLOCK_R=_rank_block(R),
        num_warps=max(2, BLOCK_M // 16), num_stages=4,
    )  # fmt: skip
    return out


def _wide_product(out, *terms):
    """out = sum over one or two terms (left, weight, low, v) of left @ weight + low @ v."""
    left, weight, low, v = terms[0]
    (M, K), N, R = left.shape, weight.shape[1], low.shape[1]
    _wide[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
        *terms[0], *terms[-1], out, M, N, K, R, *left.stride(), *weight.stride(), *v.stride(), PAIRS=len(terms),
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // out.element_size(), BLOCK_R=_rank_block(R), num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d, scale):
    x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d = (
        t.contiguous() for t in (x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d)
    )
    M, F = x.shape[0], w_g.shape[0]
    low_g, low_u = _thin_product(x, a_g.t(), scale), _thin_product(x, a_u.t(), scale)
    e, u, h = (torch.empty(M, F, device=x.device, dtype=x.dtype) for _ in range(3))
    _wide_product(e, (x, w_g.t(), low_g, b_g.t()))
    _wide_product(u, (x, w_u.t(), low_u, b_u.t()))
    _swiglu[(triton.cdiv(M * F, 2048),)](e, u, h, M * F, BLOCK=2048, num_warps=8)
    low_d = _thin_product(h, a_d.t(), scale)
    y = torch.empty(M, w_d.shape[0], device=x.device, dtype=x.dtype)
    _wide_product(y, (h, w_d.t(), low_d, b_d.t()))
    return y, (x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d, e, u, low_g, low_u, low_d, scale)


# --- backward ---
@triton.jit
def _grad_step(
    acc, DY, W, Low, V, row, col, M, N, K, RANK,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc + DY W + Low V on the tile that starts at (row, col)."""
    m, n = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    low = tl.load(Low + m[:, None] * RANK + r[None, :], mask=(m[:, None] < M) & (r[None, :] < RANK), other=0.0)
    v = tl.load(V + r[:, None] * N + n[None, :], mask=(r[:, None] < RANK) & (n[None, :] < N), other=0.0)
    acc = tl.dot(low, v, acc)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(DY.load([row, k]), W.load([k, col]), acc)
    return acc


@triton.jit
def _wide_grad(
    DY, W, Low, V, DY2, W2, Low2, V2, OUT, M, N, K, RANK, out_m, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    row, col = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = _grad_step(acc, DY, W, Low, V, row, col, M, N, K, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)
    if PAIRS == 2:
        # A second pair of the same layout: dx is the sum over gate and up.
        acc = _grad_step(acc, DY2, W2, Low2, V2, row, col, M, N, K, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)
    m, n = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    tl.store(OUT + m[:, None] * out_m + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _swiglu_bwd_in_place(E, U, DH, DU, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(E + i, mask=i < size, other=0.0).to(tl.float32)
    u = tl.load(U + i, mask=i < size, other=0.0).to(tl.float32)
    dh = tl.load(DH + i, mask=i < size, other=0.0).to(tl.float32)
    s = tl.sigmoid(e)
    tl.store(DU + i, dh * e * s, mask=i < size)
    # dh has been read by the only program that needs it: its place takes de.
    tl.store(DH + i, dh * u * s * (1.0 + e * (1.0 - s)), mask=i < size)


@triton.jit
def _thin_grad(
    WIDE, UP, Low, Parts, M, C, RANK, wide_m, wide_c, p_c, p_r, rows_each, SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # WIDE^T Low over the rows of one split; with SWIGLU the wide operand is silu(WIDE) * UP, made on the way in.
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    last = tl.minimum((split + 1) * rows_each, M)
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        ok = (c[:, None] < C) & (m[None, :] < last)
        at = c[:, None] * wide_c + m[None, :] * wide_m
        wide = tl.load(WIDE + at, mask=ok, other=0.0)
        if SWIGLU:
            e = wide.to(tl.float32)
            up = tl.load(UP + at, mask=ok, other=0.0).to(tl.float32)
            wide = (e * tl.sigmoid(e) * up).to(wide.dtype)
        low = tl.load(Low + m[:, None] * RANK + r[None, :], mask=(m[:, None] < last) & (r[None, :] < RANK), other=0.0)
        acc = tl.dot(wide, low, acc)
    out = Parts + split * C * RANK + c[:, None] * p_c + r[None, :] * p_r
    tl.store(out, acc, mask=(c[:, None] < C) & (r[None, :] < RANK))


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) != 1 or matrix.stride(0) % step or matrix.stride(0) < width or matrix.storage_offset() % step:
        dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def _wide_gradient(out, *terms):
    """out = sum over one or two terms (dy, weight, low, v) of dy @ weight + low @ v."""
    (M, N), K, R = out.shape, terms[0][0].shape[1], terms[0][2].shape[1]
    BM, BN, BK = min(128, _up(M)), min(256, _up(N)), min(128 // out.element_size(), _up(K))
    terms = [(_tiles(dy, BM, BK), _tiles(weight, BK, BN), low, v) for dy, weight, low, v in terms]
    _wide_grad[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        *terms[0], *terms[-1], out, M, N, K, R, out.stride(0), PAIRS=len(terms),
        GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, BLOCK_R=_rank_block(R), num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def _thin_gradient(wide, low, like, transposed=False, up=None):
    """wide^T low (C, R) for a B, or its transpose (R, C) for an A, in the dtype of `like`."""
    M, C = wide.shape
    R = low.shape[1]
    tiles = triton.cdiv(C, 64)
    rows_each = triton.cdiv(triton.cdiv(M, max(1, 528 // tiles)), 64) * 64
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, *like.shape, device=like.device, dtype=torch.float32)
    strides = (1, C) if transposed else (R, 1)
    _thin_grad[(tiles, splits)](
        wide, up, low, parts, M, C, R, *wide.stride(), *strides, rows_each, SWIGLU=up is not None,
        BLOCK_M=64, BLOCK_C=64, BLOCK_R=_rank_block(R), num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).to(like.dtype)


def backward(saved, grad_y, needs=None):
    x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d, e, u, low_g, low_u, low_d, scale = saved
    # Every tile of dy is read by many programs of three products.
    grad_y = grad_y.contiguous()
    dlow_d = _thin_product(grad_y, b_d, scale)
    db_d = _thin_gradient(grad_y, low_d, b_d)
    da_d = _thin_gradient(e, dlow_d, a_d, transposed=True, up=u)
    # `de` holds dh first.
    de, du = torch.empty_like(e), torch.empty_like(u)
    _wide_gradient(de, (grad_y, w_d, dlow_d, a_d))
    _swiglu_bwd_in_place[(triton.cdiv(e.numel(), 2048),)](e, u, de, du, e.numel(), BLOCK=2048, num_warps=8)
    dlow_g, dlow_u = _thin_product(de, b_g, scale), _thin_product(du, b_u, scale)
    db_g, db_u = _thin_gradient(de, low_g, b_g), _thin_gradient(du, low_u, b_u)
    da_g, da_u = _thin_gradient(x, dlow_g, a_g, transposed=True), _thin_gradient(x, dlow_u, a_u, transposed=True)
    dx = None
    if needs is None or needs[0]:
        dx = _wide_gradient(torch.empty_like(x), (de, w_g, dlow_g, a_g), (du, w_u, dlow_u, a_u))
    return dx, da_g, db_g, da_u, db_u, da_d, db_d


# --- check ---
SWEEP = (
    {"M": 64, "K": 32, "F": 48, "R": 16},
    {"M": 71, "K": 37, "F": 45, "R": 5, "dtype": "float16"},
    {"M": 48, "K": 40, "F": 24, "R": 8, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "K": 4096, "F": 11008, "R": 16, "dtype": "bfloat16"},)


def make_args(M, K, F, R, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = ((F, K), (F, K), (K, F))
    weights = [torch.randn(out, inner, generator=g) * inner**-0.5 for out, inner in sizes]
    factors = []
    for out, inner in sizes:
        factors += [torch.randn(R, inner, generator=g) * inner**-0.5, torch.randn(out, R, generator=g) * R**-0.5]
    tensors = (torch.randn(M, K, generator=g), *weights, *factors)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.5)


def reference(x, w_g, w_u, w_d, a_g, b_g, a_u, b_u, a_d, b_d, scale):
    def lora(t, w, a, b):
        return t @ w.t() + scale * ((t @ a.t()) @ b.t())

    e, u = lora(x, w_g, a_g, b_g), lora(x, w_u, a_u, b_u)
    h = (torch.nn.functional.silu(e.float()) * u.float()).to(x.dtype)
    return lora(h, w_d, a_d, b_d)
