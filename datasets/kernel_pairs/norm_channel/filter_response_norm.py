"""Filter response norm with its threshold, y = max(gamma * x / rms + beta, tau), the rms being over a plane's pixels.

The threshold's gradient is a compare and a sum: dy goes to tau where the affine value fell below it, and to the norm
elsewhere. A program owns a plane, walks it twice, and leaves three numbers, the sample's shares of dgamma, dbeta and
dtau. As the mean is not removed, the first of them alone corrects dx. A plane of one block stays in registers between
the walks.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "filter_response_norm",
    "family": "norm_channel",
    "op": "filter_response_norm",
    "schema": 1,
    "techniques": ("two-pass", "recompute", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (N, C)",),
    "grads": ("x", "gamma", "beta", "tau"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _frn_fwd(X, Gamma, Beta, Tau, Y, Inv, C, L, eps, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    c = plane % C
    base = plane.to(tl.int64) * L
    at = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, L, BLOCK):
        x = tl.load(X + base + start + at, mask=start + at < L, other=0.0).to(tl.float32)
        squares += x * x
    inv = tl.rsqrt(tl.sum(squares, 0) / L + eps)
    tl.store(Inv + plane, inv)
    gain = tl.load(Gamma + c).to(tl.float32) * inv
    beta = tl.load(Beta + c).to(tl.float32)
    tau = tl.load(Tau + c).to(tl.float32)
    for start in range(0, L, BLOCK):
        x = tl.load(X + base + start + at, mask=start + at < L, other=0.0).to(tl.float32)
        tl.store(Y + base + start + at, tl.maximum(x * gain + beta, tau), mask=start + at < L)


def _launch(L):
    block = min(4096, triton.next_power_of_2(L))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def forward(x, gamma, beta, tau, eps=1e-6):
    x = x.contiguous()
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    inv_rms = torch.empty(N, C, device=x.device, dtype=torch.float32)
    _frn_fwd[(N * C,)](x, gamma, beta, tau, y, inv_rms, C, H * W, eps, **_launch(H * W))
    return y, (x, gamma, beta, tau, inv_rms)


# --- backward ---
@triton.jit
def _add_triples(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def _frn_bwd(
    DY, X, Gamma, Beta, Tau, Inv, DX, Shares, C, L, dy_n, dy_c, dy_l, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    plane = tl.program_id(0)
    c = plane % C
    base = plane.to(tl.int64) * L
    dy_base = (plane // C).to(tl.int64) * dy_n + c.to(tl.int64) * dy_c
    inv = tl.load(Inv + plane)
    gamma = tl.load(Gamma + c).to(tl.float32)
    beta = tl.load(Beta + c).to(tl.float32)
    tau = tl.load(Tau + c).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        xhat = tl.load(X + base + lane, mask=lane < L, other=0.0).to(tl.float32) * inv
        dy = tl.load(DY + dy_base + lane.to(tl.int64) * dy_l, mask=lane < L, other=0.0).to(tl.float32)
        g = tl.where(xhat * gamma + beta > tau, dy, 0.0)
        share, to_beta, to_tau = tl.reduce((g * xhat, g, dy - g), 0, _add_triples)
    else:
        dgamma = tl.zeros((BLOCK,), tl.float32)
        dbeta = tl.zeros((BLOCK,), tl.float32)
        dtau = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, L, BLOCK, num_stages=3):
            at = start + lane
            xhat = tl.load(X + base + at, mask=at < L, other=0.0).to(tl.float32) * inv
            dy = tl.load(DY + dy_base + at.to(tl.int64) * dy_l, mask=at < L, other=0.0).to(tl.float32)
            g = tl.where(xhat * gamma + beta > tau, dy, 0.0)
            dgamma += g * xhat
            dbeta += g
            dtau += dy - g
        share, to_beta, to_tau = tl.reduce((dgamma, dbeta, dtau), 0, _add_triples)
    tl.store(Shares + 3 * plane, share)
    tl.store(Shares + 3 * plane + 1, to_beta)
    tl.store(Shares + 3 * plane + 2, to_tau)
    radial = share / L
    if WHOLE:
        tl.store(DX + base + lane, gamma * inv * (g - xhat * radial), mask=lane < L)
    else:
        for start in tl.range(0, L, BLOCK, num_stages=3):
            at = start + lane
            xhat = tl.load(X + base + at, mask=at < L, other=0.0).to(tl.float32) * inv
            dy = tl.load(DY + dy_base + at.to(tl.int64) * dy_l, mask=at < L, other=0.0).to(tl.float32)
            g = tl.where(xhat * gamma + beta > tau, dy, 0.0)
            tl.store(DX + base + at, gamma * inv * (g - xhat * radial), mask=at < L)


def backward(saved, grad_y, needs=None):
    x, gamma, beta, tau, inv_rms = saved
    N, C, H, W = x.shape
    # A view wherever the pixels of a plane lie at one distance, else a copy.
    dy = grad_y.flatten(2)
    dx = torch.empty_like(x)
    shares = torch.empty(N, C, 3, device=x.device, dtype=torch.float32)
    # Longer planes are walked in short tiles, which they fill to the last, while copies run two ahead.
    whole = H * W <= 4096
    _frn_bwd[(N * C,)](
        dy, x, gamma, beta, tau, inv_rms, dx, shares, C, H * W, *dy.stride(),
        WHOLE=whole, BLOCK=triton.next_power_of_2(H * W) if whole else 1024, num_warps=8 if H * W > 1024 else 2,
    )  # fmt: skip
    sums = shares.sum(0).to(gamma.dtype)
    return dx, sums[:, 0], sums[:, 1], sums[:, 2]


# --- check ---
SWEEP = (
    {"N": 3, "C": 4, "H": 8, "W": 8},
    {"N": 2, "C": 5, "H": 11, "W": 13, "dtype": "float16"},
    {"N": 4, "C": 3, "H": 7, "W": 9, "dtype": "bfloat16"},
    {"N": 1, "C": 2, "H": 20, "W": 21},
)
BENCH = ({"N": 128, "C": 256, "H": 56, "W": 56, "dtype": "bfloat16"},)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(N, C, H, W, generator=g) * 1.5,
        torch.rand(C, generator=g) + 0.5,
        torch.randn(C, generator=g) * 0.3,
        torch.randn(C, generator=g) * 0.3,
    )
    x, gamma, beta, tau = (t.to(getattr(torch, dtype)) for t in tensors)
    # What lies at the threshold is moved: there rounding decides who gets the gradient.
    at_edge = (_affine(x, gamma, beta, 1e-6) - tau.float()[:, None, None]).abs() < 1e-3
    return tuple(t.to(device) for t in (torch.where(at_edge, x + 0.125, x), gamma, beta, tau))


def _affine(x, gamma, beta, eps):
    xf = x.float()
    xhat = xf * torch.rsqrt(xf.pow(2).mean((2, 3), keepdim=True) + eps)
    return gamma.float()[:, None, None] * xhat + beta.float()[:, None, None]


def reference(x, gamma, beta, tau, eps=1e-6):
    return torch.maximum(_affine(x, gamma, beta, eps), tau.float()[:, None, None]).to(x.dtype)
