"""Attention of a few queries over a long int8 cache: keys and values are frozen, so that dq alone is split over keys.

k = K8 * k_scale and v = V8 * v_scale with one scale per cached token and head; all queries see the whole cache. Query
heads that share a cache head are rows of one tile, and the cache, which is nearly all of the traffic, is read once by
each pass. There are far fewer tiles of queries than processors, so programs split the keys: the forward combines
softmax parts by their log-sum-exp, the backward has the final one and only adds partial dq. Scales never touch the
int8 tiles: k_scale multiplies scores and their gradients, v_scale the probabilities.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "kv_cache_quant_attention_in",
    "family": "quant",
    "op": "quantized_cache_attention",
    "schema": 1,
    "techniques": ("partial-gradient", "split-k", "two-stage-partials", "saved-lse", "delta-preprocess", "recompute"),
    "saves": ("o: bf16 or fp16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q",),
    "dtypes": ("float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cache_tile(X8, Scale, base, n, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Int8 rows of the cache and their scales; rows from `last` on are zeros."""
    d = tl.arange(0, BLOCK_D)
    mask = (n[:, None] < last) & (d[None, :] < D)
    x8 = tl.load(X8 + (base + n[:, None]) * D + d[None, :], mask=mask, other=0)
    return x8, tl.load(Scale + base + n, mask=n < last, other=0.0)


@triton.jit
def _split_fwd(
    Q, K8, V8, KScale, VScale, Parts, PartLSE, rows, S, scale_log2, keys_each,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Rows are all (head of the group, query) of one cache head; they lie together in q.
    cache = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < rows) & (d[None, :] < D)
    q = tl.load(Q + (cache * rows + m[:, None]) * D + d[None, :], mask=inside, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = split * keys_each
    last = tl.minimum(first + keys_each, S)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k8, k_scale = _cache_tile(K8, KScale, cache * S, n, last, D, BLOCK_D)
        v8, v_scale = _cache_tile(V8, VScale, cache * S, n, last, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k8.to(q.dtype))) * (scale_log2 * k_scale)[None, :]
        s = tl.where(n[None, :] < last, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot((p * v_scale[None, :]).to(q.dtype), v8.to(q.dtype), acc * shrink[:, None])
        top = new_top
    at = (split * tl.num_programs(0) + cache) * rows + m
    tl.store(Parts + at[:, None] * D + d[None, :], acc / norm[:, None], mask=inside)
    tl.store(PartLSE + at, top + tl.log2(norm), mask=m < rows)


@triton.jit
def _combine(Parts, PartLSE, Out, LSE, total, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m[:, None] < total) & (d[None, :] < D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(PartLSE + split * tl.cast(total, tl.int64) + m, mask=m < total, other=0.0))
    norm = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(splits):
        at = split * tl.cast(total, tl.int64) + m
        share = tl.exp2(tl.load(PartLSE + at, mask=m < total, other=0.0) - top)
        norm += share
        out += share[:, None] * tl.load(Parts + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(Out + m[:, None] * D + d[None, :], out / norm[:, None], mask=mask)
    tl.store(LSE + m, top + tl.log2(norm), mask=m < total)


def _schedule(q, k8):
    """(rows of a cache head, tile of them, tile of keys, splits, keys of a split): about two programs a processor."""
    (B, H, T, _), (_, G, S, _) = q.shape, k8.shape
    rows = H // G * T
    BLOCK_M = max(16, min(64, triton.next_power_of_2(rows)))
    BLOCK_N = 64 if S >= 1024 else 32
    splits = max(1, min(triton.cdiv(S, 4 * BLOCK_N), 264 // (B * G * triton.cdiv(rows, BLOCK_M))))
    keys_each = triton.cdiv(triton.cdiv(S, splits), BLOCK_N) * BLOCK_N
    return rows, BLOCK_M, BLOCK_N, triton.cdiv(S, keys_each), keys_each


def forward(q, k8, v8, k_scale, v_scale):
    q, k8, v8, k_scale, v_scale = (t.contiguous() for t in (q, k8, v8, k_scale, v_scale))
    (B, H, T, D), G, S = q.shape, k8.shape[1], k8.shape[2]
    rows, BLOCK_M, BLOCK_N, splits, keys_each = _schedule(q, k8)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    parts = torch.empty(splits, B * H * T, D, device=q.device, dtype=torch.float32)
    part_lse = torch.empty(splits, B * H * T, device=q.device, dtype=torch.float32)
    o, lse = torch.empty_like(q), torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _split_fwd[(B * G, triton.cdiv(rows, BLOCK_M), splits)](
        q, k8, v8, k_scale, v_scale, parts, part_lse, rows, S, D**-0.5 * 1.4426950408889634, keys_each,
        D=D, BLOCK_D=BLOCK_D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine[(triton.cdiv(B * H * T, 8),)](parts, part_lse, o, lse, B * H * T, splits, D=D, BLOCK_D=BLOCK_D, BLOCK_M=8)
    return o, (q, k8, v8, k_scale, v_scale, o, lse)


# --- backward ---
@triton.jit
def _split_dq(
    DO, Q, K8, V8, KScale, VScale, Out, LSE, Parts, T, group, rows, S, scale_log2, scale, keys_each,
    do_b, do_h, do_t, do_d, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cache = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < rows) & (d[None, :] < D)
    at = (cache * rows + m[:, None]) * D + d[None, :]
    q = tl.load(Q + at, mask=inside, other=0.0)
    # Batch, head and query of a row, for the strides of the cotangent.
    head = cache * group + m // T
    do_at = (head // heads * do_b + head % heads * do_h + (m % T).to(tl.int64) * do_t)[:, None] + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=inside, other=0.0)
    out = tl.load(Out + at, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + cache * rows + m, mask=m < rows, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = split * keys_each
    last = tl.minimum(first + keys_each, S)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k8, k_scale = _cache_tile(K8, KScale, cache * S, n, last, D, BLOCK_D)
        v8, v_scale = _cache_tile(V8, VScale, cache * S, n, last, D, BLOCK_D)
        k = k8.to(q.dtype)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale_log2 * k_scale)[None, :] - lse[:, None])
        dp = tl.dot(do, tl.trans(v8.to(do.dtype))) * v_scale[None, :]
        # Keys outside have scale 0 and take nothing of dq. Scales are taken relative to the tile's largest: with the
        # small ones themselves, half precision would round most of ds away.
        largest = tl.maximum(tl.max(k_scale, 0), 1e-30)
        ds = p * (dp - delta[:, None]) * (k_scale / largest)[None, :]
        dq += largest * tl.dot(ds.to(q.dtype), k)
    part = (split * tl.num_programs(0) + cache) * rows + m[:, None]
    tl.store(Parts + part * D + d[None, :], scale * dq, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k8, v8, k_scale, v_scale, o, lse = saved
    (B, H, T, D), G, S = q.shape, k8.shape[1], k8.shape[2]
    rows, BLOCK_M, BLOCK_N, splits, keys_each = _schedule(q, k8)
    scale = D**-0.5
    # Partial sums are as many as splits, but of queries alone: small beside the cache.
    parts = torch.empty(splits, *q.shape, device=q.device, dtype=torch.float32)
    _split_dq[(B * G, triton.cdiv(rows, BLOCK_M), splits)](
        grad_o, q, k8, v8, k_scale, v_scale, o, lse, parts, T, H // G, rows, S, scale * 1.4426950408889634, scale,
        keys_each, *grad_o.stride(), H,
        D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).to(q.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 4, "G": 2, "T": 8, "S": 320, "D": 32, "dtype": "float16"},
    {"B": 2, "H": 3, "G": 1, "T": 5, "S": 211, "D": 20, "dtype": "float16"},
    {"B": 1, "H": 2, "G": 2, "T": 16, "S": 96, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "G": 8, "T": 16, "S": 32768, "D": 128, "dtype": "bfloat16"},)


def make_args(B, H, G, T, S, D, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    k8, v8 = (torch.randint(-127, 128, (B, G, S, D), generator=g, dtype=torch.int8).to(device) for _ in range(2))
    k_scale, v_scale = ((0.5 + torch.rand(2, B, G, S, generator=g)) / 64.0).to(device)
    return q, k8, v8, k_scale, v_scale


def reference(q, k8, v8, k_scale, v_scale):
    k, v = ((x8 * scale[..., None]).to(q.dtype) for x8, scale in ((k8, k_scale), (v8, v_scale)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
