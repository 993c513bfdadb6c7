"""Talking heads: scores are mixed across heads before the softmax, so a program owns all heads of its tile.

    s_h = scale q_h k_h^T,    z_g = sum over h of mix[g, h] s_h,    o_g = softmax(z_g) v_g

A (heads, rows, keys) tile of scores comes from one batched product; flattened to (heads, rows * keys) it is mixed by
one small product. Backward the same flattening gives ds = mix^T dz and dmix = dz s^T, whose running sum is one H x H
tile that each program of the dq launch leaves as a partial.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "talking_heads_mix",
    "family": "attention",
    "op": "talking_heads_attention",
    "schema": 1,
    "techniques": ("two-stage-partials", "saved-lse", "owner-grid", "loop-swap", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "mix"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _all_heads(X, s_h, s_t, s_d, first, H, T, D, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(HEADS, ROWS, BLOCK_D): the same rows of every head."""
    h = tl.arange(0, HEADS)[:, None, None]
    t = first + tl.arange(0, ROWS)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    inside = (h < H) & (t < T) & (d < D)
    return tl.load(X + h.to(tl.int64) * s_h + t.to(tl.int64) * s_t + d * s_d, mask=inside, other=0.0)


@triton.jit
def _row_statistic(X, first, H, T, other, HEADS: tl.constexpr, ROWS: tl.constexpr):
    h = tl.arange(0, HEADS)
    t = first + tl.arange(0, ROWS)
    return tl.load(X + h[:, None] * T + t[None, :], mask=(h[:, None] < H) & (t[None, :] < T), other=other)


@triton.jit
def _mixed(mix, s, HEADS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """mix s over the heads, with s (HEADS, A, B)."""
    flat = tl.dot(mix, tl.reshape(s, (HEADS, A * B)))
    return tl.reshape(flat, (HEADS, A, B))


@triton.jit
def _mix_matrix(Mix, H, HEADS: tl.constexpr):
    h = tl.arange(0, HEADS)
    inside = (h[:, None] < H) & (h[None, :] < H)
    return tl.load(Mix + h[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _talking_fwd(
    Q, K, V, Mix, Out, LSE, H, T, S, D, scale_log2, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    mix = _mix_matrix(Mix, H, HEADS) * scale_log2
    q = _all_heads(Q + batch * H * T * D, T * D, D, 1, first, H, T, D, HEADS, BLOCK_M, BLOCK_D)
    top = tl.full((HEADS, BLOCK_M), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS, BLOCK_M), tl.float32)
    acc = tl.zeros((HEADS, BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        k = _all_heads(K + batch * H * S * D, S * D, D, 1, start, H, S, D, HEADS, BLOCK_N, BLOCK_D)
        v = _all_heads(V + batch * H * S * D, S * D, D, 1, start, H, S, D, HEADS, BLOCK_N, BLOCK_D)
        z = _mixed(mix, tl.dot(q, tl.permute(k, (0, 2, 1))), HEADS, BLOCK_M, BLOCK_N)
        n = start + tl.arange(0, BLOCK_N)
        z = tl.where(n[None, None, :] < S, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 2))
        p = tl.exp2(z - higher[:, :, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(p, 2)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, :, None])
        top = higher
    h = tl.arange(0, HEADS)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = (batch * H + h[:, None]) * T + m[None, :]
    in_row = (h[:, None] < H) & (m[None, :] < T)
    inside = in_row[:, :, None] & (d[None, None, :] < D)
    tl.store(Out + row[:, :, None] * D + d[None, None, :], acc / norm[:, :, None], mask=inside)
    tl.store(LSE + row, top + tl.log2(norm), mask=in_row)


def _tiles(q):
    H, D = q.shape[1], q.shape[3]
    return {
        "HEADS": max(16, triton.next_power_of_2(H)), "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8 if H * D > 256 else 4,
    }  # fmt: skip


def forward(q, k, v, mix):
    q, k, v, mix = q.contiguous(), k.contiguous(), v.contiguous(), mix.contiguous()
    (B, H, T, D), S = q.shape, k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q)
    _talking_fwd[(triton.cdiv(T, tiles["BLOCK_M"]), B)](
        q, k, v, mix, o, lse, H, T, S, D, D**-0.5 * 1.4426950408889634, num_stages=1, **tiles
    )
    return o, (q, k, v, mix, o, lse)


# --- backward ---
@triton.jit
def _talking_dq(
    Q, K, V, Mix, Out, DO, LSE, Delta, DQ, DMixParts, H, T, S, D, do_b, do_h, do_t, do_d, scale,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    mix = _mix_matrix(Mix, H, HEADS)
    to_head = tl.trans(mix) * scale
    to_mixed = mix * (scale * 1.4426950408889634)
    q = _all_heads(Q + batch * H * T * D, T * D, D, 1, first, H, T, D, HEADS, BLOCK_M, BLOCK_D)
    o = _all_heads(Out + batch * H * T * D, T * D, D, 1, first, H, T, D, HEADS, BLOCK_M, BLOCK_D)
    do = _all_heads(DO + batch * do_b, do_h, do_t, do_d, first, H, T, D, HEADS, BLOCK_M, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 2)
    h = tl.arange(0, HEADS)
    m = first + tl.arange(0, BLOCK_M)
    row = (batch * H + h[:, None]) * T + m[None, :]
    in_row = (h[:, None] < H) & (m[None, :] < T)
    tl.store(Delta + row, delta, mask=in_row)
    # Infinity gives rows and heads that are not there zero probabilities.
    lse = _row_statistic(LSE + batch * H * T, first, H, T, float("inf"), HEADS, BLOCK_M)
    dq = tl.zeros((HEADS, BLOCK_M, BLOCK_D), tl.float32)
    dmix = tl.zeros((BLOCK_M, HEADS, HEADS), tl.float32)
    for start in range(0, S, BLOCK_N):
        k = _all_heads(K + batch * H * S * D, S * D, D, 1, start, H, S, D, HEADS, BLOCK_N, BLOCK_D)
        v = _all_heads(V + batch * H * S * D, S * D, D, 1, start, H, S, D, HEADS, BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.permute(k, (0, 2, 1)))
        z = _mixed(to_mixed, s, HEADS, BLOCK_M, BLOCK_N)
        n = start + tl.arange(0, BLOCK_N)
        p = tl.exp2(tl.where(n[None, None, :] < S, z - lse[:, :, None], float("-inf")))
        dz = p * (tl.dot(do, tl.permute(v, (0, 2, 1))) - delta[:, :, None])
        ds = _mixed(to_head, dz, HEADS, BLOCK_M, BLOCK_N)
        dq = tl.dot(ds.to(k.dtype), k, dq)
        # One product a row: a single one over rows * keys would have no axis to split over warps.
        dmix = tl.dot(tl.permute(dz, (1, 0, 2)), tl.permute(s, (1, 2, 0)), dmix)
    d = tl.arange(0, BLOCK_D)
    inside = in_row[:, :, None] & (d[None, None, :] < D)
    tl.store(DQ + row[:, :, None] * D + d[None, None, :], dq, mask=inside)
    part = (batch * tl.num_programs(0) + tl.program_id(0)) * H * H
    in_mix = (h[:, None] < H) & (h[None, :] < H)
    tl.store(DMixParts + part + h[:, None] * H + h[None, :], tl.sum(dmix, 0) * scale, mask=in_mix)


@triton.jit
def _talking_dkdv(
    Q, K, V, Mix, DO, LSE, Delta, DK, DV, H, T, S, D, do_b, do_h, do_t, do_d, scale,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    batch = tl.program_id(1).to(tl.int64)
    mix = _mix_matrix(Mix, H, HEADS)
    to_head = tl.trans(mix) * scale
    to_mixed = mix * (scale * 1.4426950408889634)
    k = _all_heads(K + batch * H * S * D, S * D, D, 1, first, H, S, D, HEADS, BLOCK_N, BLOCK_D)
    v = _all_heads(V + batch * H * S * D, S * D, D, 1, first, H, S, D, HEADS, BLOCK_N, BLOCK_D)
    dk = tl.zeros((HEADS, BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((HEADS, BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_M):
        q = _all_heads(Q + batch * H * T * D, T * D, D, 1, start, H, T, D, HEADS, BLOCK_M, BLOCK_D)
        do = _all_heads(DO + batch * do_b, do_h, do_t, do_d, start, H, T, D, HEADS, BLOCK_M, BLOCK_D)
        lse = _row_statistic(LSE + batch * H * T, start, H, T, float("inf"), HEADS, BLOCK_M)
        delta = _row_statistic(Delta + batch * H * T, start, H, T, 0.0, HEADS, BLOCK_M)
        # Keys are rows of every head's tile.
        z = _mixed(to_mixed, tl.dot(k, tl.permute(q, (0, 2, 1))), HEADS, BLOCK_N, BLOCK_M)
        p = tl.exp2(z - lse[:, None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        dz = p * (tl.dot(v, tl.permute(do, (0, 2, 1))) - delta[:, None, :])
        dk = tl.dot(_mixed(to_head, dz, HEADS, BLOCK_N, BLOCK_M).to(q.dtype), q, dk)
    h = tl.arange(0, HEADS)[:, None, None]
    n = first + tl.arange(0, BLOCK_N)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    at = ((batch * H + h) * S + n) * D + d
    inside = (h < H) & (n < S) & (d < D)
    tl.store(DK + at, dk, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, mix, o, lse = saved
    _, need_k, need_v, _ = needs or (True,) * 4
    (B, H, T, D), S = q.shape, k.shape[2]
    tiles = _tiles(q)
    query_tiles = triton.cdiv(T, tiles["BLOCK_M"])
    sizes = (H, T, S, D, *grad_o.stride(), D**-0.5)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    parts = torch.empty(B * query_tiles, H, H, device=q.device, dtype=torch.float32)
    _talking_dq[(query_tiles, B)](q, k, v, mix, o, grad_o, lse, delta, dq, parts, *sizes, num_stages=1, **tiles)
    dmix = parts.sum(0).to(mix.dtype)
    if not (need_k or need_v):
        return dq, None, None, dmix
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _talking_dkdv[(triton.cdiv(S, tiles["BLOCK_N"]), B)](
        q, k, v, mix, grad_o, lse, delta, dk, dv, *sizes, num_stages=1, **tiles
    )
    return dq, dk, dv, dmix


# --- check ---
SWEEP = (
    {"B": 1, "H": 4, "T": 32, "S": 32, "D": 16},
    {"B": 2, "H": 3, "T": 21, "S": 37, "D": 12},
    {"B": 1, "H": 2, "T": 17, "S": 20, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "H": 16, "T": 512, "S": 512, "D": 32, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, generator=g) for n in (T, S, S))
    mix = torch.eye(H) + 0.3 * torch.randn(H, H, generator=g)
    return tuple(x.to(device, getattr(torch, dtype)) for x in (q, k, v, mix))


def reference(q, k, v, mix):
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    z = torch.einsum("gh,bhts->bgts", mix.float(), s)
    return z.softmax(-1).to(v.dtype) @ v
