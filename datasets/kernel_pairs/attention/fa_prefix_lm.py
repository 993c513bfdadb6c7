"""Prefix LM: the first tokens of each sequence see one another both ways, the rest is causal behind them.

Key j is visible to query i if j <= i or j < prefix. That makes three kinds of tiles. For a tile of queries: those up
to max(prefix, its first query) are whole and take no mask, one band of tiles holds both borders, the rest is never
touched. Seen from a tile of keys it is the reverse: inside the prefix every query is behind the border, and the walk
begins at 0; outside it begins at the diagonal. The prefix length is read per sequence, on the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_prefix_lm",
    "family": "attention",
    "op": "prefix_lm_attention",
    "schema": 1,
    "techniques": (
        "causal-bounds", "masking", "varlen", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid",
        "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _strip(X, first, T, s_t, s_d, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _query_bounds(first, prefix, T, OWN: tl.constexpr, STEP: tl.constexpr):
    """(end of the keys that all queries of the tile see, in whole steps; end of those that any sees)."""
    whole = tl.maximum(prefix, first + 1) // STEP * STEP
    return tl.minimum(whole, T // STEP * STEP), tl.minimum(tl.maximum(prefix, first + OWN), T)


@triton.jit
def _hide(s, m, n, prefix, T):
    return tl.where(((n <= m) | (n < prefix)) & (n < T), s, float("-inf"))


@triton.jit
def _grow(q, K, V, start, top, norm, acc, m, prefix, T, scale_log2, MASKED: tl.constexpr, D: tl.constexpr,
          STEP: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    k = _strip(K, start, T, D, 1, D, STEP, BLOCK_D)
    v = _strip(V, start, T, D, 1, D, STEP, BLOCK_D)
    s = tl.dot(q, tl.trans(k)) * scale_log2
    if MASKED:
        s = _hide(s, m[:, None], start + tl.arange(0, STEP)[None, :], prefix, T)
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, norm * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def _prefix_fwd(
    Q, K, V, Prefix, Out, LSE, H, T, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    head = tl.program_id(1).to(tl.int64)
    prefix = tl.load(Prefix + head // H)
    K += head * T * D
    V += head * T * D
    m = first + tl.arange(0, OWN)
    q = _strip(Q + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
    whole, end = _query_bounds(first, prefix, T, OWN, STEP)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, whole, STEP):
        top, norm, acc = _grow(q, K, V, start, top, norm, acc, m, prefix, T, scale_log2, False, D, STEP, BLOCK_D)
    for start in range(whole, end, STEP):
        top, norm, acc = _grow(q, K, V, start, top, norm, acc, m, prefix, T, scale_log2, True, D, STEP, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _tiles(q):
    T, D = q.shape[2:]
    sizes = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    if T <= 256:
        return sizes | {"OWN": 32, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if D <= 64 else 32, "num_warps": 8}


def forward(q, k, v, prefix):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q)
    _prefix_fwd[(triton.cdiv(T, tiles["OWN"]), B * H)](
        q, k, v, prefix, o, lse, H, T, D**-0.5 * 1.4426950408889634, **tiles
    )
    return o, (q, k, v, prefix, o, lse)


# --- backward ---
@triton.jit
def _prefix_delta(
    Out, DO, Delta, H, T, do_b, do_h, do_t, do_d, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    o = _strip(Out + head * T * D, first, T, D, 1, D, ROWS, BLOCK_D).to(tl.float32)
    do = _strip(DO + head // H * do_b + head % H * do_h, first, T, do_t, do_d, D, ROWS, BLOCK_D).to(tl.float32)
    m = first + tl.arange(0, ROWS)
    tl.store(Delta + head * T + m, tl.sum(o * do, 1), mask=m < T)


@triton.jit
def _prefix_dq(
    Q, K, V, Prefix, DO, LSE, Delta, DQ, H, T, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    head = tl.program_id(1).to(tl.int64)
    prefix = tl.load(Prefix + head // H)
    K += head * T * D
    V += head * T * D
    m = first + tl.arange(0, OWN)
    q = _strip(Q + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
    do = _strip(DO + head // H * do_b + head % H * do_h, first, T, do_t, do_d, D, OWN, BLOCK_D)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    whole, end = _query_bounds(first, prefix, T, OWN, STEP)
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, whole, STEP):
        k = _strip(K, start, T, D, 1, D, STEP, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        ds = p * (tl.dot(do, tl.trans(_strip(V, start, T, D, 1, D, STEP, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    for start in range(whole, end, STEP):
        k = _strip(K, start, T, D, 1, D, STEP, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(_hide(s, m[:, None], start + tl.arange(0, STEP)[None, :], prefix, T))
        ds = p * (tl.dot(do, tl.trans(_strip(V, start, T, D, 1, D, STEP, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _prefix_dkdv(
    Q, K, V, Prefix, DO, LSE, Delta, DK, DV, H, T, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    prefix = tl.load(Prefix + head // H)
    Q += head * T * D
    DO += head // H * do_b + head % H * do_h
    n = first + tl.arange(0, OWN)
    k = _strip(K + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
    v = _strip(V + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    # A tile that begins inside the prefix has keys that all queries see; its other keys are masked.
    begin = tl.where(first < prefix, 0, first // STEP * STEP)
    all_seen = first + OWN <= prefix
    for start in range(begin, T, STEP):
        m = start + tl.arange(0, STEP)
        q = _strip(Q, start, T, D, 1, D, STEP, BLOCK_D)
        do = _strip(DO, start, T, do_t, do_d, D, STEP, BLOCK_D)
        # Infinity for queries past T makes their probabilities exact zeros.
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        if not (all_seen | (start >= first + OWN - 1)):
            s = _hide(s, m[None, :], n[:, None], prefix, T)
        p = tl.exp2(s)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, prefix, o, lse = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    tiles = _tiles(q)
    grid = (triton.cdiv(T, tiles["OWN"]), B * H)
    strides, scales = grad_o.stride(), (D**-0.5, D**-0.5 * 1.4426950408889634)
    delta = torch.empty_like(lse)
    _prefix_delta[(triton.cdiv(T, 64), B * H)](o, grad_o, delta, H, T, *strides, D=D, BLOCK_D=tiles["BLOCK_D"], ROWS=64)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _prefix_dq[grid](q, k, v, prefix, grad_o, lse, delta, dq, H, T, *strides, *scales, **tiles)
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _prefix_dkdv[grid](q, k, v, prefix, grad_o, lse, delta, dk, dv, H, T, *strides, *scales, **tiles)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 2, "H": 1, "T": 64, "D": 16, "prefix": 40},
    {"B": 3, "H": 1, "T": 77, "D": 20, "prefix": 77},
    {"B": 1, "H": 2, "T": 50, "D": 16, "prefix": 23, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "prefix": 1024, "dtype": "bfloat16"},)


def make_args(B, H, T, D, prefix, dtype="float32", device="cpu", seed=0):
    if not 0 <= prefix <= T:
        raise ValueError("the prefix is a part of the sequence")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    lengths = torch.randint(0, prefix + 1, (B,), generator=g)
    lengths[0] = prefix
    return q, k, v, lengths.to(device, torch.int32)


def reference(q, k, v, prefix):
    T = q.shape[2]
    t = torch.arange(T, device=q.device)
    seen = (t[:, None] >= t[None, :]) | (t[None, None, :] < prefix[:, None, None])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
