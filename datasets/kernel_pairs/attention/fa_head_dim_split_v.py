"""Causal attention with wider queries and keys than values, as in MLA: the head dim of scores is cut into two tiles.

192 channels of q and k would take a tile of 256 lanes, a quarter of them masked. They are cut into 128 and 64
instead: a score is the sum of two products, dq and dk are two accumulators each, and v and o have a width of their
own. Nothing is padded, and neither operand of a product is wider than 128.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_head_dim_split_v",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("saved-lse", "delta-preprocess", "causal-bounds", "loop-swap", "owner-grid", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, H, T, DV)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _wide(X, row, T, stride, col, width, BLOCK: tl.constexpr):
    # BLOCK channels of rows from column `col` on, of which `width` in all exist.
    d = col + tl.arange(0, BLOCK)
    return tl.load(X + row[:, None] * stride + d[None, :], mask=(row[:, None] < T) & (d[None, :] < width), other=0.0)


@triton.jit
def _put(X, tile, row, T, stride, col, width, BLOCK: tl.constexpr):
    d = col + tl.arange(0, BLOCK)
    tl.store(X + row[:, None] * stride + d[None, :], tile, mask=(row[:, None] < T) & (d[None, :] < width))


@triton.jit
def _split_fwd(
    Q, K, V, Out, LSE, T, D, DV, scale_log2, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, BLOCK_M)
    q_head = _wide(Q + row * D, m, T, D, 0, D, HEAD)
    q_tail = _wide(Q + row * D, m, T, D, HEAD, D, TAIL)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        s = tl.dot(q_head, tl.trans(_wide(K + row * D, n, T, D, 0, D, HEAD)))
        s = tl.dot(q_tail, tl.trans(_wide(K + row * D, n, T, D, HEAD, D, TAIL)), s) * scale_log2
        s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        v = _wide(V + row * DV, n, T, DV, 0, DV, BLOCK_V)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    _put(Out + row * DV, acc / norm[:, None], m, T, DV, 0, DV, BLOCK_V)
    tl.store(LSE + row + m, top + tl.log2(norm), mask=m < T)


def _widths(q, v):
    """Tiles of the channels: the largest power of two in D, what is left of it, and the values'."""
    D = q.shape[3]
    head = max(16, 1 << (D.bit_length() - 1))
    return {
        "HEAD": head, "TAIL": max(16, triton.next_power_of_2(max(1, D - head))),
        "BLOCK_V": max(16, triton.next_power_of_2(v.shape[3])),
    }  # fmt: skip


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    if q.shape[2] <= 256:
        return 32, 16, 4
    return (32, 32, 4) if q.element_size() == 4 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, D), DV = q.shape, v.shape[3]
    o = torch.empty_like(v)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _split_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, lse, T, D, DV, D**-0.5 * 1.4426950408889634, **_widths(q, v),
        BLOCK_M=own, BLOCK_N=other, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _split_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, D, DV, do_b, do_h, do_t, do_d, scale, scale_log2,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    bh = tl.program_id(1).to(tl.int64)
    row = bh * T
    m = first + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    do_at = bh // H * do_b + bh % H * do_h + m[:, None].to(tl.int64) * do_t + e[None, :] * do_d
    do = tl.load(DO + do_at, mask=(m[:, None] < T) & (e[None, :] < DV), other=0.0)
    o = _wide(Out + row * DV, m, T, DV, 0, DV, BLOCK_V)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row + m, delta, mask=m < T)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    q_head = _wide(Q + row * D, m, T, D, 0, D, HEAD)
    q_tail = _wide(Q + row * D, m, T, D, HEAD, D, TAIL)
    dq_head = tl.zeros((BLOCK_M, HEAD), tl.float32)
    dq_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k_head = _wide(K + row * D, n, T, D, 0, D, HEAD)
        k_tail = _wide(K + row * D, n, T, D, HEAD, D, TAIL)
        s = tl.dot(q_tail, tl.trans(k_tail), tl.dot(q_head, tl.trans(k_head))) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s, float("-inf")))
        dp = tl.dot(do, tl.trans(_wide(V + row * DV, n, T, DV, 0, DV, BLOCK_V)))
        ds = (p * (dp - delta[:, None])).to(k_head.dtype)
        dq_head = tl.dot(ds, k_head, dq_head)
        dq_tail = tl.dot(ds, k_tail, dq_tail)
    _put(DQ + row * D, dq_head * scale, m, T, D, 0, D, HEAD)
    _put(DQ + row * D, dq_tail * scale, m, T, D, HEAD, D, TAIL)


@triton.jit
def _split_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DVal, H, T, D, DV, do_b, do_h, do_t, do_d, scale, scale_log2,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    bh = tl.program_id(1).to(tl.int64)
    row = bh * T
    DO += bh // H * do_b + bh % H * do_h
    n = first + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_V)
    k_head = _wide(K + row * D, n, T, D, 0, D, HEAD)
    k_tail = _wide(K + row * D, n, T, D, HEAD, D, TAIL)
    v = _wide(V + row * DV, n, T, DV, 0, DV, BLOCK_V)
    dk_head = tl.zeros((BLOCK_N, HEAD), tl.float32)
    dk_tail = tl.zeros((BLOCK_N, TAIL), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q_head = _wide(Q + row * D, m, T, D, 0, D, HEAD)
        q_tail = _wide(Q + row * D, m, T, D, HEAD, D, TAIL)
        do_at = m[:, None].to(tl.int64) * do_t + e[None, :] * do_d
        do = tl.load(DO + do_at, mask=(m[:, None] < T) & (e[None, :] < DV), other=0.0)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        s = tl.dot(k_tail, tl.trans(q_tail), tl.dot(k_head, tl.trans(q_head))) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(q_head.dtype)
        dk_head = tl.dot(ds, q_head, dk_head)
        dk_tail = tl.dot(ds, q_tail, dk_tail)
    _put(DK + row * D, dk_head * scale, n, T, D, 0, D, HEAD)
    _put(DK + row * D, dk_tail * scale, n, T, D, HEAD, D, TAIL)
    _put(DVal + row * DV, dv, n, T, DV, 0, DV, BLOCK_V)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    _, need_k, need_v = needs or (True, True, True)
    (B, H, T, D), DV = q.shape, v.shape[3]
    scale = D**-0.5
    sizes = (H, T, D, DV, *grad_o.stride(), scale, scale * 1.4426950408889634)
    widths = _widths(q, v)
    own, other, warps = _blocks(q)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _split_dq[(triton.cdiv(T, own), B * H)](
        q, k, v, o, grad_o, lse, delta, dq, *sizes, **widths,
        BLOCK_M=own, BLOCK_N=other, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    # Three accumulators, 320 channels together at the widths of MLA: half as many owned rows.
    own = min(own, 64)
    _split_dkdv[(triton.cdiv(T, own), B * H)](
        q, k, v, grad_o, lse, delta, dk, dv, *sizes, **widths,
        BLOCK_M=other, BLOCK_N=own, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 48, "DV": 32},
    {"B": 2, "H": 1, "T": 53, "D": 43, "DV": 20},
    {"B": 1, "H": 2, "T": 40, "D": 24, "DV": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "D": 192, "DV": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, D, DV, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (D, D, DV))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
