"""Debiased Sinkhorn divergence of point clouds: by the envelope theorem the gradient needs the last potentials alone.

With C(x, y) = |x - y|^2 / 2 and T(g; y)(x) = -eps log mean over j of exp((g[j] - C(x, y[j])) / eps),
    S = mean f + mean g - mean p - mean q,    f = T(g; y), g = T(f; x),    p = T(p; x), q = T(q; y).
At the fixed point S is stationary in the potentials: going back through the iterations would add nothing, and only the
cost's own gradient is left. x[i] itself drops out, what stays is the difference of two weighted means,

    dS/dx[i] = 1/N (sum over j of P_xx[i, j] x[j] - sum over j of P_xy[i, j] y[j]),

whose weights are softmaxes that the saved last potentials keep in range. They would normalise them too, but the means
are nearly alike, and what rounding a potential costs, over eps, would be left of them: each is divided by its own sum.
No cost matrix is stored in either direction. A program owns a tile of points and walks over both clouds.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "emd_sinkhorn_loss",
    "family": "loss_other",
    "op": "sinkhorn_divergence",
    "schema": 1,
    "techniques": ("closed-form", "saved-lse", "recompute", "row-local"),
    "saves": ("on_x: fp32 (4, B, N)", "on_y: fp32 (4, B, M)"),
    "grads": ("x", "y"),
    "dtypes": ("float32", "bfloat16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _point(X, i, size):
    """The three coordinates of points i."""
    live = i < size
    x0 = tl.load(X + 3 * i, mask=live, other=0.0).to(tl.float32)
    x1 = tl.load(X + 3 * i + 1, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(X + 3 * i + 2, mask=live, other=0.0).to(tl.float32)
    return x0, x1, x2


@triton.jit
def _half_cost(a0, a1, a2, b0, b1, b2):
    d0 = a0[:, None] - b0[None, :]
    d1 = a1[:, None] - b1[None, :]
    d2 = a2[:, None] - b2[None, :]
    return 0.5 * (d0 * d0 + d1 * d1 + d2 * d2)


@triton.jit
def _soft_transform(
    X, Y, G, F, N, M, eps, AVERAGE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    # F = T(G; Y) at the points X; for a cloud against itself the mean of T(G) and G, which does not oscillate.
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    x0, x1, x2 = _point(X + b * N * 3, i, N)
    top = tl.full((BLOCK_I,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_I,), tl.float32)
    inv_eps = 1.0 / eps
    for start in range(0, M, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        y0, y1, y2 = _point(Y + b * M * 3, j, M)
        g = tl.load(G + b * M + j, mask=j < M, other=-1.0e30)
        s = (g[None, :] - _half_cost(x0, x1, x2, y0, y1, y2)) * inv_eps
        higher = tl.maximum(top, tl.max(s, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[:, None]), 1)
        top = higher
    f = -eps * (top + tl.log(norm / M))
    if AVERAGE:
        f = 0.5 * (f + tl.load(G + b * N + i, mask=i < N, other=0.0))
    tl.store(F + b * N + i, f, mask=i < N)


@triton.jit
def _divergence(Fs, Gs, Out, N, M, N_OFFSET, M_OFFSET, BLOCK: tl.constexpr):
    # mean f - mean p + mean g - mean q.
    b = tl.program_id(0).to(tl.int64)
    fs = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        fs += tl.load(Fs + b * N + i, mask=i < N, other=0.0)
        fs -= tl.load(Fs + N_OFFSET + b * N + i, mask=i < N, other=0.0)
    gs = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        j = start + tl.arange(0, BLOCK)
        gs += tl.load(Gs + b * M + j, mask=j < M, other=0.0)
        gs -= tl.load(Gs + M_OFFSET + b * M + j, mask=j < M, other=0.0)
    tl.store(Out + b, tl.sum(fs, 0) / N + tl.sum(gs, 0) / M)


def _tiles(size):
    side = max(16, min(64, triton.next_power_of_2(size)))
    return {"BLOCK_I": side, "BLOCK_J": min(32, side), "num_warps": 4 if side == 64 else 1}


def _transform(x, y, g, f, eps, average=False):
    (B, N, _), M = x.shape, y.shape[1]
    tiles = _tiles(max(N, M))
    _soft_transform[(B, triton.cdiv(N, tiles["BLOCK_I"]))](x, y, g, f, N, M, eps, AVERAGE=average, **tiles)


def forward(x, y, eps=0.05, iters=20):
    # x (B, N, 3), y (B, M, 3), all points of equal weight; eps falls from 1 to its value over the first iterations.
    x, y = x.contiguous(), y.contiguous()
    (B, N, _), M = x.shape, y.shape[1]
    # Rows 0, 1: f or g before and after the last transform; rows 2, 3: likewise p or q.
    on_x = torch.zeros(4, B, N, device=x.device, dtype=torch.float32)
    on_y = torch.zeros(4, B, M, device=x.device, dtype=torch.float32)
    for step in range(iters):
        now = max(eps, 0.5**step)
        _transform(x, y, on_y[0], on_x[0], now)
        _transform(y, x, on_x[0], on_y[0], now)
        # Two buffers in turn: a program reads potentials that others have not overwritten.
        for cloud, own in ((x, on_x), (y, on_y)):
            _transform(cloud, cloud, own[2 + step % 2], own[3 - step % 2], now, average=True)
    kept = 2 + iters % 2
    _transform(x, y, on_y[0], on_x[1], eps)
    _transform(y, x, on_x[0], on_y[1], eps)
    _transform(x, x, on_x[kept], on_x[5 - kept], eps)
    _transform(y, y, on_y[kept], on_y[5 - kept], eps)
    out = torch.empty(B, device=x.device, dtype=torch.float32)
    after = (5 - kept - 1) * B
    _divergence[(B,)](
        on_x[1],
        on_y[1],
        out,
        N,
        M,
        after * N,
        after * M,
        BLOCK=max(16, min(1024, triton.next_power_of_2(N))),
        num_warps=4,
    )
    return out, (x, y, on_x, on_y, eps, kept)


# --- backward ---
@triton.jit
def _mean_of_cloud(
    Y, G, x0, x1, x2, f, M, eps, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Mean of the points Y under the softmax that made f of g: weights exp((f + g - C) / eps)."""
    norm = tl.zeros((BLOCK_I,), tl.float32)
    m0 = tl.zeros((BLOCK_I,), tl.float32)
    m1 = tl.zeros((BLOCK_I,), tl.float32)
    m2 = tl.zeros((BLOCK_I,), tl.float32)
    inv_eps = 1.0 / eps
    for start in range(0, M, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        y0, y1, y2 = _point(Y, j, M)
        g = tl.load(G + j, mask=j < M, other=-1.0e30)
        p = tl.exp((f[:, None] + g[None, :] - _half_cost(x0, x1, x2, y0, y1, y2)) * inv_eps)
        norm += tl.sum(p, 1)
        m0 += tl.sum(p * y0[None, :], 1)
        m1 += tl.sum(p * y1[None, :], 1)
        m2 += tl.sum(p * y2[None, :], 1)
    return m0 / norm, m1 / norm, m2 / norm


@triton.jit
def _envelope_bwd(DOut, X, Y, G, F, P, PAfter, DX, N, M, eps, stride_g, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    X += b * N * 3
    x0, x1, x2 = _point(X, i, N)
    f = tl.load(F + b * N + i, mask=i < N, other=0.0)
    p = tl.load(PAfter + b * N + i, mask=i < N, other=0.0)
    to0, to1, to2 = _mean_of_cloud(Y + b * M * 3, G + b * M, x0, x1, x2, f, M, eps, BLOCK_I, BLOCK_J)
    own0, own1, own2 = _mean_of_cloud(X, P + b * N, x0, x1, x2, p, N, eps, BLOCK_I, BLOCK_J)
    weight = tl.load(DOut + b * stride_g) / N
    at = DX + b * N * 3 + 3 * i
    tl.store(at, weight * (own0 - to0), mask=i < N)
    tl.store(at + 1, weight * (own1 - to1), mask=i < N)
    tl.store(at + 2, weight * (own2 - to2), mask=i < N)


def backward(saved, grad_out, needs=(True, True)):
    x, y, on_x, on_y, eps, kept = saved
    tiles = _tiles(max(x.shape[1], y.shape[1]))
    grads = []
    # S is symmetric: one kernel serves both clouds.
    for need, a, b, on_a, on_b in ((needs[0], x, y, on_x, on_y), (needs[1], y, x, on_y, on_x)):
        (B, N, _), M = a.shape, b.shape[1]
        da = torch.empty_like(a) if need else None
        if need:
            _envelope_bwd[(B, triton.cdiv(N, tiles["BLOCK_I"]))](
                grad_out, a, b, on_b[0], on_a[1], on_a[kept], on_a[5 - kept], da, N, M, eps, grad_out.stride(0), **tiles
            )
        grads.append(da)
    return tuple(grads)


# --- check ---
SWEEP = (
    {"B": 2, "N": 32, "M": 32, "iters": 8},
    {"B": 1, "N": 37, "M": 21, "iters": 7},
    {"B": 2, "N": 20, "M": 18, "iters": 6, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "N": 2048, "M": 2048, "iters": 20, "dtype": "float32"},)


def make_args(B, N, M, iters, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.rand(B, N, 3, generator=g), 0.8 * torch.rand(B, M, 3, generator=g) + 0.3
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y)), 0.05, iters


def _softmin(x, y, g, eps):
    cost = 0.5 * sum((x[:, :, None, axis] - y[:, None, :, axis]).square() for axis in range(3))
    return -eps * (torch.logsumexp((g[:, None] - cost) / eps, 2) - torch.tensor(float(y.shape[1])).log().item())


def surrogate(x, y, eps=0.05, iters=20):
    # The potentials are constants; each cloud is differentiated where the last transforms are taken at its points.
    fixed_x, fixed_y = x.detach(), y.detach()
    f, p, g, q = (torch.zeros_like(t[..., 0]) for t in (fixed_x, fixed_x, fixed_y, fixed_y))
    for step in range(iters):
        now = max(eps, 0.5**step)
        f = _softmin(fixed_x, fixed_y, g, now)
        g = _softmin(fixed_y, fixed_x, f, now)
        p = 0.5 * (p + _softmin(fixed_x, fixed_x, p, now))
        q = 0.5 * (q + _softmin(fixed_y, fixed_y, q, now))
    on_x = _softmin(x, fixed_y, g, eps) - _softmin(x, fixed_x, p, eps)
    return on_x.mean(1) + (_softmin(y, fixed_x, f, eps) - _softmin(y, fixed_y, q, eps)).mean(1)


def reference(x, y, eps=0.05, iters=20):
    return surrogate(x.float(), y.float(), eps, iters)
