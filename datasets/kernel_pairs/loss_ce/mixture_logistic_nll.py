"""Likelihood of a pixel level under a discretised mixture of logistics: components share a softmax of responsibilities.

Component k gives a level's bin [x - h, x + h] the mass sigmoid(a) - sigmoid(b), a and b = (x - mu +- h) / s; the outer
bins reach to infinity. In logarithms this is -softplus(-a) - softplus(b) + log(1 - exp(-2 h / s)), stable without a
clamp: its slopes are sigmoids, where autograd of the difference divides two vanishing numbers. With r the softmax of
log pi + log p over the components, loss = -lse, d log pi = softmax(log pi) - r, and each component's mean and scale get
their slope times -r. A row holds the weights, means and log scales of one pixel; nothing is saved.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "mixture_logistic_nll",
    "family": "loss_ce",
    "op": "mixture_logistic_nll",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("params",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _load_components(Params, n, k, N, K):
    """Logits of the weights (-inf outside), means and log scales as tiles (pixel, component)."""
    mask = (n[:, None] < N) & (k[None, :] < K)
    at = Params + n[:, None] * 3 * K + k[None, :]
    logit = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    # A row outside has one component of weight one: no row is without any.
    logit = tl.where((n[:, None] >= N) & (k[None, :] == 0), 0.0, logit)
    mean = tl.load(at + K, mask=mask, other=0.0).to(tl.float32)
    log_scale = tl.load(at + 2 * K, mask=mask, other=0.0).to(tl.float32)
    return logit, mean, log_scale, mask


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + libdevice.log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _bin(Level, n, N, mean, log_scale, levels):
    """Distance of a pixel's bin from the means and half its width, in scales, and whether it is an outer bin."""
    level = tl.load(Level + n, mask=n < N, other=0).to(tl.float32)[:, None]
    half = 1.0 / (levels - 1)
    inv = tl.exp(-log_scale)
    return (2.0 * half * level - 1.0 - mean) * inv, half * inv, level < 0.5, level > levels - 1.5


@triton.jit
def _log_mass(centre, width, lowest, highest):
    below = tl.where(highest, 0.0, _softplus(-centre - width))
    above = tl.where(lowest, 0.0, _softplus(centre - width))
    inner = libdevice.log(-libdevice.expm1(-2.0 * width))
    return tl.where(lowest | highest, 0.0, inner) - below - above


@triton.jit
def _log_softmax(x):
    shifted = x - tl.max(x, 1, keep_dims=True)
    return shifted - tl.log(tl.sum(tl.exp(shifted), 1, keep_dims=True))


@triton.jit
def _mixture_fwd(Params, Level, Loss, N, levels, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    logit, mean, log_scale, _ = _load_components(Params, n, k, N, K)
    centre, width, lowest, highest = _bin(Level, n, N, mean, log_scale, levels)
    joint = _log_softmax(logit) + _log_mass(centre, width, lowest, highest)
    top = tl.max(joint, 1, keep_dims=True)
    lse = tl.log(tl.sum(tl.exp(joint - top), 1, keep_dims=True)) + top
    tl.store(Loss + n[:, None], -lse, mask=n[:, None] < N)


def _blocks(K):
    BLOCK_K = triton.next_power_of_2(K)
    return max(1, 1024 // BLOCK_K), BLOCK_K


def forward(params, level, levels=256):
    # params (N, 3, K): logits of the weights, means and log scales; level (N) of 0 to levels - 1 stands for -1 to 1.
    params, level = params.contiguous(), level.contiguous()
    N, _, K = params.shape
    loss = torch.empty(N, device=params.device, dtype=torch.float32)
    BLOCK_N, BLOCK_K = _blocks(K)
    _mixture_fwd[(triton.cdiv(N, BLOCK_N),)](
        params, level, loss, N, levels, K, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4
    )
    return loss, (params, level, levels)


# --- backward ---
@triton.jit
def _mixture_bwd(DLoss, Params, Level, DParams, N, levels, K, dl_n, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    logit, mean, log_scale, mask = _load_components(Params, n, k, N, K)
    centre, width, lowest, highest = _bin(Level, n, N, mean, log_scale, levels)
    prior = _log_softmax(logit)
    share = tl.exp(_log_softmax(prior + _log_mass(centre, width, lowest, highest)))
    g = tl.load(DLoss + n * dl_n, mask=n < N, other=0.0)[:, None]
    # Slopes of the log mass: of -softplus(-a) in a, and of -softplus(b) in -b.
    below = tl.where(highest, 0.0, tl.sigmoid(-centre - width))
    above = tl.where(lowest, 0.0, tl.sigmoid(centre - width))
    inner = tl.where(lowest | highest, 0.0, 2.0 * width / libdevice.expm1(2.0 * width))
    at = DParams + n[:, None] * 3 * K + k[None, :]
    tl.store(at, g * (tl.exp(prior) - share), mask=mask)
    # The mean moves the centre alone, by -1 / scale; a larger scale shrinks centre and width.
    tl.store(at + K, g * share * (below - above) * tl.exp(-log_scale), mask=mask)
    in_scale = centre * (below - above) + width * (below + above) + inner
    tl.store(at + 2 * K, g * share * in_scale, mask=mask)


def backward(saved, grad_loss, needs=None):
    params, level, levels = saved
    N, _, K = params.shape
    dparams = torch.empty_like(params)
    BLOCK_N, BLOCK_K = _blocks(K)
    _mixture_bwd[(triton.cdiv(N, BLOCK_N),)](
        grad_loss, params, level, dparams, N, levels, K, grad_loss.stride(0),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return dparams


# --- check ---
SWEEP = (
    {"N": 128, "K": 8},
    {"N": 77, "K": 10, "LEVELS": 32, "dtype": "float16"},
    {"N": 45, "K": 5, "dtype": "bfloat16"},
)
BENCH = ({"N": 1048576, "K": 10, "dtype": "float32"},)


def make_args(N, K, LEVELS=256, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    params = torch.randn(N, 3, K, generator=g) * torch.tensor((1.0, 0.6, 0.7))[:, None]
    params[:, 2] -= 3.0
    # One pixel in eight is black or white, as in photographs.
    level = torch.randint(-LEVELS // 16, LEVELS + LEVELS // 16, (N,), generator=g).clamp(0, LEVELS - 1)
    return params.to(device=device, dtype=getattr(torch, dtype)), level.int().to(device), LEVELS


def reference(params, level, levels=256):
    logit, mean, log_scale = params.float().unbind(1)
    half = 1.0 / (levels - 1)
    inv = torch.exp(-log_scale)
    centre, width = (2.0 * half * level[:, None] - 1.0 - mean) * inv, half * inv
    low, high = (level == 0)[:, None], (level == levels - 1)[:, None]
    softplus = torch.nn.functional.softplus
    mass = torch.where(low | high, 0.0, torch.log(-torch.expm1(-2.0 * width)))
    mass = mass - torch.where(high, 0.0, softplus(-centre - width)) - torch.where(low, 0.0, softplus(centre - width))
    return -(logit.log_softmax(1) + mass).logsumexp(1)
