"""Attention pooling by a learned query: tokens are keys and values at once, and get both gradients in one pass.

y[b] = sum over t of p[t] x[t], p = softmax(x q scale). A token's gradient is p dy, as a value, plus ds q, as a key,
with ds = scale p (x dy - y dy): both products with x come from the one tile that is loaded, and p from the saved
log-sum-exp. Programs own pieces of a sequence; the forward's pieces meet as softmax partials, those of dq, sums of ds
x, as rows that are added up.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "attention_pool_query",
    "family": "pool_vision",
    "op": "attention_pool",
    "schema": 1,
    "techniques": ("saved-lse", "saved-output", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": ("pooled: fp32 (B, D)", "lse: fp32 (B,)"),
    "grads": ("x", "query"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pool_pieces(
    X, Query, Sums, Tops, Norms, T, D, scale, PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(T, PIECE)
    batch = (tl.program_id(0) // pieces).to(tl.int64)
    first = tl.program_id(0) % pieces * PIECE
    d = tl.arange(0, BLOCK_D)
    query = tl.load(Query + d, mask=d < D, other=0.0).to(tl.float32) * scale
    # Each row of the tile keeps a softmax of its own, so that threads of different rows meet once, after the loop. A
    # finite start lets rows without any token weigh nothing instead of becoming infinity minus infinity.
    tops = tl.full((BLOCK_T,), -1e30, tl.float32)
    norms = tl.zeros((BLOCK_T,), tl.float32)
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(first, tl.minimum(first + PIECE, T), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        x_at = (batch * T + t[:, None]) * D + d[None, :]
        x = tl.load(X + x_at, mask=(t[:, None] < T) & (d[None, :] < D), other=0.0).to(tl.float32)
        s = tl.where(t < T, tl.sum(x * query[None, :], 1), -1e30)
        new_tops = tl.maximum(tops, s)
        shrink = tl.exp(tops - new_tops)
        p = tl.exp(s - new_tops)
        norms = norms * shrink + p
        sums = sums * shrink[:, None] + p[:, None] * x
        tops = new_tops
    top = tl.max(tops, 0)
    shrink = tl.exp(tops - top)
    norm = tl.sum(norms * shrink, 0)
    acc = tl.sum(sums * shrink[:, None], 0)
    tl.store(Sums + tl.program_id(0).to(tl.int64) * D + d, acc, mask=d < D)
    tl.store(Tops + tl.program_id(0), top)
    tl.store(Norms + tl.program_id(0), norm)


@triton.jit
def _pool_join(Sums, Tops, Norms, Y, Pooled, LSE, D, pieces, LANES: tl.constexpr, BLOCK_D: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lane = tl.arange(0, LANES)
    tops = tl.load(Tops + batch * pieces + lane, mask=lane < pieces, other=float("-inf"))
    top = tl.max(tops, 0)
    norms = tl.load(Norms + batch * pieces + lane, mask=lane < pieces, other=0.0)
    norm = tl.sum(norms * tl.exp(tops - top), 0)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for piece in range(pieces):
        row = batch * pieces + piece
        total += tl.load(Sums + row * D + d, mask=d < D, other=0.0) * tl.exp(tl.load(Tops + row) - top)
    tl.store(Y + batch * D + d, total / norm, mask=d < D)
    tl.store(Pooled + batch * D + d, total / norm, mask=d < D)
    tl.store(LSE + batch, top + tl.log(norm), mask=tl.program_id(1) == 0)


def _tiles(D):
    # Tile and sums take 32 registers each of 4 warps; a piece is long against the row of partials that it leaves.
    BLOCK_D = triton.next_power_of_2(D)
    return {"PIECE": 128, "BLOCK_T": max(1, min(16, 4096 // BLOCK_D)), "BLOCK_D": BLOCK_D, "num_warps": 4}


def forward(x, query):
    x, query = x.contiguous(), query.contiguous()
    B, T, D = x.shape
    tiles = _tiles(D)
    pieces = triton.cdiv(T, tiles["PIECE"])
    y = torch.empty(B, D, device=x.device, dtype=x.dtype)
    pooled = torch.empty(B, D, device=x.device, dtype=torch.float32)
    lse = torch.empty(B, device=x.device, dtype=torch.float32)
    sums = torch.empty(B * pieces, D, device=x.device, dtype=torch.float32)
    tops, norms = torch.empty(2, B * pieces, device=x.device, dtype=torch.float32)
    _pool_pieces[(B * pieces,)](x, query, sums, tops, norms, T, D, D**-0.5, **tiles)
    BLOCK_D = min(256, tiles["BLOCK_D"])
    _pool_join[(B, triton.cdiv(D, BLOCK_D))](
        sums, tops, norms, y, pooled, lse, D, pieces, LANES=triton.next_power_of_2(pieces), BLOCK_D=BLOCK_D, num_warps=2
    )
    return y, (x, query, pooled, lse)


# --- backward ---
@triton.jit
def _pool_bwd(
    DY, X, Query, Pooled, LSE, DX, Parts, T, D, scale, dy_b, dy_d,
    PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(T, PIECE)
    batch = (tl.program_id(0) // pieces).to(tl.int64)
    first = tl.program_id(0) % pieces * PIECE
    d = tl.arange(0, BLOCK_D)
    query = tl.load(Query + d, mask=d < D, other=0.0).to(tl.float32) * scale
    dy = tl.load(DY + batch * dy_b + d.to(tl.int64) * dy_d, mask=d < D, other=0.0).to(tl.float32)
    lse = tl.load(LSE + batch)
    delta = tl.sum(dy * tl.load(Pooled + batch * D + d, mask=d < D, other=0.0), 0)
    dquery = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(first, tl.minimum(first + PIECE, T), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = (batch * T + t[:, None]) * D + d[None, :]
        inside = (t[:, None] < T) & (d[None, :] < D)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(x * query[None, :], 1) - lse)
        ds = p * (tl.sum(x * dy[None, :], 1) - delta)
        # Tokens behind the last one are zeros here: they add nothing.
        dquery += ds[:, None] * x
        tl.store(DX + at, p[:, None] * dy[None, :] + ds[:, None] * query[None, :], mask=inside)
    tl.store(Parts + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dquery, 0) * scale, mask=d < D)


def backward(saved, grad_y, needs=None):
    x, query, pooled, lse = saved
    B, T, D = x.shape
    tiles = _tiles(D)
    pieces = triton.cdiv(T, tiles["PIECE"])
    dx = torch.empty_like(x)
    parts = torch.empty(B * pieces, D, device=x.device, dtype=torch.float32)
    _pool_bwd[(B * pieces,)](grad_y, x, query, pooled, lse, dx, parts, T, D, D**-0.5, *grad_y.stride(), **tiles)
    return dx, parts.sum(0).to(query.dtype)


# --- check ---
SWEEP = (
    {"B": 3, "T": 32, "D": 64},
    {"B": 2, "T": 301, "D": 77},
    {"B": 2, "T": 20, "D": 16, "dtype": "bfloat16"},
    {"B": 1, "T": 150, "D": 24, "dtype": "float16"},
)
BENCH = ({"B": 256, "T": 576, "D": 1024, "dtype": "bfloat16"},)


def make_args(B, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, D, generator=g), torch.randn(D, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, query):
    D = x.shape[2]
    p = (x.float() @ query.float() * D**-0.5).softmax(1)
    return (p[:, :, None] * x.float()).sum(1).to(x.dtype)
