"""y = residual + dropout(x + bias): dx replays the mask, dbias is its column sum, dresidual is the cotangent.

Programs own tiles of rows by columns in a grid that covers the columns and splits the rows; each walks down its rows,
writes dx and leaves one partial row of dbias. Nothing is written for the residual. Numbers cost more time than bytes
here: Philox runs seven rounds, the fewest that pass the usual batteries of tests (Salmon et al., SC 2011).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dropout_residual_bias",
    "family": "dropout_rng",
    "op": "bias_dropout_add",
    "schema": 1,
    "techniques": ("rng-replay", "two-stage-partials", "broadcast-reduction", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "bias", "residual"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile_mask(seed, m, N, column, p, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`scale` or 0 for rows m and columns column + (0 .. BLOCK_N - 1); four neighbours share one Philox call.

    Element (m, n) takes number n % 4 of counter m * ceil(N / 4) + n // 4. `column` is a multiple of 4.
    """
    counter = m[:, None] * tl.cdiv(N, 4) + (column // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    a, b, c, d = tl.rand4x(seed, counter, n_rounds=7)
    u = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_M, BLOCK_N))
    return tl.where(u >= p, scale, 0.0)


@triton.jit
def _bias_drop_add_fwd(X, Bias, Res, Y, M, N, p, scale, seed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N
    n = column + tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    res = tl.load(Res + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)
    mask = _tile_mask(seed, m, N, column, p, scale, BLOCK_M, BLOCK_N)
    tl.store(Y + at, res + (x + b[None, :]) * mask, mask=ok)


def _tile(N):
    """Columns a warp wide or more, 2048 elements, 16 for each thread."""
    block_n = max(16, min(256, triton.next_power_of_2(N)))
    return {"BLOCK_M": 2048 // block_n, "BLOCK_N": block_n}


def forward(x, bias, residual, p, seed):
    x, residual = x.contiguous(), residual.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    tile = _tile(N)
    grid = (triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(M, tile["BLOCK_M"]))
    _bias_drop_add_fwd[grid](x, bias, residual, y, M, N, p, 1.0 / (1.0 - p), seed, **tile)
    return y, (bias, p, seed)


# --- backward ---
@triton.jit
def _bias_drop_add_bwd(
    DY, DX, Parts, M, N, dy_m, dy_n, p, scale, seed, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    n = column + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((split + 1) * rows_each, M)
    for start in tl.range(split * rows_each, last, BLOCK_M, num_stages=3):
        m = start + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < last) & (n[None, :] < N)
        dy_at = m[:, None].to(tl.int64) * dy_m + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        dx = dy * _tile_mask(seed, m, N, column, p, scale, BLOCK_M, BLOCK_N)
        tl.store(DX + m[:, None].to(tl.int64) * N + n[None, :], dx, mask=ok)
        sums += dx
    tl.store(Parts + split * N + n, tl.sum(sums, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    bias, p, seed = saved
    M, N = grad_y.shape
    tile = _tile(N)
    columns = triton.cdiv(N, tile["BLOCK_N"])
    # About eight programs of four warps for each of 132 processors.
    rows_each = triton.cdiv(triton.cdiv(M, max(1, 1056 // columns)), tile["BLOCK_M"]) * tile["BLOCK_M"]
    splits = triton.cdiv(M, rows_each)
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    parts = torch.empty(splits, N, device=grad_y.device, dtype=torch.float32)
    _bias_drop_add_bwd[(columns, splits)](
        grad_y, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), p, 1.0 / (1.0 - p), seed, rows_each,
        **tile, num_warps=2,
    )  # fmt: skip
    return dx, parts.sum(0).to(bias.dtype), grad_y


# --- check ---
SWEEP = ({"M": 40, "N": 64}, {"M": 45, "N": 79, "dtype": "float16"}, {"M": 33, "N": 96, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(N, generator=g), torch.randn(M, N, generator=g))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.1, 555 + seed)


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _philox_uniforms(seed, counters):
    """Philox4x32-7 at counters (i, 0, 0, 0): its four words as floats in [0, 1), one new last dim of four."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(7):
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
    words = torch.stack(c, -1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, bias, residual, p, seed):
    M, N = x.shape
    fours = (N + 3) // 4
    keep = _philox_uniforms(seed, torch.arange(M * fours, device=x.device)).view(M, 4 * fours)[:, :N] >= p
    return (residual.float() + (x.float() + bias.float()) * keep / (1.0 - p)).to(x.dtype)
