"""Outer product mean over the sequences of an alignment: pairs of axes are made one, so that plain products remain.

y[i, j, c, d] = sum over s of a[s, i, c] b[s, j, d] / n[i, j],    n[i, j] = eps + sum over s of m[s, i] m[s, j],
with a and b masked by m. With p = (i, c) and q = (j, d) counted as one axis each, both are matrices as they lie, and y
is A^T B, written through the two indices of p and q. Backward: one pass divides dY by n and brings it into the order
Z[p, q]; then da = m (B Z^T) and db = m (A Z). That pass costs less than scaling dY in the loops of both products, where
every tile of it would go through registers instead of straight to shared memory, once per tile of sequences.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "outer_product_mean_msa",
    "family": "matmul",
    "op": "outer_product_mean",
    "schema": 1,
    "techniques": ("masking", "saved-statistics", "owner-grid", "recompute", "strided-cotangent"),
    "saves": ("norm: fp32 (L, L)",),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "336 bytes: on an H200 4 warps that spill take 383 us, 8 warps that do not 412 us",
}


# --- forward ---
@triton.jit
def _mask_features(X, Mask, Out, size, F: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(Mask + at // F, mask=at < size, other=0.0)
    x = tl.load(X + at, mask=at < size, other=0.0)
    # Selected, not multiplied: a gap in the alignment may hold anything.
    tl.store(Out + at, tl.where(m != 0.0, x, 0.0), mask=at < size)


@triton.jit
def _pair_counts(Mask, Norm, S, L, eps, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    j = tl.program_id(1).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    count = tl.zeros((BLOCK_L, BLOCK_L), tl.float32)
    for start in range(0, S, BLOCK_S):
        s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        m_i = tl.load(Mask + s[None, :] * L + i[:, None], mask=(s[None, :] < S) & (i[:, None] < L), other=0.0)
        m_j = tl.load(Mask + s[:, None] * L + j[None, :], mask=(s[:, None] < S) & (j[None, :] < L), other=0.0)
        count = tl.dot(m_i, m_j, count, input_precision="ieee")
    tl.store(Norm + i[:, None] * L + j[None, :], count + eps, mask=(i[:, None] < L) & (j[None, :] < L))


@triton.jit
def _opm_fwd(
    A, B, Norm, Y, S, L, C: tl.constexpr, D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(1).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    y = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for start in range(0, S, BLOCK_S):
        s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        a = tl.load(A + s[None, :] * L * C + p[:, None], mask=(s[None, :] < S) & (p[:, None] < L * C), other=0.0)
        b = tl.load(B + s[:, None] * L * D + q[None, :], mask=(s[:, None] < S) & (q[None, :] < L * D), other=0.0)
        y = tl.dot(a, b, y)
    inside = (p[:, None] < L * C) & (q[None, :] < L * D)
    pair = (p // C)[:, None] * L + (q // D)[None, :]
    norm = tl.load(Norm + pair, mask=inside, other=1.0)
    tl.store(Y + (pair * C + (p % C)[:, None]) * D + (q % D)[None, :], y / norm, mask=inside)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _masked(features, mask):
    out = torch.empty_like(features)
    size = features.numel()
    _mask_features[(triton.cdiv(size, 1024),)](features, mask, out, size, F=features.shape[2], BLOCK=1024)
    return out


def forward(a, b, mask, eps=1e-3):
    # The mask holds 0 or 1 for each sequence and residue; a and b have one row of features for each.
    a, b, mask = a.contiguous(), b.contiguous(), mask.contiguous()
    (S, L, C), D = a.shape, b.shape[2]
    if max(C, D) > 128:
        raise ValueError("the features of a residue must fit one tile: at most 128")
    y = torch.empty(L, L, C, D, device=a.device, dtype=a.dtype)
    norm = torch.empty(L, L, device=a.device, dtype=torch.float32)
    BL = _side(L, 32)
    _pair_counts[(triton.cdiv(L, BL), triton.cdiv(L, BL))](
        mask, norm, S, L, eps, BLOCK_L=BL, BLOCK_S=_side(S, 32), num_warps=4
    )
    BP, BQ = _side(L * C), _side(L * D)
    _opm_fwd[(triton.cdiv(L * D, BQ), triton.cdiv(L * C, BP))](
        _masked(a, mask), _masked(b, mask), norm, y, S, L, C=C, D=D,
        BLOCK_P=BP, BLOCK_Q=BQ, BLOCK_S=_side(S, 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b, mask, norm)


# --- backward ---
@triton.jit
def _matrix_order(
    DY, Norm, Z, L, of_i, of_j, of_c, of_d,
    C: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    # Z[(i, c), (j, d)] = dY[i, j, c, d] / n[i, j]: all features c of one residue i, a tile of pairs q.
    i = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None]
    inside = (c < C) & (q[None, :] < L * D)
    norm = tl.load(Norm + i * L + q // D, mask=q < L * D, other=1.0)
    dy_at = DY + i * of_i + c * of_c + ((q // D) * of_j + (q % D) * of_d)[None, :]
    dy = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Z + (i * C + c) * L * D + q[None, :], dy / norm[None, :], mask=inside)


@triton.jit
def _opm_bwd(
    X, Z, Mask, DMine, S, L, WIDE, z_mine, z_other, F: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    # p counts my pairs (residue, feature), q those of the other operand X, of which there are WIDE.
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    p = tl.program_id(1).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    acc = tl.zeros((BLOCK_S, BLOCK_P), tl.float32)
    for start in range(0, WIDE, BLOCK_Q):
        q = (start + tl.arange(0, BLOCK_Q)).to(tl.int64)
        x = tl.load(X + s[:, None] * WIDE + q[None, :], mask=(s[:, None] < S) & (q[None, :] < WIDE), other=0.0)
        z_at = Z + q[:, None] * z_other + p[None, :] * z_mine
        z = tl.load(z_at, mask=(q[:, None] < WIDE) & (p[None, :] < L * F), other=0.0)
        acc = tl.dot(x, z, acc)
    inside = (s[:, None] < S) & (p[None, :] < L * F)
    m = tl.load(Mask + s[:, None] * L + (p // F)[None, :], mask=inside, other=0.0)
    tl.store(DMine + s[:, None] * L * F + p[None, :], tl.where(m != 0.0, acc, 0.0), mask=inside)


def _gradient(other, z, mask, like, z_mine, z_other):
    S, L, F = like.shape
    grad = torch.empty_like(like)
    wide = other.shape[1] * other.shape[2]
    BS, BP = _side(S), _side(L * F)
    # Tiles of sequences are the fast axis: they share their tiles of Z.
    _opm_bwd[(triton.cdiv(S, BS), triton.cdiv(L * F, BP))](
        other, z, mask, grad, S, L, wide, z_mine, z_other, F=F,
        BLOCK_S=BS, BLOCK_P=BP, BLOCK_Q=_side(wide, 128 // like.element_size()), num_warps=4, num_stages=3,
    )  # fmt: skip
    return grad


def backward(saved, grad_y, needs=(True, True)):
    a, b, mask, norm = saved
    (_, L, C), D = a.shape, b.shape[2]
    z = torch.empty(L * C, L * D, device=a.device, dtype=a.dtype)
    BQ = _side(L * D)
    _matrix_order[(triton.cdiv(L * D, BQ), L)](
        grad_y, norm, z, L, *grad_y.stride(), C=C, D=D, BLOCK_C=triton.next_power_of_2(C), BLOCK_Q=BQ, num_warps=4
    )
    da = _gradient(_masked(b, mask), z, mask, a, L * D, 1) if needs[0] else None
    db = _gradient(_masked(a, mask), z, mask, b, 1, L * D) if needs[1] else None
    return da, db


# --- check ---
SWEEP = (
    {"S": 16, "L": 8, "C": 16, "D": 16},
    {"S": 37, "L": 9, "C": 10, "D": 7},
    {"S": 20, "L": 6, "C": 8, "D": 12, "dtype": "bfloat16"},
    {"S": 30, "L": 5, "C": 4, "D": 20, "dtype": "float16"},
)
BENCH = ({"S": 512, "L": 256, "C": 32, "D": 32, "dtype": "bfloat16"},)


def make_args(S, L, C, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(S, L, C, generator=g), torch.randn(S, L, D, generator=g)
    mask = (torch.rand(S, L, generator=g) < 0.8).float()
    # The first sequence is the query, which has every residue.
    mask[0] = 1.0
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b)), mask.to(device)


def reference(a, b, mask, eps=1e-3):
    y = torch.einsum("sic,sjd->ijcd", a * mask[..., None].to(a.dtype), b * mask[..., None].to(b.dtype))
    return (y.float() / (mask.T @ mask + eps)[..., None, None]).to(a.dtype)
