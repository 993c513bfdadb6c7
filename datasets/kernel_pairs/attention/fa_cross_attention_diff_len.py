"""Causal attention of T queries to S keys, aligned at the ends, on a folded grid: tiles from both ends in one program.

Query i sees the keys up to i + S - T: the last query sees all, and with T > S the first T - S see none (zeros). A
causal launch is as long as its longest tile; here program p takes tile p and then its mirror from the other end,
so that short and long make one length and no tail is left. dq folds over the query tiles, dk/dv over the key tiles;
the offset enters every bound, and a tile wholly before it only writes zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_cross_attention_diff_len",
    "family": "attention",
    "op": "cross_attention",
    "schema": 1,
    "techniques": (
        "causal-bounds", "masking", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "recompute",
        "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 or fp16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _strip(X, first, end, s_t, s_d, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < end) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _put_strip(X, tile, first, end, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    tl.store(X + t[:, None].to(tl.int64) * D + d[None, :], tile, mask=(t[:, None] < end) & (d[None, :] < D))


@triton.jit
def _folded(fold, tiles):
    """Tile of this program's turn: from the front, then from the back."""
    return fold * (tiles - 1) + (1 - 2 * fold) * tl.program_id(0)


@triton.jit
def _folded_fwd(
    Q, K, V, Out, LSE, T, S, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    Q += head * T * D
    K += head * S * D
    V += head * S * D
    tiles = tl.cdiv(T, OWN)
    # The middle tile of an odd number has no mirror.
    for fold in range(tl.where(2 * tl.program_id(0) + 1 == tiles, 1, 2)):
        first = _folded(fold, tiles) * OWN
        m = first + tl.arange(0, OWN)
        q = _strip(Q, first, T, D, 1, D, OWN, BLOCK_D)
        top = tl.full((OWN,), float("-inf"), tl.float32)
        norm = tl.zeros((OWN,), tl.float32)
        acc = tl.zeros((OWN, BLOCK_D), tl.float32)
        for start in range(0, tl.minimum(first + OWN + S - T, S), STEP):
            n = start + tl.arange(0, STEP)
            k = _strip(K, start, S, D, 1, D, STEP, BLOCK_D)
            v = _strip(V, start, S, D, 1, D, STEP, BLOCK_D)
            s = tl.dot(q, tl.trans(k)) * scale_log2
            s = tl.where((n[None, :] <= m[:, None] + (S - T)) & (n[None, :] < S), s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # The first rows of a tile may see nothing where the last ones do.
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - finite[:, None])
            fade = tl.exp2(top - finite)
            norm = norm * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            top = higher
        blind = norm == 0.0
        norm = tl.where(blind, 1.0, norm)
        _put_strip(Out + head * T * D, acc / norm[:, None], first, T, D, OWN, BLOCK_D)
        # Infinity gives a query without keys zero probabilities.
        tl.store(LSE + head * T + m, tl.where(blind, float("inf"), top + tl.log2(norm)), mask=m < T)


def _tiles(rows, q):
    sizes = {"D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}
    if rows <= 256:
        return sizes | {"OWN": 16, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if q.shape[3] <= 64 else 32, "num_warps": 8}


def _folded_grid(rows, tiles, heads):
    return triton.cdiv(triton.cdiv(rows, tiles["OWN"]), 2), heads


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, D), S = q.shape, k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(T, q)
    _folded_fwd[_folded_grid(T, tiles, B * H)](q, k, v, o, lse, T, S, D**-0.5 * 1.4426950408889634, **tiles)
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _folded_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, S, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    K += head * S * D
    V += head * S * D
    tiles = tl.cdiv(T, OWN)
    for fold in range(tl.where(2 * tl.program_id(0) + 1 == tiles, 1, 2)):
        first = _folded(fold, tiles) * OWN
        m = first + tl.arange(0, OWN)
        q = _strip(Q + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
        o = _strip(Out + head * T * D, first, T, D, 1, D, OWN, BLOCK_D)
        do = _strip(DO + head // H * do_b + head % H * do_h, first, T, do_t, do_d, D, OWN, BLOCK_D)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(Delta + head * T + m, delta, mask=m < T)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        dq = tl.zeros((OWN, BLOCK_D), tl.float32)
        for start in range(0, tl.minimum(first + OWN + S - T, S), STEP):
            n = start + tl.arange(0, STEP)
            k = _strip(K, start, S, D, 1, D, STEP, BLOCK_D)
            v = _strip(V, start, S, D, 1, D, STEP, BLOCK_D)
            s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
            seen = (n[None, :] <= m[:, None] + (S - T)) & (n[None, :] < S)
            p = tl.exp2(tl.where(seen, s, float("-inf")))
            ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
        _put_strip(DQ + head * T * D, dq * scale, first, T, D, OWN, BLOCK_D)


@triton.jit
def _folded_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, S, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    Q += head * T * D
    DO += head // H * do_b + head % H * do_h
    tiles = tl.cdiv(S, OWN)
    for fold in range(tl.where(2 * tl.program_id(0) + 1 == tiles, 1, 2)):
        first = _folded(fold, tiles) * OWN
        n = first + tl.arange(0, OWN)
        k = _strip(K + head * S * D, first, S, D, 1, D, OWN, BLOCK_D)
        v = _strip(V + head * S * D, first, S, D, 1, D, OWN, BLOCK_D)
        dk = tl.zeros((OWN, BLOCK_D), tl.float32)
        dv = tl.zeros((OWN, BLOCK_D), tl.float32)
        # Key j is seen from query j - (S - T) on.
        for start in range(tl.maximum(first + T - S, 0) // STEP * STEP, T, STEP):
            m = start + tl.arange(0, STEP)
            q = _strip(Q, start, T, D, 1, D, STEP, BLOCK_D)
            do = _strip(DO, start, T, do_t, do_d, D, STEP, BLOCK_D)
            lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
            delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
            s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
            p = tl.exp2(tl.where(n[:, None] <= m[None, :] + (S - T), s, float("-inf")))
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
        _put_strip(DK + head * S * D, dk * scale, first, S, D, OWN, BLOCK_D)
        _put_strip(DV + head * S * D, dv, first, S, D, OWN, BLOCK_D)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    _, need_k, need_v = needs or (True, True, True)
    (B, H, T, D), S = q.shape, k.shape[2]
    sizes = (H, T, S, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    tiles = _tiles(T, q)
    _folded_dq[_folded_grid(T, tiles, B * H)](q, k, v, o, grad_o, lse, delta, dq, *sizes, **tiles)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tiles = _tiles(S, q)
    _folded_dkdv[_folded_grid(S, tiles, B * H)](q, k, v, grad_o, lse, delta, dk, dv, *sizes, **tiles)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "S": 80, "D": 32},
    {"B": 2, "H": 1, "T": 77, "S": 45, "D": 20, "dtype": "float16"},
    {"B": 1, "H": 2, "T": 33, "S": 33, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "S": 3072, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))


def reference(q, k, v):
    T, S = q.shape[2], k.shape[2]
    # The first T - S queries see nothing: theirs are the rows of zeros in front.
    blind = max(T - S, 0)
    seen = torch.ones(T - blind, S, dtype=torch.bool, device=q.device).tril(S - (T - blind))
    o = torch.nn.functional.scaled_dot_product_attention(q[:, :, blind:], k, v, attn_mask=seen)
    return torch.nn.functional.pad(o, (0, 0, blind, 0))
