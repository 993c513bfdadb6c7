"""An activation defined by an equation, y + exp(y + c) = x: Newton forwards, implicit differentiation backwards.

At the root dy/dx = 1 / (1 + exp(y + c)) and dy/dc = -exp(y + c) / (1 + exp(y + c)), two sigmoids of the saved output:
the backward contains no iteration, whatever the forward needed. c has one value per column; programs sum their rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fixed_point_newton_root",
    "family": "mixing_misc",
    "op": "implicit_activation",
    "schema": 1,
    "techniques": ("closed-form", "saved-output", "two-stage-partials", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 (M, N)",),
    "grads": ("x", "c"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _newton_fwd(X, C, Y, M, N, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # In u = y + c the equation is u + exp(u) = x + c: increasing and convex, so that Newton from the right converges
    # for any input without safeguards. The start is exact at both ends, and six steps reach fp32's last digit between.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    c = tl.load(C + n, mask=n < N, other=0.0).to(tl.float32)
    z = tl.load(X + m * N + n, mask=ok, other=0.0).to(tl.float32) + c
    u = tl.where(z < 1.0, z, tl.log(tl.maximum(z, 1.0)))
    for _ in tl.static_range(STEPS):
        e = tl.exp(u)
        u -= (u + e - z) / (1.0 + e)
    tl.store(Y + m * N + n, u - c, mask=ok)


def forward(x, c):
    """x (M, N), c (N)."""
    x, c = x.contiguous(), c.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = min(256, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    _newton_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, c, y, M, N, STEPS=6, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (y, c)


# --- backward ---
@triton.jit
def _root_bwd(DY, Y, C, DX, Parts, M, N, rows_each, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    share = tl.program_id(1).to(tl.int64)
    last = tl.minimum((share + 1) * rows_each, M)
    c = tl.load(C + n, mask=n < N, other=0.0).to(tl.float32)
    dc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(share * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        ok = (m < last) & (n < N)
        u = tl.load(Y + m * N + n, mask=ok, other=0.0).to(tl.float32) + c
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + m * N + n, dy * tl.sigmoid(-u), mask=ok)
        dc -= dy * tl.sigmoid(u)
    tl.store(Parts + share * N + n, tl.sum(dc, 0)[None, :], mask=n < N)


def backward(saved, grad_y, needs=None):
    y, c = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    BLOCK_N = min(512, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    tiles = triton.cdiv(N, BLOCK_N)
    # About eight programs for each of 132 processors, but at least four tiles of rows for every partial sum.
    rows_each = max(4 * BLOCK_M, triton.cdiv(M * tiles, 1056))
    shares = triton.cdiv(M, rows_each)
    parts = torch.empty(shares, N, device=y.device, dtype=torch.float32)
    _root_bwd[(tiles, shares)](
        grad_y, y, c, dx, parts, M, N, rows_each, *grad_y.stride(), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx, parts.sum(0).to(c.dtype)


# --- check ---
SWEEP = ({"M": 16, "N": 64}, {"M": 203, "N": 37}, {"M": 9, "N": 300, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, c = 3.0 * torch.randn(M, N, generator=g), torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, c))


def reference(x, c):
    z = x.float() + c.float()
    u = torch.where(z < 1.0, z, z.clamp(min=1.0).log())
    for _ in range(6):
        e = u.exp()
        u = u - (u + e - z) / (1.0 + e)
    return (u - c.float()).to(x.dtype)
