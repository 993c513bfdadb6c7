"""Landmark attention: a block of past keys shares, by its own softmax, the weight that its landmark wins.

The landmarks of earlier blocks compete with the query's own block (causal) in one softmax; what landmark c wins is
handed to the keys of block c by a second softmax pi over that block. Both levels are one softmax over the scores

    e_ij = s_ij - logsumexp of s_i over block c + l_ic        (own block: e_ij = s_ij)

since a block's exp(e) add up to exp(l_ic). A tile is a block, so that the inner statistic and its gradient stay
inside: with de = p (dp - delta), dl_ic is the sum of de over the block, and ds_ij = de_ij - pi_ij dl_ic.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "landmark_grouped_softmax",
    "family": "attention_special",
    "op": "landmark_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "recompute", "delta-preprocess", "owner-grid", "loop-swap", "causal-bounds", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "landmarks"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "spills": "two accumulators and two owned tiles take all registers: 8 bytes a thread do not fit",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _block(X, c, T, L, s_t, s_d, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """The tokens of block c, zeros behind its end."""
    i = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    inside = (i[:, None] < L) & (c * L + i[:, None] < T) & (d[None, :] < D)
    return tl.load(X + (c * L + i[:, None]).to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _landmark(X, c, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + c * D + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _inner_softmax(q, k, L, scale_log2, BLOCK_L: tl.constexpr):
    """Scores of a past block, in units of log 2, less their logsumexp over the block: the logarithm of pi."""
    s = tl.dot(q, tl.trans(k)) * scale_log2
    s = tl.where(tl.arange(0, BLOCK_L)[None, :] < L, s, float("-inf"))
    top = tl.max(s, 1)
    return s - (top + tl.log2(tl.sum(tl.exp2(s - top[:, None]), 1)))[:, None]


@triton.jit
def _landmark_fwd(
    Q, K, V, Marks, Out, LSE, T, L, scale_log2, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr
):
    blocks = tl.num_programs(0)
    own = blocks - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Marks += head * blocks * D
    K += head * T * D
    V += head * T * D
    i = tl.arange(0, BLOCK_L)
    q = _block(Q + head * T * D, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    # The own block comes first: it has a finite score in every row.
    k = _block(K, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    v = _block(V, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    s = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    norm = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v)
    for c in range(own):
        k = _block(K, c, T, L, D, 1, D, BLOCK_L, BLOCK_D)
        v = _block(V, c, T, L, D, 1, D, BLOCK_L, BLOCK_D)
        won = tl.sum(q.to(tl.float32) * _landmark(Marks, c, D, BLOCK_D)[None, :], 1) * scale_log2
        pi = tl.exp2(_inner_softmax(q, k, L, scale_log2, BLOCK_L))
        # The block as a whole is one more score: `won` is its logarithm.
        higher = tl.maximum(top, won)
        fade = tl.exp2(top - higher)
        weight = tl.exp2(won - higher)
        norm = norm * fade + weight
        acc = tl.dot((pi * weight[:, None]).to(v.dtype), v, acc * fade[:, None])
        top = higher
    d = tl.arange(0, BLOCK_D)
    t = own * L + i
    in_block = (i < L) & (t < T)
    at = (head * T + t[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=in_block[:, None] & (d[None, :] < D))
    tl.store(LSE + head * T + t, top + tl.log2(norm), mask=in_block)


def _tiles(q, L):
    block = max(16, triton.next_power_of_2(L))
    return {
        "D": q.shape[3], "BLOCK_L": block, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "num_warps": 4 if block <= 64 else 8,
    }  # fmt: skip


def forward(q, k, v, landmarks, block):
    q, k, v, landmarks = q.contiguous(), k.contiguous(), v.contiguous(), landmarks.contiguous()
    B, H, T, D = q.shape
    if block > 128:
        raise ValueError(f"a block of {block} tokens does not fit one tile of 128")
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _landmark_fwd[(triton.cdiv(T, block), B * H)](
        q, k, v, landmarks, o, lse, T, block, D**-0.5 * 1.4426950408889634, **_tiles(q, block)
    )
    return o, (q, k, v, landmarks, o, lse, block)


# --- backward ---
@triton.jit
def _past_grads(q, do, lse, delta, k, v, mark, L, scale_log2, BLOCK_L: tl.constexpr):
    """(p, ds, dl) of queries and one past block: p, ds (queries, keys), dl (queries), without the scale."""
    log_pi = _inner_softmax(q, k, L, scale_log2, BLOCK_L)
    won = tl.sum(q.to(tl.float32) * mark[None, :], 1) * scale_log2 - lse
    p = tl.exp2(log_pi + won[:, None])
    de = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    dl = tl.sum(de, 1)
    return p, de - tl.exp2(log_pi) * dl[:, None], dl


@triton.jit
def _own_grads(q, do, lse, delta, k, v, scale_log2, BLOCK_L: tl.constexpr):
    i = tl.arange(0, BLOCK_L)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    p = tl.where(i[:, None] >= i[None, :], p, 0.0)
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _landmark_dq(
    Q, K, V, Marks, Out, DO, LSE, Delta, DQ, H, T, L, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0)
    own = blocks - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Marks += head * blocks * D
    K += head * T * D
    V += head * T * D
    q = _block(Q + head * T * D, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    o = _block(Out + head * T * D, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    do = _block(DO + head // H * do_b + head % H * do_h, own, T, L, do_t, do_d, D, BLOCK_L, BLOCK_D)
    i = tl.arange(0, BLOCK_L)
    t = own * L + i
    in_block = (i < L) & (t < T)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + t, delta, mask=in_block)
    lse = tl.load(LSE + head * T + t, mask=in_block, other=float("inf"))
    k = _block(K, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    v = _block(V, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    _, ds = _own_grads(q, do, lse, delta, k, v, scale_log2, BLOCK_L)
    dq = tl.dot(ds.to(k.dtype), k)
    for c in range(own):
        k = _block(K, c, T, L, D, 1, D, BLOCK_L, BLOCK_D)
        v = _block(V, c, T, L, D, 1, D, BLOCK_L, BLOCK_D)
        mark = _landmark(Marks, c, D, BLOCK_D)
        _, ds, dl = _past_grads(q, do, lse, delta, k, v, mark, L, scale_log2, BLOCK_L)
        dq = tl.dot(ds.to(k.dtype), k, dq) + dl[:, None] * mark[None, :]
    d = tl.arange(0, BLOCK_D)
    at = (head * T + t[:, None]) * D + d[None, :]
    tl.store(DQ + at, dq * scale, mask=in_block[:, None] & (d[None, :] < D))


@triton.jit
def _landmark_dkdv(
    Q, K, V, Marks, DO, LSE, Delta, DK, DV, DMarks, H, T, L, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0)
    own = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    Q += head * T * D
    DO += head // H * do_b + head % H * do_h
    i = tl.arange(0, BLOCK_L)
    d = tl.arange(0, BLOCK_D)
    k = _block(K + head * T * D, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    v = _block(V + head * T * D, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    mark = _landmark(Marks + head * blocks * D, own, D, BLOCK_D)
    t = own * L + i
    # Infinity for rows that are not there makes their weights exact zeros.
    lse = tl.load(LSE + head * T + t, mask=(i < L) & (t < T), other=float("inf"))
    delta = tl.load(Delta + head * T + t, mask=(i < L) & (t < T), other=0.0)
    q = _block(Q, own, T, L, D, 1, D, BLOCK_L, BLOCK_D)
    do = _block(DO, own, T, L, do_t, do_d, D, BLOCK_L, BLOCK_D)
    # The own block stands before the loop: no branch parts the products that are in flight there.
    p, ds = _own_grads(q, do, lse, delta, k, v, scale_log2, BLOCK_L)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do)
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q)
    dmark = tl.zeros((BLOCK_D,), tl.float32)
    for c in range(own + 1, blocks):
        q = _block(Q, c, T, L, D, 1, D, BLOCK_L, BLOCK_D)
        do = _block(DO, c, T, L, do_t, do_d, D, BLOCK_L, BLOCK_D)
        in_block = (i < L) & (c * L + i < T)
        lse = tl.load(LSE + head * T + c * L + i, mask=in_block, other=float("inf"))
        delta = tl.load(Delta + head * T + c * L + i, mask=in_block, other=0.0)
        p, ds, dl = _past_grads(q, do, lse, delta, k, v, mark, L, scale_log2, BLOCK_L)
        dmark += tl.sum(q.to(tl.float32) * dl[:, None], 0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
    at = (head * T + t[:, None]) * D + d[None, :]
    inside = ((i < L) & (t < T))[:, None] & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)
    tl.store(DMarks + (head * blocks + own) * D + d, dmark * scale, mask=d < D)


def backward(saved, grad_o, needs=None):
    q, k, v, landmarks, o, lse, block = saved
    _, need_k, need_v, need_marks = needs or (True,) * 4
    B, H, T, D = q.shape
    grid = (triton.cdiv(T, block), B * H)
    sizes = (H, T, block, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _landmark_dq[grid](q, k, v, landmarks, o, grad_o, lse, delta, dq, *sizes, **_tiles(q, block))
    if not (need_k or need_v or need_marks):
        return dq, None, None, None
    dk, dv, dmarks = torch.empty_like(k), torch.empty_like(v), torch.empty_like(landmarks)
    # Two accumulators more than dq: twice the warps hold them.
    tiles = _tiles(q, block) | {"num_warps": 8}
    _landmark_dkdv[grid](q, k, v, landmarks, grad_o, lse, delta, dk, dv, dmarks, *sizes, **tiles)
    return dq, dk, dv, dmarks


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 16, "block": 16},
    {"B": 2, "H": 1, "T": 49, "D": 20, "block": 11},
    {"B": 1, "H": 2, "T": 40, "D": 16, "block": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 2048, "D": 64, "block": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, block, dtype="float32", device="cpu", seed=0):
    if not 0 < block <= 128:
        raise ValueError("a block has 1 to 128 tokens")
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, H, T, D) for _ in range(3)), (B, H, -(-T // block), D))
    return (*(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes), block)


def reference(q, k, v, landmarks, block):
    T, scale = q.shape[2], q.shape[3] ** -0.5
    blocks = landmarks.shape[2]
    s = (q @ k.transpose(-1, -2)).float() * scale
    won = (q @ landmarks.transpose(-1, -2)).float() * scale
    t = torch.arange(T, device=q.device)
    inner = torch.nn.functional.pad(s, (0, blocks * block - T), value=float("-inf")).unflatten(-1, (blocks, block))
    grouped = (inner.log_softmax(-1) + won[..., None]).flatten(-2)[..., :T]
    ahead = t[:, None] // block - t[None, :] // block
    e = torch.where(ahead > 0, grouped, torch.where(t[:, None] >= t[None, :], s, float("-inf")))
    return (e.masked_fill(ahead < 0, float("-inf")).softmax(-1)).to(v.dtype) @ v
