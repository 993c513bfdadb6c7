"""Student-t likelihood with learned scale and degrees of freedom per column: one digamma per column, not per element.

With z = (x - mean) / scale, loss[m] = sum over columns of log B(nu) + log scale + (nu + 1) / 2 log1p(z^2 / nu), where
log B(nu) = lgamma(nu / 2) - lgamma((nu + 1) / 2) + log(nu pi) / 2 depends on the column alone. So does its slope, which
holds the digammas: the walk over the rows only collects three sums per column, of g, of g log1p and of g times the
pull, and a second launch, which adds up the bands, evaluates psi((nu + 1) / 2) - psi(nu / 2) by recurrence and series.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "student_t_nll",
    "family": "loss_other",
    "op": "student_t_nll",
    "schema": 1,
    "techniques": ("two-stage-partials", "broadcast-reduction", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("mean", "log_scale", "log_nu"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _column(LogScale, LogNu, d, D):
    """1 / scale and nu; columns outside have one of each."""
    inv = tl.exp(-tl.load(LogScale + d, mask=d < D, other=0.0))
    return inv, tl.exp(tl.load(LogNu + d, mask=d < D, other=0.0))


@triton.jit
def _student_constants(LogScale, LogNu, Constant, D, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    inv, nu = _column(LogScale, LogNu, d, D)
    constant = libdevice.lgamma(0.5 * nu) - libdevice.lgamma(0.5 * nu + 0.5) + 0.5 * tl.log(3.141592653589793 * nu)
    tl.store(Constant + d, constant - tl.log(inv), mask=d < D)


@triton.jit
def _student_fwd(X, Mean, LogScale, LogNu, Constant, Loss, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    loss = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (m[:, None] < M) & (d[None, :] < D)
        at = m[:, None] * D + d[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(Mean + at, mask=mask, other=0.0).to(tl.float32)
        inv, nu = _column(LogScale, LogNu, d, D)
        z = (x - mean) * inv[None, :]
        constant = tl.load(Constant + d, mask=d < D, other=0.0)
        loss += constant[None, :] + (0.5 * nu + 0.5)[None, :] * libdevice.log1p(z * z / nu[None, :])
    tl.store(Loss + m, tl.sum(loss, 1), mask=m < M)


def forward(x, mean, log_scale, log_nu):
    x, mean, log_scale, log_nu = (t.contiguous() for t in (x, mean, log_scale, log_nu))
    M, D = x.shape
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_D = max(16, min(256, triton.next_power_of_2(D)))
    constant = torch.empty(D, device=x.device, dtype=torch.float32)
    _student_constants[(triton.cdiv(D, 128),)](log_scale, log_nu, constant, D, BLOCK_D=128)
    _student_fwd[(triton.cdiv(M, 8),)](
        x, mean, log_scale, log_nu, constant, loss, M, D, BLOCK_M=8, BLOCK_D=BLOCK_D, num_warps=4
    )
    return loss, (x, mean, log_scale, log_nu)


# --- backward ---
@triton.jit
def _student_dmean(
    DLoss, X, Mean, LogScale, LogNu, DMean, Parts, M, D, band, dl_m, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    # A program walks a band of rows with one tile of columns, whose three sums stay in registers.
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(1).to(tl.int64) * band
    last = tl.minimum(first + band, M)
    inv, nu = _column(LogScale, LogNu, d, D)
    logs = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    pulls = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        mask = (m[:, None] < last) & (d[None, :] < D)
        at = m[:, None] * D + d[None, :]
        g = tl.load(DLoss + m * dl_m, mask=m < last, other=0.0)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(Mean + at, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean) * inv[None, :]
        # z times dloss/dz: (nu + 1) z^2 / (nu + z^2), bounded however far an outlier lies.
        steep = (nu + 1.0)[None, :] * z / (nu[None, :] + z * z)
        tl.store(DMean + at, -g[:, None] * steep * inv[None, :], mask=mask)
        weight += g
        logs += g[:, None] * libdevice.log1p(z * z / nu[None, :])
        pulls += g[:, None] * steep * z
    at = Parts + tl.program_id(1).to(tl.int64) * 3 * D + d
    tl.store(at, tl.zeros((BLOCK_D,), tl.float32) + tl.sum(weight, 0), mask=d < D)
    tl.store(at + D, tl.sum(logs, 0), mask=d < D)
    tl.store(at + 2 * D, tl.sum(pulls, 0), mask=d < D)


@triton.jit
def _digamma_tail(x):
    """What log x - 1 / (2 x) exceeds psi(x) by, from x = 6 on."""
    square = 1.0 / (x * x)
    return square * (1.0 / 12 - square * (1.0 / 120 - square * (1.0 / 252 - square * (1.0 / 240 - square / 132))))


@triton.jit
def _digamma_step(x):
    """psi(x + 1/2) - psi(x) of positive x, taken as a difference throughout: psi itself would cancel for a large x."""
    step = tl.zeros_like(x)
    for _ in tl.static_range(6):
        step += 0.5 / (x * (x + 0.5))
        x += 1.0
    step += libdevice.log1p(0.5 / x) + 0.25 / (x * (x + 0.5))
    return step + _digamma_tail(x) - _digamma_tail(x + 0.5)


@triton.jit
def _student_columns(Parts, LogNu, DLogScale, DLogNu, D, bands, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    weight = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    logs = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    pulls = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    for start in range(0, bands, BLOCK_B):
        band = start + tl.arange(0, BLOCK_B)[:, None]
        mask = (band < bands) & (d[None, :] < D)
        at = Parts + band * 3 * D + d[None, :]
        weight += tl.load(at, mask=mask, other=0.0)
        logs += tl.load(at + D, mask=mask, other=0.0)
        pulls += tl.load(at + 2 * D, mask=mask, other=0.0)
    w = tl.sum(weight, 0)
    pull = tl.sum(pulls, 0)
    nu = tl.exp(tl.load(LogNu + d, mask=d < D, other=0.0))
    tl.store(DLogScale + d, w - pull, mask=d < D)
    # nu d/dnu of the constant, of the factor of log1p and of nu within it.
    constant = 0.5 - 0.5 * nu * _digamma_step(0.5 * nu)
    tl.store(DLogNu + d, w * constant + 0.5 * nu * tl.sum(logs, 0) - 0.5 * pull, mask=d < D)


def backward(saved, grad_loss, needs=None):
    x, mean, log_scale, log_nu = saved
    M, D = x.shape
    dmean = torch.empty_like(mean)
    dlog_scale, dlog_nu = torch.empty_like(log_scale), torch.empty_like(log_nu)
    BLOCK_D = max(16, min(128, triton.next_power_of_2(D)))
    tiles = triton.cdiv(D, BLOCK_D)
    # Some four programs for each of 132 processors; a band has at least a few tiles of rows.
    bands = max(1, min(triton.cdiv(M, 32), 528 // tiles))
    band = triton.cdiv(M, bands)
    bands = triton.cdiv(M, band)
    parts = torch.empty(bands, 3, D, device=x.device, dtype=torch.float32)
    _student_dmean[(tiles, bands)](
        grad_loss, x, mean, log_scale, log_nu, dmean, parts, M, D, band, grad_loss.stride(0),
        BLOCK_M=8, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    _student_columns[(triton.cdiv(D, 32),)](
        parts, log_nu, dlog_scale, dlog_nu, D, bands, BLOCK_B=16, BLOCK_D=32, num_warps=4
    )
    return dmean, dlog_scale, dlog_nu


# --- check ---
SWEEP = (
    {"M": 64, "D": 32},
    {"M": 77, "D": 45, "dtype": "float16"},
    {"M": 40, "D": 150, "dtype": "bfloat16"},
)
BENCH = ({"M": 65536, "D": 512, "dtype": "float32"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, mean = (torch.randn(M, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    # Two to thirty degrees of freedom. Parameters of columns stay in fp32.
    log_nu = 0.7 + 2.7 * torch.rand(D, generator=g)
    return x, mean, (0.3 * torch.randn(D, generator=g)).to(device), log_nu.to(device)


def reference(x, mean, log_scale, log_nu):
    nu = log_nu.exp()
    z = (x.float() - mean.float()) * torch.exp(-log_scale)
    constant = torch.lgamma(0.5 * nu) - torch.lgamma(0.5 * nu + 0.5) + 0.5 * torch.log(torch.pi * nu) + log_scale
    return (constant + (0.5 * nu + 0.5) * torch.log1p(z * z / nu)).sum(1)
