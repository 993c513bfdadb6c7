"""Outer product mean over the sequences of an alignment: three products along a pair of axes that is never copied.

y[i, j, c, d] = sum over s of a[s, i, c] b[s, j, d] / n[i, j],    n[i, j] = eps + sum over s of m[s, i] m[s, j],
with a and b masked by m as they load. A program of the forward fixes i and takes a tile of pairs (j, d): its product is
(c, s) times (s, pairs), and n comes out of the same loop. Backward, with dY / n scaled as it loads:
    da[s, i, c] = m[s, i] sum over (j, d) of b[s, j, d] dY[i, j, c, d] / n[i, j],    db likewise over (i, c).
The pairs are one counted axis that is split into its two indices where an address is formed, so dY is read as it lies.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "outer_product_mean_msa",
    "family": "matmul",
    "op": "outer_product_mean",
    "schema": 1,
    "techniques": ("prologue-fusion", "masking", "saved-statistics", "owner-grid", "strided-cotangent"),
    "saves": ("norm: fp32 (L, L)",),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _opm_fwd(
    A, B, Mask, Y, Norm, S, L, eps, C: tl.constexpr, D: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = (r // D).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    pair = r < L * D
    y = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, S, BLOCK_S):
        s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        m_i = tl.load(Mask + s * L + i, mask=s < S, other=0.0)
        m_j = tl.load(Mask + s[:, None] * L + j[None, :], mask=(s[:, None] < S) & pair[None, :], other=0.0)
        a_at = A + (s[None, :] * L + i) * C + c[:, None]
        a = tl.load(a_at, mask=(s[None, :] < S) & (c[:, None] < C) & (m_i[None, :] != 0.0), other=0.0)
        b_at = B + s[:, None] * L * D + r[None, :]
        b = tl.load(b_at, mask=(s[:, None] < S) & pair[None, :] & (m_j != 0.0), other=0.0)
        y = tl.dot(a, b, y)
        norm += tl.sum(m_i[:, None] * m_j, 0)
    norm += eps
    out = Y + ((i * L + j)[None, :] * C + c[:, None]) * D + (r % D)[None, :]
    tl.store(out, y / norm[None, :], mask=(c[:, None] < C) & pair[None, :])
    tl.store(Norm + i * L + j, norm, mask=pair & (r % D == 0))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(a, b, mask, eps=1e-3):
    # The mask holds 0 or 1 for each sequence and residue; a and b have one row of features for each.
    a, b, mask = a.contiguous(), b.contiguous(), mask.contiguous()
    (S, L, C), D = a.shape, b.shape[2]
    if max(C, D) > 128:
        raise ValueError("the features of a residue must fit one tile: at most 128")
    y = torch.empty(L, L, C, D, device=a.device, dtype=a.dtype)
    norm = torch.empty(L, L, device=a.device, dtype=torch.float32)
    BR = _side(L * D)
    _opm_fwd[(triton.cdiv(L * D, BR), L)](
        a, b, mask, y, norm, S, L, eps, C=C, D=D,
        BLOCK_C=_side(C), BLOCK_R=BR, BLOCK_S=_side(S, 128 // a.element_size()), num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, (a, b, mask, norm)


# --- backward ---
@triton.jit
def _opm_bwd(
    DY, Other, Mask, Norm, DMine, S, L, dy_mine, dy_other, dy_f, dy_g, n_mine, n_other,
    F: tl.constexpr, G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # My residue is fixed; r counts the other's pairs (residue, feature g). Strides say which axes of dY are mine.
    mine = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    f = tl.arange(0, BLOCK_F)
    acc = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    for start in range(0, L * G, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        other = (r // G).to(tl.int64)
        pair = r < L * G
        m = tl.load(Mask + s[:, None] * L + other[None, :], mask=(s[:, None] < S) & pair[None, :], other=0.0)
        x_at = Other + s[:, None] * L * G + r[None, :]
        x = tl.load(x_at, mask=(s[:, None] < S) & pair[None, :] & (m != 0.0), other=0.0)
        scale = 1.0 / tl.load(Norm + mine * n_mine + other * n_other, mask=pair, other=1.0)
        dy_at = DY + mine * dy_mine + (other * dy_other + (r % G).to(tl.int64) * dy_g)[:, None] + f[None, :] * dy_f
        dy = tl.load(dy_at, mask=pair[:, None] & (f[None, :] < F), other=0.0).to(tl.float32)
        acc = tl.dot(x, (dy * scale[:, None]).to(x.dtype), acc)
    m = tl.load(Mask + s * L + mine, mask=s < S, other=0.0)
    out = DMine + (s[:, None] * L + mine) * F + f[None, :]
    tl.store(out, acc * m[:, None], mask=(s[:, None] < S) & (f[None, :] < F))


def backward(saved, grad_y, needs=(True, True)):
    a, b, mask, norm = saved
    (S, L, C), D = a.shape, b.shape[2]
    of_i, of_j, of_c, of_d = grad_y.stride()
    BS = _side(S)
    da = db = None
    if needs[0]:
        da = torch.empty_like(a)
        _opm_bwd[(triton.cdiv(S, BS), L)](
            grad_y, b, mask, norm, da, S, L, of_i, of_j, of_c, of_d, L, 1, F=C, G=D,
            BLOCK_S=BS, BLOCK_F=_side(C), BLOCK_R=_side(L * D, 64), num_warps=4, num_stages=2,
        )  # fmt: skip
    if needs[1]:
        db = torch.empty_like(b)
        _opm_bwd[(triton.cdiv(S, BS), L)](
            grad_y, a, mask, norm, db, S, L, of_j, of_i, of_d, of_c, 1, L, F=D, G=C,
            BLOCK_S=BS, BLOCK_F=_side(D), BLOCK_R=_side(L * C, 64), num_warps=4, num_stages=2,
        )  # fmt: skip
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
