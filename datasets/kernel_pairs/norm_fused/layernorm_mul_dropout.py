"""y = u * dropout(LayerNorm(x)): a product of three, whose middle factor is a mask drawn again in the backward.

Each factor's gradient is dy times the other two: du needs the normalised value and the mask, the norm's needs u and the
mask. Saved are only the row statistics; the norm is rebuilt and the mask replayed in the pass that writes all.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_mul_dropout",
    "family": "norm_fused",
    "op": "layer_norm_mul_dropout",
    "schema": 1,
    "techniques": ("rng-replay", "row-local", "recompute", "saved-statistics", "two-stage-partials"),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("x", "u", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _survivors(seed, row, keep_scale, p, BLOCK: tl.constexpr):
    """1/(1-p) or 0 for every column of a row. Philox counters are (row, quarter): four neighbours share one call."""
    quarter = tl.arange(0, BLOCK // 4)
    zero = quarter * 0
    a, b, c, d = tl.philox(seed, quarter, zero + row, zero, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    # The upper 24 bits are exact in fp32; p is compared with them on the same grid.
    u = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(u >= p, keep_scale, 0.0)


@triton.jit
def _ln_mul_drop_fwd(X, U, W, B, Y, Stats, N, p, keep_scale, seed, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + n
    x = tl.load(X + at, mask=n < N, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=n < N, other=0.0).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    x = tl.where(n < N, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(Stats + 2 * row, mean)
    tl.store(Stats + 2 * row + 1, rstd)
    tl.store(Y + at, u * _survivors(seed, row, keep_scale, p, BLOCK) * (x * rstd * w + b), mask=n < N)


def _launch(N):
    block = max(4, triton.next_power_of_2(N))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def forward(x, u, weight, bias, p, seed, eps=1e-6):
    x, u = x.contiguous(), u.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    stats = torch.empty(M, 2, device=x.device, dtype=torch.float32)
    _ln_mul_drop_fwd[(M,)](x, u, weight, bias, y, stats, N, p, 1.0 / (1.0 - p), seed, eps, **_launch(N))
    return y, (x, u, weight, bias, stats, p, seed)


# --- backward ---
@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_mul_drop_bwd(
    DY, X, U, W, B, Stats, DX, DU, Parts, M, N, p, keep_scale, seed, dy_row, dy_col, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(pid, M, tl.num_programs(0), num_stages=4):
        at = tl.cast(row, tl.int64) * N + n
        dy_at = tl.cast(row, tl.int64) * dy_row + n * dy_col
        # What the mask lets through of dy goes to both other factors.
        dy = tl.load(DY + dy_at, mask=n < N, other=0.0).to(tl.float32) * _survivors(seed, row, keep_scale, p, BLOCK)
        rstd = tl.load(Stats + 2 * row + 1)
        x = tl.load(X + at, mask=n < N, other=0.0).to(tl.float32)
        xhat = (x - tl.load(Stats + 2 * row)) * rstd
        tl.store(DU + at, dy * (xhat * w + b), mask=n < N)
        dnormed = dy * tl.load(U + at, mask=n < N, other=0.0).to(tl.float32)
        dw += dnormed * xhat
        db += dnormed
        dxhat = dnormed * w
        # Both sums in one reduction: one wait for the slowest warp instead of two.
        slope, shift = tl.reduce((dxhat * xhat, dxhat), 0, _add_both)
        tl.store(DX + at, rstd * (dxhat - shift / N - xhat * (slope / N)), mask=n < N)
    tl.store(Parts + pid * N + n, dw, mask=n < N)
    tl.store(Parts + (tl.num_programs(0) + pid) * N + n, db, mask=n < N)


def backward(saved, grad_y, needs=None):
    x, u, weight, bias, stats, p, seed = saved
    M, N = x.shape
    launch = _launch(N)
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    programs = min(132 * 16 // launch["num_warps"], triton.cdiv(M, 2))
    dx, du = torch.empty_like(x), torch.empty_like(u)
    parts = torch.empty(2, programs, N, device=x.device, dtype=torch.float32)
    _ln_mul_drop_bwd[(programs,)](
        grad_y, x, u, weight, bias, stats, dx, du, parts, M, N, p, 1.0 / (1.0 - p), seed,
        grad_y.stride(0), grad_y.stride(1), **launch,
    )  # fmt: skip
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, du, dweight, dbias


# --- check ---
SWEEP = ({"M": 6, "N": 64}, {"M": 9, "N": 99, "dtype": "float16"}, {"M": 4, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 131072, "N": 512, "dtype": "bfloat16"}, {"M": 16384, "N": 4096, "dtype": "bfloat16"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, u = torch.randn(M, N, generator=g), torch.randn(M, N, generator=g)
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, u, weight, bias)), 0.2, 271 + seed)


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _philox_words(seed, first, second):
    """The four 32-bit words of Philox4x32-10 at counters (first, second, 0, 0), one new last dim."""
    low = 0xFFFFFFFF
    first, second = torch.broadcast_tensors(first.long(), second.long())
    c = [first, second, torch.zeros_like(first), torch.zeros_like(first)]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # 32 x 32 -> 64 bit products by halves, because int64 has no unsigned high part.
        products = []
        for factor, word in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])):
            upper = factor * (word >> 16)
            lower = factor * (word & 0xFFFF)
            total = ((upper & 0xFFFF) << 16) + lower
            products.append(((upper >> 16) + (total >> 32), total & low))
        (hi_a, lo_a), (hi_b, lo_b) = products
        c = [(hi_b ^ c[1] ^ k0) & low, lo_b, (hi_a ^ c[3] ^ k1) & low, lo_a]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack(c, -1)


def reference(x, u, weight, bias, p, seed, eps=1e-6):
    M, N = x.shape
    rows, quarters = torch.arange(M, device=x.device), torch.arange((N + 3) // 4, device=x.device)
    words = _philox_words(seed, quarters[None, :], rows[:, None]).flatten(1)[:, :N]
    keep = (words >> 8).float() / 2**24 >= p
    normed = torch.nn.functional.layer_norm(x.float(), (N,), weight.float(), bias.float(), eps)
    return (u.float() * keep * normed / (1.0 - p)).to(x.dtype)
