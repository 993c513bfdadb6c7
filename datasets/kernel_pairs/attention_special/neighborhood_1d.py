"""Neighbourhood attention in one dimension: a query tile and the halo of its keys fit one tile, so there is no loop.

Each query sees exactly W keys, centred on it or, near the ends, shifted inwards. A tile of BLOCK_M queries sees
BLOCK_M + W - 1 consecutive keys at most: they are loaded once, and softmax, output and dq take one step each. Seen
from a key the neighbourhood is centred, too, but near the ends it is open to all the queries that were shifted, which
is what bounds the loop of dk and dv.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "neighborhood_1d",
    "family": "attention_special",
    "op": "neighborhood_attention",
    "schema": 1,
    "techniques": ("halo", "saved-lse", "loop-swap", "owner-grid", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, T, H, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _near_rows(X, row, T, s_t, s_d, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < T) & (d[None, :] < D)
    return tl.load(X + row[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _first_neighbour(m, T, W):
    return tl.minimum(tl.maximum(m - W // 2, 0), T - W)


@triton.jit
def _neighbour_fwd(
    Q, K, V, Out, LSE, H, T, D, W, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    m = first + tl.arange(0, BLOCK_M)
    n = _first_neighbour(first, T, W) + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = _near_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
    k = _near_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
    v = _near_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
    begin = _first_neighbour(m, T, W)[:, None]
    near = (n[None, :] >= begin) & (n[None, :] < begin + W)
    s = tl.where(near, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    norm = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v) / norm[:, None]
    tl.store(Out + base + m[:, None] * H * D + d[None, :], out, mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + (batch * H + head) * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(T, W, q):
    """(BLOCK_M, BLOCK_N): queries of a tile, and keys with their halo."""
    own = 16 if T <= 256 else 64
    halo = triton.next_power_of_2(own + W - 1)
    # A wide halo in fp32 would not fit beside the scores.
    return (own, halo) if halo <= 128 or own == 16 else (own // 2, triton.next_power_of_2(own // 2 + W - 1))


def forward(q, k, v, window):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, D = q.shape
    if not 0 < window <= T or window % 2 == 0:
        raise ValueError(f"the window is {window}; it must be odd and no longer than the sequence, {T}")
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N = _blocks(T, window, q)
    _neighbour_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, o, lse, H, T, D, window, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=4,
    )  # fmt: skip
    return o, (q, k, v, o, lse, window)


# --- backward ---
@triton.jit
def _neighbour_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, D, W, do_b, do_t, do_h, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    row = (batch * H + head) * T
    m = first + tl.arange(0, BLOCK_M)
    n = _first_neighbour(first, T, W) + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = _near_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
    o = _near_rows(Out + base, m, T, H * D, 1, D, BLOCK_D)
    do = _near_rows(DO + batch * do_b + head.to(tl.int64) * do_h, m, T, do_t, do_d, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row + m, delta, mask=m < T)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    k = _near_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
    v = _near_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
    begin = _first_neighbour(m, T, W)[:, None]
    near = (n[None, :] >= begin) & (n[None, :] < begin + W)
    p = tl.exp2(tl.where(near, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf")))
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    dq = tl.dot(ds.to(k.dtype), k) * scale
    tl.store(DQ + base + m[:, None] * H * D + d[None, :], dq, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _neighbour_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, D, W, do_b, do_t, do_h, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    last = tl.minimum(first + BLOCK_N, T) - 1
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    row = (batch * H + head) * T
    DO += batch * do_b + head.to(tl.int64) * do_h
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = _near_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
    v = _near_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # The first W keys are seen by all queries before them, the last W by all behind them.
    begin = tl.where(first < W, 0, first - W // 2)
    end = tl.where(last >= T - W, T, last + W // 2 + 1)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _near_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
        do = _near_rows(DO, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        from_key = _first_neighbour(m, T, W)[None, :]
        near = (n[:, None] >= from_key) & (n[:, None] < from_key + W)
        p = tl.exp2(tl.where(near, tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :], float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = base + n[:, None] * H * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, window = saved
    _, need_k, need_v = needs or (True, True, True)
    B, T, H, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    sizes = (H, T, D, window, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    BLOCK_M, BLOCK_N = _blocks(T, window, q)
    _neighbour_dq[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, o, grad_o, lse, delta, dq, *sizes, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=4
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    own, other = (16, 16) if T <= 256 else (64, 16)
    _neighbour_dkdv[(triton.cdiv(T, own), B * H)](
        q, k, v, grad_o, lse, delta, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32, "window": 17},
    {"B": 2, "H": 1, "T": 53, "D": 20, "window": 9},
    {"B": 1, "H": 2, "T": 40, "D": 16, "window": 33, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 8192, "D": 64, "window": 63, "dtype": "bfloat16"},)


def make_args(B, H, T, D, window, dtype="float32", device="cpu", seed=0):
    if not 0 < window <= T or window % 2 == 0:
        raise ValueError("window must be odd and no longer than T")
    g = torch.Generator().manual_seed(seed)
    return (*(torch.randn(B, T, H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3)), window)


def reference(q, k, v, window):
    # Blocks of queries against the keys that one of them may reach: three times the neighbourhood, since at the ends of
    # the sequence neighbourhoods lie to one side, up to a whole window away.
    T, size = q.shape[1], max(window, 32)
    blocks = -(-T // size)
    pad = torch.nn.functional.pad
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    query = pad(q.flatten(0, 1), (0, 0, 0, blocks * size - T)).unflatten(1, (blocks, size))
    key, value = (
        pad(x.flatten(0, 1), (0, 0, window, blocks * size - T + window)).unfold(1, size + 2 * window, size)
        for x in (k, v)
    )
    at = torch.arange(blocks * size, device=q.device).view(blocks, size, 1)
    there = at[:, :1] - window + torch.arange(size + 2 * window, device=q.device)
    begin = (at - window // 2).clamp(0, T - window)
    seen = (there >= begin) & (there < begin + window)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.transpose(-1, -2), value.transpose(-1, -2), attn_mask=(seen | (at >= T))[None]
    )
    return out.flatten(1, 2)[:, :T].view(q.shape).transpose(1, 2)
