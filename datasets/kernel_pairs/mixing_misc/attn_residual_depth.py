"""Residual stream as attention over depth: each token mixes the outputs of all earlier layers by a softmax.

    s[l, t] = <query, v[l, t]> r[l, t]  with  r = rsqrt(mean(v^2) + eps),    y[t] = sum of softmax(s)[l, t] v[l, t]

The backward reads the layers' outputs twice. First, token by token, dots with dy give ds and so the coefficients of
dv[l, t] = p dy[t] + a query + b v[l, t]. Then programs own a column tile and walk the tokens: dv needs no more sums,
and dquery, the sum of a v, collects in registers, one partial row per walk.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "attn_residual_depth",
    "family": "mixing_misc",
    "op": "depth_attention",
    "schema": 1,
    "techniques": ("two-pass", "column-owner", "two-stage-partials", "saved-statistics", "strided-cotangent"),
    "saves": ("scores: fp32 (T, L)", "rstd: fp32 (T, L)"),
    "grads": ("layers", "query"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _depth_fwd(V, Query, Y, Scores, Rstd, L, T, D, eps, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    layer = tl.arange(0, BLOCK_L)
    stack = (layer[:, None] * T + t) * D
    square = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    along = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = (layer[:, None] < L) & (d[None, :] < D)
        v = tl.load(V + stack + d[None, :], mask=ok, other=0.0).to(tl.float32)
        query = tl.load(Query + d, mask=d < D, other=0.0).to(tl.float32)
        square += v * v
        along += v * query[None, :]
    rstd = tl.rsqrt(tl.sum(square, 1) / D + eps)
    s = tl.where(layer < L, tl.sum(along, 1) * rstd, float("-inf"))
    p = tl.exp(s - tl.max(s, 0))
    p = p / tl.sum(p, 0)
    tl.store(Scores + t * L + layer, s, mask=layer < L)
    tl.store(Rstd + t * L + layer, rstd, mask=layer < L)
    # What was read for the scores comes back from L2.
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = (layer[:, None] < L) & (d[None, :] < D)
        v = tl.load(V + stack + d[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(Y + t * D + d, tl.sum(p[:, None] * v, 0), mask=d < D)


def _tile(L, D):
    BLOCK_L = triton.next_power_of_2(L)
    return BLOCK_L, max(16, min(4096 // BLOCK_L, 1024, triton.next_power_of_2(D)))


def forward(layers, query, eps=1e-6):
    """Layers (L, T, D): the outputs of L layers for T tokens; query (D)."""
    layers, query = layers.contiguous(), query.contiguous()
    L, T, D = layers.shape
    y = torch.empty(T, D, device=layers.device, dtype=layers.dtype)
    scores, rstd = (torch.empty(T, L, device=layers.device, dtype=torch.float32) for _ in range(2))
    BLOCK_L, BLOCK_D = _tile(L, D)
    _depth_fwd[(T,)](layers, query, y, scores, rstd, L, T, D, eps, BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (layers, query, scores, rstd)


# --- backward ---
@triton.jit
def _depth_scores_bwd(
    DY, V, Scores, Rstd, Coefficients, L, T, D, dy_t, dy_d, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    layer = tl.arange(0, BLOCK_L)
    inside = layer < L
    dots = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)
        ok = inside[:, None] & (d[None, :] < D)
        v = tl.load(V + (layer[:, None] * T + t) * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + t * dy_t + d * dy_d, mask=d < D, other=0.0).to(tl.float32)
        dots += v * dy[None, :]
    dp = tl.sum(dots, 1)
    s = tl.load(Scores + t * L + layer, mask=inside, other=float("-inf"))
    rstd = tl.load(Rstd + t * L + layer, mask=inside, other=0.0)
    p = tl.exp(s - tl.max(s, 0))
    p = p / tl.sum(p, 0)
    ds = p * (dp - tl.sum(p * dp, 0))
    # ds/dv = r query - s r^2 v / D: the second term is the normalisation's own derivative.
    own = -ds * tl.where(inside, s, 0.0) * rstd * rstd / D
    tl.store(Coefficients + t * L + layer, p, mask=inside)
    tl.store(Coefficients + (T + t) * L + layer, ds * rstd, mask=inside)
    tl.store(Coefficients + (2 * T + t) * L + layer, own, mask=inside)


@triton.jit
def _depth_values_bwd(
    DY, V, Query, Coefficients, DV, Parts, L, T, D, tokens_each, dy_t, dy_d,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    walk = tl.program_id(1).to(tl.int64)
    layer = tl.arange(0, BLOCK_L)
    inside = layer < L
    ok = inside[:, None] & (d[None, :] < D)
    query = tl.load(Query + d, mask=d < D, other=0.0).to(tl.float32)
    dquery = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for t in range(walk * tokens_each, tl.minimum((walk + 1) * tokens_each, T)):
        p = tl.load(Coefficients + t * L + layer, mask=inside, other=0.0)[:, None]
        a = tl.load(Coefficients + (T + t) * L + layer, mask=inside, other=0.0)[:, None]
        b = tl.load(Coefficients + (2 * T + t) * L + layer, mask=inside, other=0.0)[:, None]
        at = (layer[:, None] * T + t) * D + d[None, :]
        v = tl.load(V + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + t * dy_t + d * dy_d, mask=d < D, other=0.0).to(tl.float32)
        dquery += a * v
        tl.store(DV + at, p * dy[None, :] + a * query[None, :] + b * v, mask=ok)
    tl.store(Parts + walk * D + d, tl.sum(dquery, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    layers, query, scores, rstd = saved
    L, T, D = layers.shape
    dlayers = torch.empty_like(layers)
    coefficients = torch.empty(3, T, L, device=layers.device, dtype=torch.float32)
    BLOCK_L, BLOCK_D = _tile(L, D)
    _depth_scores_bwd[(T,)](
        grad_y, layers, scores, rstd, coefficients, L, T, D, *grad_y.stride(),
        BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    # About four programs for each of 132 processors; shorter walks would only make more partial rows.
    tiles = triton.cdiv(D, BLOCK_D)
    tokens_each = max(4, triton.cdiv(T * tiles, 528))
    walks = triton.cdiv(T, tokens_each)
    parts = torch.empty(walks, D, device=layers.device, dtype=torch.float32)
    _depth_values_bwd[(tiles, walks)](
        grad_y, layers, query, coefficients, dlayers, parts, L, T, D, tokens_each, *grad_y.stride(),
        BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dlayers, parts.sum(0).to(query.dtype)


# --- check ---
SWEEP = (
    {"L": 4, "T": 9, "D": 64},
    {"L": 7, "T": 13, "D": 523},
    {"L": 3, "T": 6, "D": 72, "dtype": "bfloat16"},
)
BENCH = ({"L": 16, "T": 8192, "D": 2048, "dtype": "bfloat16"},)


def make_args(L, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    layers = torch.randn(L, T, D, generator=g)
    # A query of this size gives scores of order one.
    query = torch.randn(D, generator=g) * D**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (layers, query))


def reference(layers, query, eps=1e-6):
    v = layers.float()
    s = (layers @ query).float() * torch.rsqrt(v.pow(2).mean(-1) + eps)
    return (s.softmax(0)[..., None] * v).sum(0).to(layers.dtype)
