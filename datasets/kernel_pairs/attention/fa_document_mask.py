"""Causal attention inside documents: tiles know the least and greatest id they hold, and disjoint ranges are skipped.

Each position has a document id, in any order (packed samples, interleaved turns). A small launch takes the least and
greatest id of every tile; a pair of tiles whose ranges do not meet has no visible pair and costs two scalars instead
of two products, and one whose ranges are the same single id, off the diagonal, needs no mask. Forward, dq and dk/dv
classify the same tiles from the same table: nothing about the mask is saved but the ids.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_document_mask",
    "family": "attention",
    "op": "document_attention",
    "schema": 1,
    "techniques": (
        "masking", "causal-bounds", "saved-lse", "saved-statistics", "loop-swap", "owner-grid", "recompute",
        "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)", "ranges: i32 (B, tiles, 2)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _id_ranges(Ids, Ranges, T, BLOCK: tl.constexpr):
    # Least and greatest id of each tile; what lies past T counts for neither.
    batch = tl.program_id(1)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(Ids + batch * T + t, mask=t < T, other=0)
    at = 2 * (batch * tl.num_programs(0) + tl.program_id(0))
    tl.store(Ranges + at, tl.min(tl.where(t < T, ids, 2147483647), 0))
    tl.store(Ranges + at + 1, tl.max(tl.where(t < T, ids, -2147483648), 0))


@triton.jit
def _meeting(Ranges, a, b):
    """(whether tiles a and b can share a document, whether they are one and the same document)."""
    a_least, a_most = tl.load(Ranges + 2 * a), tl.load(Ranges + 2 * a + 1)
    b_least, b_most = tl.load(Ranges + 2 * b), tl.load(Ranges + 2 * b + 1)
    return (a_least <= b_most) & (b_least <= a_most), (a_least == b_most) & (b_least == a_most)


@triton.jit
def _tile(X, tile, T, s_t, s_d, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tile * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _visible(Ids, query_tile, key_tile, T, BLOCK: tl.constexpr):
    """(BLOCK, BLOCK): same document, and not later. Queries along the rows."""
    m = query_tile * BLOCK + tl.arange(0, BLOCK)
    n = key_tile * BLOCK + tl.arange(0, BLOCK)
    query_id = tl.load(Ids + m, mask=m < T, other=0)
    key_id = tl.load(Ids + n, mask=n < T, other=0)
    return (query_id[:, None] == key_id[None, :]) & (m[:, None] >= n[None, :])


@triton.jit
def _document_fwd(
    Q, K, V, Ids, Ranges, Out, LSE, H, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    tiles = tl.num_programs(0)
    own = tiles - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Ids += head // H * T
    Ranges += head // H * tiles * 2
    K += head * T * D
    V += head * T * D
    q = _tile(Q + head * T * D, own, T, D, 1, D, BLOCK, BLOCK_D)
    # The diagonal tile comes first: every query sees itself there, and the maximum is finite from then on.
    s = tl.dot(q, tl.trans(_tile(K, own, T, D, 1, D, BLOCK, BLOCK_D))) * scale_log2
    m = own * BLOCK + tl.arange(0, BLOCK)
    s = tl.where(_visible(Ids, own, own, T, BLOCK), s, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    norm = tl.sum(p, 1)
    v = _tile(V, own, T, D, 1, D, BLOCK, BLOCK_D)
    acc = tl.dot(p.to(v.dtype), v)
    for tile in range(own):
        meets, same = _meeting(Ranges, own, tile)
        if meets:
            k = _tile(K, tile, T, D, 1, D, BLOCK, BLOCK_D)
            s = tl.dot(q, tl.trans(k)) * scale_log2
            if not same:
                s = tl.where(_visible(Ids, own, tile, T, BLOCK), s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            norm = norm * fade + tl.sum(p, 1)
            v = _tile(V, tile, T, D, 1, D, BLOCK, BLOCK_D)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            top = higher
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _tiles(q):
    """One square tile for all launches, since they share the table of ranges."""
    sizes = {"D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}
    if q.shape[2] <= 256:
        return sizes | {"BLOCK": 16, "num_warps": 4}
    return sizes | {"BLOCK": 64 if q.element_size() == 2 else 32, "num_warps": 4}


def forward(q, k, v, ids):
    q, k, v, ids = q.contiguous(), k.contiguous(), v.contiguous(), ids.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    sizes = _tiles(q)
    tiles = triton.cdiv(T, sizes["BLOCK"])
    ranges = torch.empty(B, tiles, 2, device=q.device, dtype=torch.int32)
    _id_ranges[(tiles, B)](ids, ranges, T, BLOCK=sizes["BLOCK"], num_warps=1)
    _document_fwd[(tiles, B * H)](q, k, v, ids, ranges, o, lse, H, T, D**-0.5 * 1.4426950408889634, **sizes)
    return o, (q, k, v, ids, o, lse, ranges)


# --- backward ---
@triton.jit
def _document_dq(
    Q, K, V, Ids, Ranges, Out, DO, LSE, Delta, DQ, H, T, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.num_programs(0)
    own = tiles - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Ids += head // H * T
    Ranges += head // H * tiles * 2
    K += head * T * D
    V += head * T * D
    q = _tile(Q + head * T * D, own, T, D, 1, D, BLOCK, BLOCK_D)
    o = _tile(Out + head * T * D, own, T, D, 1, D, BLOCK, BLOCK_D)
    do = _tile(DO + head // H * do_b + head % H * do_h, own, T, do_t, do_d, D, BLOCK, BLOCK_D)
    m = own * BLOCK + tl.arange(0, BLOCK)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for tile in range(own + 1):
        meets, same = _meeting(Ranges, own, tile)
        if meets:
            k = _tile(K, tile, T, D, 1, D, BLOCK, BLOCK_D)
            v = _tile(V, tile, T, D, 1, D, BLOCK, BLOCK_D)
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
            if (tile == own) | (not same):
                p = tl.where(_visible(Ids, own, tile, T, BLOCK), p, 0.0)
            ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _document_dkdv(
    Q, K, V, Ids, Ranges, DO, LSE, Delta, DK, DV, H, T, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.num_programs(0)
    own = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Ids += head // H * T
    Ranges += head // H * tiles * 2
    Q += head * T * D
    DO += head // H * do_b + head % H * do_h
    k = _tile(K + head * T * D, own, T, D, 1, D, BLOCK, BLOCK_D)
    v = _tile(V + head * T * D, own, T, D, 1, D, BLOCK, BLOCK_D)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for tile in range(own, tiles):
        meets, same = _meeting(Ranges, own, tile)
        if meets:
            m = tile * BLOCK + tl.arange(0, BLOCK)
            q = _tile(Q, tile, T, D, 1, D, BLOCK, BLOCK_D)
            do = _tile(DO, tile, T, do_t, do_d, D, BLOCK, BLOCK_D)
            lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
            delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
            if (tile == own) | (not same):
                p = tl.where(_visible(Ids, tile, own, T, BLOCK), p, 0.0)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
            ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
    n = own * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, ids, o, lse, ranges = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    grid = (ranges.shape[1], B * H)
    sizes = (H, T, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _document_dq[grid](q, k, v, ids, ranges, o, grad_o, lse, delta, dq, *sizes, **_tiles(q))
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _document_dkdv[grid](q, k, v, ids, ranges, grad_o, lse, delta, dk, dv, *sizes, **_tiles(q))
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 80, "D": 16, "length": 37},
    {"B": 2, "H": 1, "T": 75, "D": 20, "length": 9},
    {"B": 1, "H": 2, "T": 64, "D": 16, "length": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 4096, "D": 64, "length": 500, "dtype": "bfloat16"},)


def make_args(B, H, T, D, length, dtype="float32", device="cpu", seed=0):
    if length < 1:
        raise ValueError("a document has at least one token")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    # Documents of `length` tokens, each row cut at another offset; every third begins again as the one before.
    offset = torch.randint(0, length, (B, 1), generator=g)
    ids = (torch.arange(T) + offset) // length
    return q, k, v, torch.where(ids % 3 == 2, ids - 1, ids).to(device, torch.int32)


def reference(q, k, v, ids):
    T = q.shape[2]
    seen = (ids[:, :, None] == ids[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
