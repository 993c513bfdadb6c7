"""Mamba-2 step sizes: dt = clamp(softplus(raw + bias)), and the log decays a dt summed up inside each chunk.

A[l] = sum over s <= l of a dt[s]. With q[s] = sum over l >= s of dA[l], a reverse cumsum that ends with the chunk, and
ddt' the cotangent of dt itself, ddt = ddt' + a q and da = sum of dt q; draw = ddt sigmoid(raw + bias) where the clamp
was open, and dbias = sum of draw.

A program owns a chunk of a few heads. raw has the heads side by side, dt and A the steps: a tile is read one way and
written the other. The two parameters' sums leave as one row per chunk. Each of the two cotangents may be missing.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ssd_cumsum_dt",
    "family": "ssm_rnn",
    "op": "ssd_dt_cumsum",
    "schema": 1,
    "techniques": (
        "reverse-scan", "chunked", "recompute", "two-stage-partials", "optional-cotangent", "strided-cotangent",
    ),
    "saves": (),
    "grads": ("raw", "a", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _step_sizes(Raw, Bias, batch, step, h, first, T, H, LEN: tl.constexpr):
    """raw + bias as a tile (heads, steps), and where a step and a head are there at all."""
    inside = (h[:, None] < H) & (step[None, :] < LEN) & (first + step[None, :] < T)
    at = (batch * T + first + step[None, :]) * H + h[:, None]
    raw = tl.load(Raw + at, mask=inside, other=0.0).to(tl.float32)
    return raw + tl.load(Bias + h, mask=h < H, other=0.0)[:, None], inside, at


@triton.jit
def _chunk_cumsum_fwd(
    Raw, A, Bias, Dt, Sums, T, H, chunks, low, high, LEN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr
):
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    step = tl.arange(0, BLOCK_L)
    x, inside, _ = _step_sizes(Raw, Bias, batch, step, h, chunk * LEN, T, H, LEN)
    # Steps behind the sequence's end have dt 0, which neither decays nor adds.
    dt = tl.where(inside, tl.minimum(tl.maximum(_softplus(x), low), high), 0.0)
    a = tl.load(A + h, mask=h < H, other=0.0)
    to = ((batch * H + h[:, None]) * chunks + chunk) * LEN + step[None, :]
    whole = (h[:, None] < H) & (step[None, :] < LEN)
    tl.store(Dt + to, dt, mask=whole)
    tl.store(Sums + to, tl.cumsum(dt * a[:, None], 1), mask=whole)


def _tile(LEN, H):
    BLOCK_L = triton.next_power_of_2(LEN)
    # 32 bytes of neighbouring heads and at most 4096 numbers.
    BLOCK_H = max(1, min(16, triton.next_power_of_2(H), 4096 // BLOCK_L))
    return {"LEN": LEN, "BLOCK_H": BLOCK_H, "BLOCK_L": BLOCK_L, "num_warps": max(1, min(8, BLOCK_H * BLOCK_L // 512))}


def forward(raw, a, bias, chunk=256, low=1e-3, high=0.1):
    # raw (B, T, H); a, the negative decay rates, and bias (H) are kept in fp32. dt and A are (B, H, chunks, chunk).
    raw = raw.contiguous()
    B, T, H = raw.shape
    chunks = triton.cdiv(T, chunk)
    dt, sums = (torch.empty(B, H, chunks, chunk, device=raw.device, dtype=torch.float32) for _ in range(2))
    tile = _tile(chunk, H)
    _chunk_cumsum_fwd[(B * chunks, triton.cdiv(H, tile["BLOCK_H"]))](
        raw, a, bias, dt, sums, T, H, chunks, low, high, **tile
    )
    return (dt, sums), (raw, a, bias, chunk, low, high)


# --- backward ---
@triton.jit
def _chunk_cumsum_bwd(
    DDt, DSums, Raw, A, Bias, DRaw, Parts, T, H, chunks, low, high, d_b, d_h, d_c, d_l, s_b, s_h, s_c, s_l,
    HAS_DDT: tl.constexpr, HAS_DSUMS: tl.constexpr,
    LEN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    batch = cell // chunks
    chunk = tl.program_id(0) % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    step = tl.arange(0, BLOCK_L)
    x, inside, at = _step_sizes(Raw, Bias, batch, step, h, chunk * LEN, T, H, LEN)
    softplus = _softplus(x)
    dt = tl.minimum(tl.maximum(softplus, low), high)
    ddt = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    wide_h = h[:, None].to(tl.int64)
    wide_l = step[None, :].to(tl.int64)
    if HAS_DDT:
        source = DDt + batch * d_b + wide_h * d_h + chunk.to(tl.int64) * d_c + wide_l * d_l
        ddt += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if HAS_DSUMS:
        # Sums behind the sequence's end repeat its last one: their cotangents count.
        source = DSums + batch * s_b + wide_h * s_h + chunk.to(tl.int64) * s_c + wide_l * s_l
        dsums = tl.load(source, mask=(h[:, None] < H) & (step[None, :] < LEN), other=0.0).to(tl.float32)
        q = tl.cumsum(dsums, 1, reverse=True)
        ddt += tl.load(A + h, mask=h < H, other=0.0)[:, None] * q
        tl.store(Parts + 2 * cell * H + h, tl.sum(tl.where(inside, dt * q, 0.0), 1), mask=h < H)
    open_clamp = inside & (softplus >= low) & (softplus <= high)
    draw = tl.where(open_clamp, ddt * tl.sigmoid(x), 0.0)
    tl.store(DRaw + at, draw, mask=inside)
    tl.store(Parts + (2 * cell + 1) * H + h, tl.sum(draw, 1), mask=h < H)


def backward(saved, grad_dt, grad_sums, needs=None):
    raw, a, bias, chunk, low, high = saved
    B, T, H = raw.shape
    chunks = triton.cdiv(T, chunk)
    has_dt, has_sums = grad_dt is not None, grad_sums is not None
    draw = torch.empty_like(raw)
    parts = torch.empty(B * chunks, 2, H, device=raw.device, dtype=torch.float32)
    tile = _tile(chunk, H)
    _chunk_cumsum_bwd[(B * chunks, triton.cdiv(H, tile["BLOCK_H"]))](
        grad_dt, grad_sums, raw, a, bias, draw, parts, T, H, chunks, low, high,
        *(grad_dt.stride() if has_dt else (0, 0, 0, 0)), *(grad_sums.stride() if has_sums else (0, 0, 0, 0)),
        HAS_DDT=has_dt, HAS_DSUMS=has_sums, **tile,
    )  # fmt: skip
    return draw, parts[:, 0].sum(0) if has_sums else None, parts[:, 1].sum(0)


# --- check ---
SWEEP = (
    {"B": 2, "T": 64, "H": 8, "chunk": 32},
    {"B": 1, "T": 77, "H": 21, "chunk": 20, "dtype": "float16"},
    {"B": 2, "T": 50, "H": 5, "chunk": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "T": 8192, "H": 128, "chunk": 256, "dtype": "bfloat16"},)


def make_args(B, T, H, chunk, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Most steps lie between the clamp's ends, some beyond either.
    raw = (1.5 * torch.randn(B, T, H, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    a, bias = -1.0 - 15.0 * torch.rand(H, generator=g), torch.randn(H, generator=g) - 4.0
    return raw, a.to(device), bias.to(device), chunk


def reference(raw, a, bias, chunk=256, low=1e-3, high=0.1):
    B, T, H = raw.shape
    dt = torch.nn.functional.softplus(raw.float() + bias).clamp(low, high)
    dt = torch.nn.functional.pad(dt, (0, 0, 0, -T % chunk)).view(B, -1, chunk, H).permute(0, 3, 1, 2).contiguous()
    return dt, (dt * a[:, None, None]).cumsum(-1)
