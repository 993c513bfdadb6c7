"""Lightning attention: exact products inside a tile, a decayed running state between tiles, both ways in one launch.

    o_i = sum over j <= i of g^(i - j) (q_i . k_j) v_j

A program keeps a whole (K, V) state in registers while it walks the tiles. In the backward the programs of direction
0 walk forwards with the state k^T v and write dq; those of direction 1 walk backwards with the state q^T do and write
dk and dv. No state goes through memory, and the two directions of one head run side by side.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lightning2_intra_inter",
    "family": "linear_attention",
    "op": "lightning_attention",
    "schema": 1,
    "techniques": ("chunked", "reverse-scan", "recompute", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile_decays(slope, TILE: tl.constexpr):
    # Powers of the decay exp(-slope) inside a tile: from its begin, to its end, across it, and between its tokens.
    i = tl.arange(0, TILE)
    from_begin = tl.exp(-slope * (i + 1).to(tl.float32))
    to_end = tl.exp(-slope * (TILE - 1 - i).to(tl.float32))
    ago = (i[:, None] - i[None, :]).to(tl.float32)
    within = tl.where(ago >= 0, tl.exp(-slope * tl.maximum(ago, 0.0)), 0.0)
    return from_begin[:, None], to_end[:, None], tl.exp(-slope * TILE), within


@triton.jit
def _lightning_fwd(
    Q, K, V, Slopes, Out, H, T, DK, DV, TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    from_begin, to_end, across, within = _tile_decays(tl.load(Slopes + head % H).to(tl.float32), TILE)
    c = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for start in range(0, T, TILE):
        t = start + tl.arange(0, TILE)
        in_k = (t[:, None] < T) & (c[None, :] < DK)
        in_v = (t[:, None] < T) & (e[None, :] < DV)
        q = tl.load(Q + (head * T + t[:, None]) * DK + c[None, :], mask=in_k, other=0.0)
        k = tl.load(K + (head * T + t[:, None]) * DK + c[None, :], mask=in_k, other=0.0)
        v = tl.load(V + (head * T + t[:, None]) * DV + e[None, :], mask=in_v, other=0.0)
        intra = (tl.dot(q, tl.trans(k)) * within).to(v.dtype)
        out = tl.dot(intra, v, tl.dot(q, state.to(q.dtype)) * from_begin)
        tl.store(Out + (head * T + t[:, None]) * DV + e[None, :], out, mask=in_v)
        state = tl.dot(tl.trans(k), (v * to_end).to(v.dtype), state * across)


def _blocks(q, v):
    """(TILE, BLOCK_K, BLOCK_V) with whole key channels."""
    tile = 16 if q.shape[2] <= 256 else 128 // q.element_size()
    return tile, *(max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))


def forward(q, k, v, slopes):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    out = torch.empty_like(v)
    TILE, BLOCK_K, BLOCK_V = _blocks(q, v)
    # Columns of the output are independent of one another: slabs of them are more programs.
    BLOCK_V = min(BLOCK_V, 32)
    _lightning_fwd[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, slopes, out, H, T, DK, DV, TILE=TILE, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4, num_stages=2
    )
    return out, (q, k, v, slopes)


# --- backward ---
@triton.jit
def _lightning_bwd(
    Q, K, V, DO, Slopes, DQ, DKey, DVal, H, T, DK, DV, do_b, do_h, do_t, do_e,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    from_begin, to_end, across, within = _tile_decays(tl.load(Slopes + head % H).to(tl.float32), TILE)
    c = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    DO += head // H * do_b + head % H * do_h
    tiles = tl.cdiv(T, TILE)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.program_id(0) == 0:
        for tile in range(tiles):
            t = tile * TILE + tl.arange(0, TILE)
            in_k = (t[:, None] < T) & (c[None, :] < DK)
            in_v = (t[:, None] < T) & (e[None, :] < DV)
            at_k = (head * T + t[:, None]) * DK + c[None, :]
            k = tl.load(K + at_k, mask=in_k, other=0.0)
            v = tl.load(V + (head * T + t[:, None]) * DV + e[None, :], mask=in_v, other=0.0)
            do = tl.load(DO + t[:, None].to(tl.int64) * do_t + e[None, :] * do_e, mask=in_v, other=0.0)
            dscores = (tl.dot(do, tl.trans(v)) * within).to(k.dtype)
            dq = tl.dot(dscores, k, tl.dot(do, tl.trans(state.to(do.dtype))) * from_begin)
            tl.store(DQ + at_k, dq, mask=in_k)
            state = tl.dot(tl.trans((k * to_end).to(k.dtype)), v, state * across)
    else:
        for back in range(tiles):
            t = (tiles - 1 - back) * TILE + tl.arange(0, TILE)
            in_k = (t[:, None] < T) & (c[None, :] < DK)
            in_v = (t[:, None] < T) & (e[None, :] < DV)
            at_k = (head * T + t[:, None]) * DK + c[None, :]
            at_v = (head * T + t[:, None]) * DV + e[None, :]
            q = tl.load(Q + at_k, mask=in_k, other=0.0)
            k = tl.load(K + at_k, mask=in_k, other=0.0)
            v = tl.load(V + at_v, mask=in_v, other=0.0)
            do = tl.load(DO + t[:, None].to(tl.int64) * do_t + e[None, :] * do_e, mask=in_v, other=0.0)
            # What this tile's state passes on reaches later tiles only: they are in the state already.
            reaching = state.to(q.dtype)
            dscores = (tl.dot(do, tl.trans(v)) * within).to(q.dtype)
            dk = tl.dot(tl.trans(dscores), q, tl.dot(v, tl.trans(reaching)) * to_end)
            tl.store(DKey + at_k, dk, mask=in_k)
            scores = (tl.dot(q, tl.trans(k)) * within).to(do.dtype)
            dv = tl.dot(tl.trans(scores), do, tl.dot(k, reaching) * to_end)
            tl.store(DVal + at_v, dv, mask=in_v)
            state = tl.dot(tl.trans((q * from_begin).to(q.dtype)), do, state * across)


def backward(saved, grad_out, needs=None):
    q, k, v, slopes = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    TILE, BLOCK_K, BLOCK_V = _blocks(q, v)
    _lightning_bwd[(2, B * H)](
        q, k, v, grad_out, slopes, dq, dk, dv, H, T, DK, DV, *grad_out.stride(),
        TILE=TILE, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=8 if BLOCK_K * BLOCK_V >= 4096 else 4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 3, "T": 43, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # Slopes as ALiBi's: a geometric sequence from 2^(-8 / H) to 2^-8.
    return q, k, v, torch.exp2(-8.0 * (torch.arange(H) + 1.0) / H).to(device)


def reference(q, k, v, slopes):
    # Chunks of 64 tokens: dense within, states with a fixed decay between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    rate = -slopes.float()[:, None, None]
    token, chunk = (torch.arange(n, device=q.device) for n in (size, q.shape[2]))

    def decay(steps):
        return (rate * steps).masked_fill(steps < 0, float("-inf")).exp()

    within = ((q @ k.transpose(-1, -2)).float() * decay(token[:, None] - token)[:, None]).to(v.dtype) @ v
    added = (k * decay(size - 1 - token[:, None])[:, None]).to(k.dtype).transpose(-1, -2) @ v
    passed = decay(size * (chunk[:, None] - 1 - chunk))
    states = torch.einsum("hcd,bhdkv->bhckv", passed, added.float()).to(q.dtype)
    out = within + (q * decay(token[:, None] + 1)[:, None]).to(q.dtype) @ states
    return out.flatten(2, 3)[:, :, :T]
