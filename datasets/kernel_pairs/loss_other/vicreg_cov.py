"""Variance and covariance terms of VICReg: one product with one edited matrix gives the gradient of both.

Per column the hinge on the standard deviation, per pair of columns the squared covariance, with z centred to y:
    C = y^T y / (N - 1),    s = sqrt(diag(C) + eps),    L = v/D sum of max(0, 1 - s) + c/D sum over i != j of C[i, j]^2.
Both depend on C alone, so dL/dC is a matrix M: off the diagonal 2 c C / D, on it -v / (2 D s) where s < 1. Then
    dz = 2 y M / (N - 1),
whose columns have zero mean already, since y's have: centring costs nothing. The forward stores M while it holds C.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "vicreg_cov",
    "family": "loss_other",
    "op": "vicreg_regulariser",
    "schema": 1,
    "techniques": ("closed-form", "prologue-fusion", "saved-statistics", "row-local"),
    "saves": ("mean: fp32 (D,)", "grad_c: fp32 or bf16 or fp16 (D, D)"),
    "grads": ("z",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_means(Z, Mean, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        z = tl.load(Z + n[:, None] * D + d[None, :], mask=(n[:, None] < N) & (d[None, :] < D), other=0.0)
        total += z.to(tl.float32)
    tl.store(Mean + d, tl.sum(total, 0) / N, mask=d < D)


@triton.jit
def _covariance(Z, Mean, GradC, Parts, N, D, v, c, eps, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean_i = tl.load(Mean + i, mask=i < D, other=0.0)
    mean_j = tl.load(Mean + j, mask=j < D, other=0.0)
    cov = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        left = tl.load(Z + n[None, :] * D + i[:, None], mask=(n[None, :] < N) & (i[:, None] < D), other=0.0)
        right = tl.load(Z + n[:, None] * D + j[None, :], mask=(n[:, None] < N) & (j[None, :] < D), other=0.0)
        # One of the two is zeroed past the last row; that drops the whole term.
        y = tl.where(n[None, :] < N, left.to(tl.float32) - mean_i[:, None], 0.0)
        cov = tl.dot(y.to(left.dtype), (right.to(tl.float32) - mean_j[None, :]).to(right.dtype), cov)
    cov = cov / (N - 1)
    inside = (i[:, None] < D) & (j[None, :] < D)
    diagonal = inside & (i[:, None] == j[None, :])
    spread = tl.sqrt(tl.where(diagonal, cov, 1.0) + eps)
    short = diagonal & (spread < 1.0)
    off = tl.where(inside & (i[:, None] != j[None, :]), cov, 0.0)
    g = 2.0 * c / D * off - tl.where(short, 0.5 * v / D / spread, 0.0)
    tl.store(GradC + i[:, None].to(tl.int64) * D + j[None, :], g, mask=inside)
    loss = c / D * off * off + tl.where(short, v / D * (1.0 - spread), 0.0)
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(loss, 1), 0))


def _side(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(z, v=25.0, c=1.0, eps=1e-4):
    z = z.contiguous()
    N, D = z.shape
    mean = torch.empty(D, device=z.device, dtype=torch.float32)
    _column_means[(triton.cdiv(D, 32),)](z, mean, N, D, BLOCK_N=64, BLOCK_D=32, num_warps=4)
    BLOCK = _side(D, 128)
    tiles = triton.cdiv(D, BLOCK)
    grad_c = torch.empty(D, D, device=z.device, dtype=z.dtype)
    parts = torch.empty(tiles, tiles, device=z.device, dtype=torch.float32)
    _covariance[(tiles, tiles)](
        z, mean, grad_c, parts, N, D, v, c, eps,
        BLOCK=BLOCK, BLOCK_N=_side(N, 128 // z.element_size()), num_warps=8, num_stages=2,
    )  # fmt: skip
    return parts.sum(), (z, mean, grad_c)


# --- backward ---
@triton.jit
def _centred_times(
    DLoss, Z, Mean, GradC, DZ, N, D, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):
    # Column tiles of one row band are neighbours: z is read from L2, M stays there for all bands.
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    dz = tl.zeros((BLOCK_N, BLOCK_I), tl.float32)
    for start in range(0, D, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        z = tl.load(Z + n[:, None] * D + j[None, :], mask=(n[:, None] < N) & (j[None, :] < D), other=0.0)
        y = z.to(tl.float32) - tl.load(Mean + j, mask=j < D, other=0.0)[None, :]
        m = tl.load(GradC + j[:, None] * D + i[None, :], mask=(j[:, None] < D) & (i[None, :] < D), other=0.0)
        dz = tl.dot(y.to(z.dtype), m, dz)
    scale = 2.0 * tl.load(DLoss) / (N - 1)
    tl.store(DZ + n[:, None] * D + i[None, :], scale * dz, mask=(n[:, None] < N) & (i[None, :] < D))


def backward(saved, grad_loss, needs=None):
    z, mean, grad_c = saved
    N, D = z.shape
    dz = torch.empty_like(z)
    BLOCK_N, BLOCK_I = _side(N, 128), _side(D, 128)
    _centred_times[(triton.cdiv(D, BLOCK_I), triton.cdiv(N, BLOCK_N))](
        grad_loss, z, mean, grad_c, dz, N, D,
        BLOCK_N=BLOCK_N, BLOCK_I=BLOCK_I, BLOCK_J=_side(D, 128 // z.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return dz


# --- check ---
SWEEP = (
    {"N": 64, "D": 32},
    {"N": 75, "D": 41},
    {"N": 40, "D": 150, "dtype": "bfloat16"},
    {"N": 50, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 2048, "D": 8192, "dtype": "bfloat16"},)


def make_args(N, D, dtype="float32", device="cpu", seed=0):
    if N < 2:
        raise ValueError("one sample has no variance")
    g = torch.Generator().manual_seed(seed)
    # Spreads on both sides of one, and columns that correlate.
    z = torch.randn(N, D, generator=g) * torch.linspace(0.3, 1.7, D) + torch.randn(N, 1, generator=g) * 0.3 + 0.5
    return z.to(device=device, dtype=getattr(torch, dtype)), 25.0, 1.0


def reference(z, v=25.0, c=1.0, eps=1e-4):
    N, D = z.shape
    y = (z.float() - z.float().mean(0)).to(z.dtype)
    cov = (y.T @ y).float() / (N - 1)
    spread = torch.sqrt(cov.diagonal() + eps)
    off = cov.square().sum() - cov.diagonal().square().sum()
    return v / D * torch.relu(1.0 - spread).sum() + c / D * off
