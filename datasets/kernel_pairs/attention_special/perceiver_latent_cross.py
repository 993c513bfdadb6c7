"""Cross attention of few latents to a long input: keys are split in both directions, dq adds up partial rows.

A few hundred latents make too few query tiles to fill a device. The forward splits the keys: each split leaves its
unnormalised sum, its maximum and its weight, and a short launch combines them. The backward is one launch over key
tiles: all latents pass by, dk and dv are complete in one program, and its share of dq is added to the fp32 rows of
its split, which other splits do not touch. Latents may be shared by the batch: then the same sum over partial rows
runs over it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "perceiver_latent_cross",
    "family": "attention_special",
    "op": "latent_cross_attention",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "broadcast-reduction", "saved-lse", "recompute"),
    "saves": ("o: fp32 or bf16 (B, H, M, D)", "lse: fp32 (B, H, M)"),
    "grads": ("latents", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _channel_tile(X, row, end, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + row[:, None] * D + d[None, :], mask=(row[:, None] < end) & (d[None, :] < D), other=0.0)


@triton.jit
def _latent_split(
    Q, K, V, Sums, Tops, Norms, H, M, S, D, keys_each, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    # Latents have no batch axis.
    q = _channel_tile(Q + bh % H * M * D, m, M, D, BLOCK_D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * keys_each, S)
    for start in range(split * keys_each, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _channel_tile(K + bh * S * D, n, end, D, BLOCK_D)
        v = _channel_tile(V + bh * S * D, n, end, D, BLOCK_D)
        s = tl.where(n[None, :] < end, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    row = (split * tl.num_programs(2) + bh) * M + m
    tl.store(Sums + row[:, None] * D + d[None, :], acc, mask=(m[:, None] < M) & (d[None, :] < D))
    tl.store(Tops + row, top, mask=m < M)
    tl.store(Norms + row, norm, mask=m < M)


@triton.jit
def _latent_combine(Sums, Tops, Norms, Out, LSE, rows, D, splits, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = (r[:, None] < rows) & (d[None, :] < D)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(Tops + split * rows + r, mask=r < rows, other=0.0))
    norm = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for split in range(splits):
        weight = tl.exp2(tl.load(Tops + split * rows + r, mask=r < rows, other=0.0) - top)
        norm += weight * tl.load(Norms + split * rows + r, mask=r < rows, other=1.0)
        part = tl.load(Sums + (split * rows + r[:, None]) * D + d[None, :], mask=inside, other=0.0)
        acc += weight[:, None] * part
    tl.store(Out + r[:, None] * D + d[None, :], acc / norm[:, None], mask=inside)
    tl.store(LSE + r, top + tl.log2(norm), mask=r < rows)


def _blocks(k):
    """(latents of a tile, keys of a tile, warps)."""
    if k.shape[2] <= 512:
        return 16, 32, 4
    return (64, 64, 4) if k.element_size() == 2 and k.shape[3] <= 64 else (32, 64, 4)


def _splits(programs, S, block):
    """(splits, keys of each): two waves of programs on 132 processors, and no split without keys."""
    splits = max(1, min(triton.cdiv(S, block), triton.cdiv(264, programs)))
    keys = triton.cdiv(triton.cdiv(S, splits), block) * block
    return triton.cdiv(S, keys), keys


def forward(latents, k, v):
    latents, k, v = latents.contiguous(), k.contiguous(), v.contiguous()
    (H, M, D), (B, _, S, _) = latents.shape, k.shape
    BLOCK_M, BLOCK_N, warps = _blocks(k)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    splits, keys_each = _splits(triton.cdiv(M, BLOCK_M) * B * H, S, BLOCK_N)
    sums = torch.empty(splits, B, H, M, D, device=k.device, dtype=torch.float32)
    tops, norms = (torch.empty(splits, B, H, M, device=k.device, dtype=torch.float32) for _ in range(2))
    _latent_split[(triton.cdiv(M, BLOCK_M), splits, B * H)](
        latents, k, v, sums, tops, norms, H, M, S, D, keys_each, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    o = torch.empty(B, H, M, D, device=k.device, dtype=v.dtype)
    lse = torch.empty(B, H, M, device=k.device, dtype=torch.float32)
    _latent_combine[(triton.cdiv(lse.numel(), 16),)](
        sums, tops, norms, o, lse, lse.numel(), D, splits, BLOCK_R=16, BLOCK_D=BLOCK_D, num_warps=4
    )
    return o, (latents, k, v, o, lse)


# --- backward ---
@triton.jit
def _latent_bwd(
    Q, K, V, Out, DO, LSE, DQParts, DK, DV, H, M, S, D, keys_each, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    begin = split * keys_each
    end = tl.minimum(begin + keys_each, S)
    DQParts += (split * tl.num_programs(1) + bh) * M * D
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        k = _channel_tile(K + bh * S * D, n, end, D, BLOCK_D)
        v = _channel_tile(V + bh * S * D, n, end, D, BLOCK_D)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(0, M, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            q = _channel_tile(Q + bh % H * M * D, m, M, D, BLOCK_D)
            o = _channel_tile(Out + bh * M * D, m, M, D, BLOCK_D)
            do = _channel_tile(DO + bh * M * D, m, M, D, BLOCK_D)
            lse = tl.load(LSE + bh * M + m, mask=m < M, other=float("inf"))
            # Few rows, both tiles at hand: cheaper than a launch and a buffer for their dots.
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
            p = tl.exp2(tl.where(n[None, :] < end, s, float("-inf")))
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
            ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk)
            dq = tl.dot(ds, k) * scale
            at = m[:, None] * D + d[None, :]
            in_m = (m[:, None] < M) & (d[None, :] < D)
            if first > begin:
                dq += tl.load(DQParts + at, mask=in_m, other=0.0)
            tl.store(DQParts + at, dq, mask=in_m)
        kv_at = (bh * S + n[:, None]) * D + d[None, :]
        in_n = (n[:, None] < end) & (d[None, :] < D)
        tl.store(DK + kv_at, dk * scale, mask=in_n)
        tl.store(DV + kv_at, dv, mask=in_n)
        # The next key tile reads rows of dq that other threads of this program may have stored.
        tl.debug_barrier()


def backward(saved, grad_o, needs=None):
    latents, k, v, o, lse = saved
    (H, M, D), (B, _, S, _) = latents.shape, k.shape
    # Every program reads the whole cotangent of its head.
    do = grad_o.contiguous()
    BLOCK_M, BLOCK_N, warps = _blocks(k)
    splits, keys_each = _splits(B * H, S, BLOCK_N)
    parts = torch.empty(splits, B, H, M, D, device=k.device, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _latent_bwd[(splits, B * H)](
        latents, k, v, o, do, lse, parts, dk, dv, H, M, S, D, keys_each, D**-0.5, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        # Two accumulators and two score tiles of 64 x 64 want more registers than four warps have.
        num_warps=8 if BLOCK_M == 64 else warps, num_stages=2,
    )  # fmt: skip
    return parts.sum((0, 1)).to(latents.dtype), dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "M": 16, "S": 128, "D": 16},
    {"B": 3, "H": 90, "M": 11, "S": 71, "D": 4},
    {"B": 2, "H": 1, "M": 20, "S": 75, "D": 20, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 8, "M": 256, "S": 16384, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, M, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((H, M, D), (B, H, S, D), (B, H, S, D))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(latents, k, v):
    return torch.nn.functional.scaled_dot_product_attention(latents.expand(len(k), -1, -1, -1), k, v)
