"""Routed attention: queries and keys meet inside their clusters only, gathered and scattered through permutations.

`order_q` and `order_k` sort the positions by cluster (positions rising inside one), and a cluster takes the same ranks
of both. A program owns a tile of a cluster and gathers whole rows by index, without sorted copies. Since each order is
a permutation, an output or gradient row has exactly one writer, and every scatter is a plain store; dq leaves by
`order_q`, dk and dv by `order_k`. The causal mask compares positions, so that clusters keep the order of the text; a
query without any earlier key in its cluster gives zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "routing_kmeans_gather",
    "family": "attention_special",
    "op": "routing_attention",
    "schema": 1,
    "techniques": (
        "inverse-map",
        "owner-grid",
        "loop-swap",
        "causal-bounds",
        "saved-lse",
        "recompute",
        "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T), by rank"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gather_rows(X, position, valid, s_t, s_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = position[:, None].to(tl.int64) * s_t + d[None, :] * s_d
    return tl.load(X + at, mask=valid[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _ranks(Order, first, end, ROWS: tl.constexpr, missing):
    """Positions of ranks first, first + 1, ..., `missing` from `end` on."""
    rank = first + tl.arange(0, ROWS)
    return tl.load(Order + rank, mask=rank < end, other=missing)


@triton.jit
def _cluster_fwd(
    Q, K, V, OrderQ, OrderK, Out, LSE, T, size, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size, BLOCK_M)
    begin = tl.program_id(0) // tiles * size
    end = tl.minimum(begin + size, T)
    first = begin + tl.program_id(0) % tiles * BLOCK_M
    rank = first + tl.arange(0, BLOCK_M)
    m = _ranks(OrderQ + head * T, first, end, BLOCK_M, -1)
    q = _gather_rows(Q + head * T * D, m, m >= 0, D, 1, D, BLOCK_D)
    last_query = tl.max(m, 0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        # Ranks past the cluster are later than any query.
        n = _ranks(OrderK + head * T, start, end, BLOCK_N, T)
        if tl.min(n, 0) <= last_query:
            k = _gather_rows(K + head * T * D, n, n < T, D, 1, D, BLOCK_D)
            v = _gather_rows(V + head * T * D, n, n < T, D, 1, D, BLOCK_D)
            s = tl.where(m[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - finite[:, None])
            fade = tl.exp2(top - finite)
            norm = norm * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            top = higher
    lonely = norm == 0.0
    norm = tl.where(lonely, 1.0, norm)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] >= 0) & (d[None, :] < D))
    # Infinity gives a query without keys zero probabilities.
    lse = tl.where(lonely, float("inf"), top + tl.log2(norm))
    tl.store(LSE + head * T + rank, lse, mask=m >= 0)


def _tiles(q, size):
    sizes = {"D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}
    if size <= 64:
        return sizes | {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
    return sizes | {"BLOCK_M": 64, "BLOCK_N": 64 if q.element_size() == 2 else 32, "num_warps": 4}


def forward(q, k, v, order_q, order_k, size):
    q, k, v, order_q, order_k = (x.contiguous() for x in (q, k, v, order_q, order_k))
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q, size)
    programs = triton.cdiv(T, size) * triton.cdiv(size, tiles["BLOCK_M"])
    _cluster_fwd[(programs, B * H)](q, k, v, order_q, order_k, o, lse, T, size, D**-0.5 * 1.4426950408889634, **tiles)
    return o, (q, k, v, order_q, order_k, o, lse, size)


# --- backward ---
@triton.jit
def _cluster_dq(
    Q, K, V, OrderQ, OrderK, Out, DO, LSE, Delta, DQ, H, T, size, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size, BLOCK_M)
    begin = tl.program_id(0) // tiles * size
    end = tl.minimum(begin + size, T)
    first = begin + tl.program_id(0) % tiles * BLOCK_M
    rank = first + tl.arange(0, BLOCK_M)
    K += head * T * D
    V += head * T * D
    OrderK += head * T
    m = _ranks(OrderQ + head * T, first, end, BLOCK_M, -1)
    q = _gather_rows(Q + head * T * D, m, m >= 0, D, 1, D, BLOCK_D)
    o = _gather_rows(Out + head * T * D, m, m >= 0, D, 1, D, BLOCK_D)
    do = _gather_rows(DO + head // H * do_b + head % H * do_h, m, m >= 0, do_t, do_d, D, BLOCK_D)
    lse = tl.load(LSE + head * T + rank, mask=m >= 0, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + rank, delta, mask=m >= 0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = _ranks(OrderK, start, end, BLOCK_N, T)
        if tl.min(n, 0) <= tl.max(m, 0):
            k = _gather_rows(K, n, n < T, D, 1, D, BLOCK_D)
            v = _gather_rows(V, n, n < T, D, 1, D, BLOCK_D)
            s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
            p = tl.exp2(tl.where(m[:, None] >= n[None, :], s, float("-inf")))
            ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + at, dq * scale, mask=(m[:, None] >= 0) & (d[None, :] < D))


@triton.jit
def _cluster_dkdv(
    Q, K, V, OrderQ, OrderK, DO, LSE, Delta, DK, DV, H, T, size, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size, BLOCK_N)
    begin = tl.program_id(0) // tiles * size
    end = tl.minimum(begin + size, T)
    first = begin + tl.program_id(0) % tiles * BLOCK_N
    n = _ranks(OrderK + head * T, first, end, BLOCK_N, T)
    first_key = tl.min(n, 0)
    k = _gather_rows(K + head * T * D, n, n < T, D, 1, D, BLOCK_D)
    v = _gather_rows(V + head * T * D, n, n < T, D, 1, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    DO += head // H * do_b + head % H * do_h
    for start in range(begin, end, BLOCK_M):
        m = _ranks(OrderQ + head * T, start, end, BLOCK_M, -1)
        if tl.max(m, 0) >= first_key:
            rank = start + tl.arange(0, BLOCK_M)
            q = _gather_rows(Q + head * T * D, m, m >= 0, D, 1, D, BLOCK_D)
            do = _gather_rows(DO, m, m >= 0, do_t, do_d, D, BLOCK_D)
            # Statistics lie by rank: these loads are consecutive.
            lse = tl.load(LSE + head * T + rank, mask=m >= 0, other=float("inf"))
            delta = tl.load(Delta + head * T + rank, mask=m >= 0, other=0.0)
            s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
            p = tl.exp2(tl.where(m[None, :] >= n[:, None], s, float("-inf")))
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, order_q, order_k, o, lse, size = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    tiles = _tiles(q, size)
    clusters = triton.cdiv(T, size)
    sizes = (H, T, size, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _cluster_dq[(clusters * triton.cdiv(size, tiles["BLOCK_M"]), B * H)](
        q, k, v, order_q, order_k, o, grad_o, lse, delta, dq, *sizes, **tiles
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _cluster_dkdv[(clusters * triton.cdiv(size, tiles["BLOCK_N"]), B * H)](
        q, k, v, order_q, order_k, grad_o, lse, delta, dk, dv, *sizes, **tiles
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 16, "size": 32},
    {"B": 2, "H": 1, "T": 53, "D": 20, "size": 21},
    {"B": 1, "H": 2, "T": 48, "D": 16, "size": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 8192, "D": 64, "size": 256, "dtype": "bfloat16"},)


def make_args(B, H, T, D, size, dtype="float32", device="cpu", seed=0):
    if size < 1:
        raise ValueError("a cluster has at least one member")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    # A balanced clustering: any assignment with `size` members each, sorted by (cluster, position).
    ranks = (torch.rand(2, B, H, T, generator=g).argsort(-1) // size).to(device)
    order_q, order_k = torch.argsort(ranks, dim=-1, stable=True).to(torch.int32)
    return q, k, v, order_q, order_k, size


def reference(q, k, v, order_q, order_k, size):
    B, H, T, D = q.shape
    clusters = -(-T // size)
    pad = clusters * size - T

    def sort(x, order):
        x = x.gather(2, order.long()[..., None].expand(-1, -1, -1, D))
        return torch.nn.functional.pad(x, (0, 0, 0, pad)).view(B, H, clusters, size, D)

    m = torch.nn.functional.pad(order_q, (0, pad), value=-1).view(B, H, clusters, size, 1)
    n = torch.nn.functional.pad(order_k, (0, pad), value=T).view(B, H, clusters, 1, size)
    s = (sort(q, order_q) @ sort(k, order_k).transpose(-1, -2)).float() * D**-0.5
    # Queries without keys have a row of equal scores, which the mask then takes out.
    p = s.masked_fill(m < n, -1e30).softmax(-1) * (m >= n)
    o = (p.to(v.dtype) @ sort(v, order_k)).view(B, H, clusters * size, D)[:, :, :T]
    return torch.zeros_like(q).scatter(2, order_q.long()[..., None].expand(-1, -1, -1, D), o)
