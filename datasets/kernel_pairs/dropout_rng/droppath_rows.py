"""Stochastic depth with layer scale, y = residual + keep[b] / (1 - p) * gamma * x: one random number for each sample.

keep[b] is drawn again in the backward. Programs of a dropped sample write zeros for dx and for their partial row of
dgamma, and exit before they read anything; dresidual is the cotangent itself.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "droppath_rows",
    "family": "dropout_rng",
    "op": "drop_path",
    "schema": 1,
    "techniques": ("rng-replay", "two-stage-partials", "broadcast-reduction", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "residual", "gamma"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _drop_path_fwd(X, Res, Gamma, Y, S, D, p, scale, seed, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    sample = tl.program_id(2)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (s[:, None] < S) & (d[None, :] < D)
    at = (sample.to(tl.int64) * S + s[:, None]) * D + d[None, :]
    y = tl.load(Res + at, mask=ok, other=0.0).to(tl.float32)
    if tl.rand(seed, sample) >= p:
        gain = scale * tl.load(Gamma + d, mask=d < D, other=0.0).to(tl.float32)
        y += gain[None, :] * tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + at, y, mask=ok)


def _tile(D):
    block_d = max(16, min(512, triton.next_power_of_2(D)))
    return {"BLOCK_S": 4096 // block_d, "BLOCK_D": block_d}


def forward(x, residual, gamma, p, seed):
    x, residual = x.contiguous(), residual.contiguous()
    B, S, D = x.shape
    y = torch.empty_like(x)
    tile = _tile(D)
    grid = (triton.cdiv(D, tile["BLOCK_D"]), triton.cdiv(S, tile["BLOCK_S"]), B)
    _drop_path_fwd[grid](x, residual, gamma, y, S, D, p, 1.0 / (1.0 - p), seed, **tile)
    return y, (x, gamma, p, seed)


# --- backward ---
@triton.jit
def _drop_path_bwd(
    DY, X, Gamma, DX, Parts, S, D, dy_b, dy_s, dy_d, p, scale, seed, tiles_each,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(2)
    band = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    kept = tl.rand(seed, sample) >= p
    base = sample.to(tl.int64) * S
    part = Parts + (sample * tl.num_programs(1) + band).to(tl.int64) * D + d
    if not kept:
        tl.store(part, tl.zeros((BLOCK_D,), tl.float32), mask=d < D)
        for tile in range(band * tiles_each, (band + 1) * tiles_each):
            s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
            ok = (s[:, None] < S) & (d[None, :] < D)
            zeros = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
            tl.store(DX + (base + s[:, None]) * D + d[None, :], zeros, mask=ok)
        return
    gain = scale * tl.load(Gamma + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dgamma = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for tile in tl.range(band * tiles_each, (band + 1) * tiles_each, num_stages=4):
        s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        ok = (s[:, None] < S) & (d[None, :] < D)
        at = (base + s[:, None]) * D + d[None, :]
        dy_at = sample.to(tl.int64) * dy_b + s[:, None].to(tl.int64) * dy_s + d[None, :].to(tl.int64) * dy_d
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + at, dy * gain, mask=ok)
        dgamma += dy * tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(part, scale * tl.sum(dgamma, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    x, gamma, p, seed = saved
    B, S, D = x.shape
    tile = _tile(D)
    # Bands of a sample, so that its partial rows are few and the device is still full: some 1000 programs in all.
    tiles, columns = triton.cdiv(S, tile["BLOCK_S"]), triton.cdiv(D, tile["BLOCK_D"])
    tiles_each = triton.cdiv(tiles, max(1, min(tiles, triton.cdiv(1056, B * columns))))
    bands = triton.cdiv(tiles, tiles_each)
    dx = torch.empty_like(x)
    parts = torch.empty(B, bands, D, device=x.device, dtype=torch.float32)
    _drop_path_bwd[(columns, bands, B)](
        grad_y, x, gamma, dx, parts, S, D, *grad_y.stride(), p, 1.0 / (1.0 - p), seed, tiles_each, **tile, num_warps=4
    )
    return dx, grad_y, parts.sum((0, 1)).to(gamma.dtype)


# --- check ---
SWEEP = (
    {"B": 6, "S": 5, "D": 64},
    {"B": 5, "S": 7, "D": 83, "dtype": "float16"},
    {"B": 7, "S": 4, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "S": 4096, "D": 1024, "dtype": "bfloat16"},)


def make_args(B, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, S, D, generator=g), torch.randn(B, S, D, generator=g), torch.rand(D, generator=g))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.4, 17 + seed)


def _philox_uniform(seed, counters):
    """The first word of Philox4x32-10 at counters (i, 0, 0, 0), as a float in [0, 1), in 64-bit integer arithmetic."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
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
    signed = torch.where(c[0] >= 2**31, c[0] - 2**32, c[0])
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, residual, gamma, p, seed):
    keep = _philox_uniform(seed, torch.arange(x.shape[0], device=x.device)) >= p
    scale = (keep / (1.0 - p)).float()[:, None, None]
    return (residual.float() + scale * gamma.float() * x.float()).to(x.dtype)
