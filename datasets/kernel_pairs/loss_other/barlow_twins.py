"""Barlow Twins: correlation of two normalised views, with the norm's backward closed in a product's epilogue.

u, v are z1, z2 with zero mean and unit variance per column, c = u^T v / N:
    L = sum of (1 - c[i, i])^2 + off sum over i != j of c[i, j]^2,    G = dL/dc,    du = v G^T / N.
Normalisation takes the mean of du and its projection on u off du. Here both are known beforehand: v has zero mean,
hence so has du, and sum over n of u du is R[i] = sum over j of G[i, j] c[i, j], which the forward adds up while it
holds c. So    dz1 = rstd (du - u R / N),    straight from the accumulator, without another pass. The same for z2 with
G turned. Views are normalised as they load, in the backward by a pass before each product.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "barlow_twins",
    "family": "loss_other",
    "op": "barlow_twins",
    "schema": 1,
    "techniques": (
        "closed-form",
        "epilogue-fusion",
        "saved-statistics",
        "owner-grid",
        "grad-in-forward",
    ),
    "saves": ("grad_c: fp32 or bf16 or fp16 (D, D)", "stats: fp32 (4, D)", "projections: fp32 (2, D)"),
    "grads": ("z1", "z2"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_stats(Z, Mean, Rstd, N, D, eps, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = (n[:, None] < N) & (d[None, :] < D)
        total += tl.load(Z + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / N
    square = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = (n[:, None] < N) & (d[None, :] < D)
        z = tl.load(Z + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        gap = tl.where(inside, z - mean[None, :], 0.0)
        square += gap * gap
    tl.store(Mean + d, mean, mask=d < D)
    tl.store(Rstd + d, tl.rsqrt(tl.sum(square, 0) / N + eps), mask=d < D)


@triton.jit
def _correlation(Z1, Z2, Stats, GradC, Loss, Rows, Cols, N, D, off, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean_i = tl.load(Stats + i, mask=i < D, other=0.0)
    rstd_i = tl.load(Stats + D + i, mask=i < D, other=0.0)
    mean_j = tl.load(Stats + 2 * D + j, mask=j < D, other=0.0)
    rstd_j = tl.load(Stats + 3 * D + j, mask=j < D, other=0.0)
    c = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        left = tl.load(Z1 + n[None, :] * D + i[:, None], mask=(n[None, :] < N) & (i[:, None] < D), other=0.0)
        right = tl.load(Z2 + n[:, None] * D + j[None, :], mask=(n[:, None] < N) & (j[None, :] < D), other=0.0)
        # Rows past the end must stay zero when the mean goes off.
        u = tl.where(n[None, :] < N, (left.to(tl.float32) - mean_i[:, None]) * rstd_i[:, None], 0.0)
        v = (right.to(tl.float32) - mean_j[None, :]) * rstd_j[None, :]
        c = tl.dot(u.to(left.dtype), v.to(right.dtype), c)
    c = c / N
    inside = (i[:, None] < D) & (j[None, :] < D)
    diagonal = i[:, None] == j[None, :]
    term = tl.where(diagonal, (1.0 - c) * (1.0 - c), off * c * c)
    g = tl.where(diagonal, 2.0 * (c - 1.0), 2.0 * off * c)
    tl.store(GradC + i[:, None].to(tl.int64) * D + j[None, :], g, mask=inside)
    along = tl.where(inside, g * c, 0.0)
    tl.store(Rows + tl.program_id(1) * D + i, tl.sum(along, 1), mask=i < D)
    tl.store(Cols + tl.program_id(0) * D + j, tl.sum(along, 0), mask=j < D)
    total = tl.sum(tl.sum(tl.where(inside, term, 0.0), 1), 0)
    tl.store(Loss + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


def _side(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(z1, z2, off=0.005, eps=1e-5):
    z1, z2 = z1.contiguous(), z2.contiguous()
    N, D = z1.shape
    stats = torch.empty(4, D, device=z1.device, dtype=torch.float32)
    for place, z in ((0, z1), (2, z2)):
        _column_stats[(triton.cdiv(D, 32),)](
            z, stats[place], stats[place + 1], N, D, eps, BLOCK_N=64, BLOCK_D=32, num_warps=4
        )
    BLOCK = _side(D, 128)
    tiles = triton.cdiv(D, BLOCK)
    grad_c = torch.empty(D, D, device=z1.device, dtype=z1.dtype)
    loss = torch.empty(tiles, tiles, device=z1.device, dtype=torch.float32)
    sums = torch.empty(2, tiles, D, device=z1.device, dtype=torch.float32)
    _correlation[(tiles, tiles)](
        z1, z2, stats, grad_c, loss, sums[0], sums[1], N, D, off,
        BLOCK=BLOCK, BLOCK_N=_side(N, 128 // z1.element_size()), num_warps=8, num_stages=2,
    )  # fmt: skip
    return loss.sum(), (z1, z2, grad_c, stats, sums.sum(1))


# --- backward ---
@triton.jit
def _normalised(Z, Stats, Out, D, out_n, place, BLOCK: tl.constexpr):
    # Once for all tiles: the product then takes the view straight into shared memory.
    n = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(Z + n * D + j, mask=j < D, other=0.0).to(tl.float32)
    mean = tl.load(Stats + place * D + j, mask=j < D, other=0.0)
    rstd = tl.load(Stats + (place + 1) * D + j, mask=j < D, other=0.0)
    tl.store(Out + n * out_n + j, (z - mean) * rstd, mask=j < D)


@triton.jit
def _dz_out(acc, DLoss, Mine, Stats, Projection, DZ, n, i, N, D, mine):
    """Store a piece of dz from the accumulator, which is N du."""
    inside = (n[:, None] < N) & (i[None, :] < D)
    at = n[:, None] * D + i[None, :]
    mean = tl.load(Stats + mine * D + i, mask=i < D, other=0.0)
    rstd = tl.load(Stats + (mine + 1) * D + i, mask=i < D, other=0.0)
    projection = tl.load(Projection + i, mask=i < D, other=0.0)
    u = (tl.load(Mine + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    # R enters with 1 / N: both share the factor in front.
    dz = tl.load(DLoss) / N * rstd[None, :] * (acc - u * projection[None, :])
    tl.store(DZ + at, dz, mask=inside)


@triton.jit
def _view_gradient(
    DLoss, Mine, V, GradC, Stats, Projection, DZ, N, D, mine, TURN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    # Columns i of my view: sum over the other view's columns j, whose weights are G^T or, for the second view, G.
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_i = tl.cdiv(D, BLOCK_I)
    band = tl.program_id(0) // (GROUP * tiles_i)
    height = tl.minimum(tl.cdiv(N, BLOCK_N) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_i)
    row, col = (band * GROUP + inside % height) * BLOCK_N, inside // height * BLOCK_I
    acc = tl.zeros((BLOCK_N, BLOCK_I), tl.float32)
    for j in range(0, D, BLOCK_J):
        g = GradC.load([col, j]).T if TURN else GradC.load([j, col])
        acc = tl.dot(V.load([row, j]), g, acc)
    n, i = row.to(tl.int64) + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_I // 2)
    # The tile leaves in halves of its columns, which need half the registers each.
    left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_I // 2)), (0, 2, 1)))
    _dz_out(left, DLoss, Mine, Stats, Projection, DZ, n, i, N, D, mine)
    _dz_out(right, DLoss, Mine, Stats, Projection, DZ, n, i + BLOCK_I // 2, N, D, mine)


def _room(rows, cols, like):
    """A matrix whose rows start on sixteen bytes, as descriptors need them."""
    step = 16 // like.element_size()
    return like.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    starts = (matrix.stride(0) | matrix.storage_offset()) * matrix.element_size()
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1] or starts % 16:
        dense = _room(*matrix.shape, matrix)
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_loss, needs=(True, True)):
    z1, z2, grad_c, stats, projections = saved
    N, D = z1.shape
    grads = []
    for view, (mine, other) in enumerate(((z1, z2), (z2, z1))):
        dz = torch.empty_like(mine) if needs[view] else None
        if needs[view]:
            v = _room(N, D, other)
            _normalised[(N, triton.cdiv(D, 1024))](other, stats, v, D, v.stride(0), 2 - 2 * view, BLOCK=1024)
            BN, BI, BJ = min(128, _up(N)), min(256, _up(D)), min(128 // z1.element_size(), _up(D))
            g = _tiles(grad_c, BI, BJ) if view == 0 else _tiles(grad_c, BJ, BI)
            _view_gradient[(triton.cdiv(N, BN) * triton.cdiv(D, BI),)](
                grad_loss, mine, _tiles(v, BN, BJ), g, stats, projections[view], dz, N, D, 2 * view, TURN=view == 0,
                GROUP=8, BLOCK_N=BN, BLOCK_I=BI, BLOCK_J=BJ, num_warps=8, num_stages=4,
            )  # fmt: skip
        grads.append(dz)
    return tuple(grads)


# --- check ---
SWEEP = (
    {"N": 64, "D": 32},
    {"N": 75, "D": 41},
    {"N": 40, "D": 150, "dtype": "bfloat16"},
    {"N": 50, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 2048, "D": 8192, "dtype": "bfloat16"},)


def make_args(N, D, dtype="float32", device="cpu", seed=0):
    if N < 3:
        raise ValueError("a column of fewer than three samples is fixed by its normalisation")
    g = torch.Generator().manual_seed(seed)
    z1 = torch.randn(N, D, generator=g) * 2.0 + 0.5
    z2 = 0.6 * z1 + torch.randn(N, D, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (z1, z2)), 0.05)


def reference(z1, z2, off=0.005, eps=1e-5):
    u, v = ((z.float() - z.float().mean(0)) * (z.float().var(0, unbiased=False) + eps).rsqrt() for z in (z1, z2))
    c = (u.to(z1.dtype).T @ v.to(z2.dtype)).float() / len(u)
    return (1.0 - c.diagonal()).square().sum() + off * (c.square().sum() - c.diagonal().square().sum())
