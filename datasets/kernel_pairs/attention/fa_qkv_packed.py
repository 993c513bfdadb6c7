"""Causal attention over a packed (B, S, 3, H, D) projection: one launch fills the one gradient buffer of that shape.

A program owns a tile of positions and writes its three slices: first dk and dv, walking the queries behind the tile,
then dq, walking the keys before it. Under the causal mask the two walks of any tile add up to the whole sequence, so
that all programs do the same work and no order of tiles is better than another.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_qkv_packed",
    "family": "attention",
    "op": "packed_attention",
    "schema": 1,
    "techniques": ("one-launch", "saved-lse", "delta-preprocess", "causal-bounds", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 or fp16 (B, S, H, D)", "lse: fp32 (B, H, S)"),
    "grads": ("qkv",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _positions(X, t, S, s_t, s_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows t of one slice and head, (len(t), BLOCK_D)."""
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < S) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _packed_fwd(
    QKV, Out, LSE, S, H, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    # Queries, keys and values of a position lie H * D apart, positions three times that.
    QKV += batch * S * 3 * H * D + head * D
    own = tile * OWN + tl.arange(0, OWN)
    q = _positions(QKV, own, S, 3 * H * D, 1, D, BLOCK_D)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(tile * OWN + OWN, S), OTHER):
        n = start + tl.arange(0, OTHER)
        k = _positions(QKV + H * D, n, S, 3 * H * D, 1, D, BLOCK_D)
        v = _positions(QKV + 2 * H * D, n, S, 3 * H * D, 1, D, BLOCK_D)
        s = tl.where(own[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - raised)
        p = tl.exp2(s - raised[:, None])
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = raised
    d = tl.arange(0, BLOCK_D)
    at = ((batch * S + own[:, None]) * H + head) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(own[:, None] < S) & (d[None, :] < D))
    tl.store(LSE + tl.program_id(1).to(tl.int64) * S + own, top + tl.log2(norm), mask=own < S)


def _tiles(S, D, element_size):
    """Owned positions, positions of a step, warps."""
    if S <= 512:
        return {"OWN": 32, "OTHER": 16, "num_warps": 4}
    if element_size == 4:
        return {"OWN": 64, "OTHER": 32, "num_warps": 8}
    return {"OWN": 128, "OTHER": 64 if D <= 64 else 32, "num_warps": 8}


def forward(qkv):
    qkv = qkv.contiguous()
    B, S, _, H, D = qkv.shape
    o = torch.empty(B, S, H, D, device=qkv.device, dtype=qkv.dtype)
    lse = torch.empty(B, H, S, device=qkv.device, dtype=torch.float32)
    tiles = _tiles(S, D, qkv.element_size())
    _packed_fwd[(triton.cdiv(S, tiles["OWN"]), B * H)](
        qkv, o, lse, S, H, D**-0.5 * 1.4426950408889634, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), **tiles
    )
    return o, (qkv, o, lse)


# --- backward ---
@triton.jit
def _packed_delta(
    Out, DO, Delta, S, H, do_b, do_t, do_h, do_d, D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    t = tl.program_id(0) * OWN + tl.arange(0, OWN)
    o = _positions(Out + (batch * S * H + head) * D, t, S, H * D, 1, D, BLOCK_D)
    do = _positions(DO + batch * do_b + head * do_h, t, S, do_t, do_d, D, BLOCK_D)
    tl.store(Delta + (batch * H + head) * S + t, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), mask=t < S)


@triton.jit
def _packed_bwd(
    QKV, DO, LSE, Delta, DQKV, S, H, do_b, do_t, do_h, do_d, scale, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = batch * S * 3 * H * D + head * D
    QKV += base
    DO += batch * do_b + head.to(tl.int64) * do_h
    row = tl.program_id(1).to(tl.int64) * S
    own = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    # The same place of the gradient as of the projection; dk and dv lie one and two slices behind dq.
    into = DQKV + base + own[:, None].to(tl.int64) * (3 * H * D) + d[None, :]
    inside = (own[:, None] < S) & (d[None, :] < D)

    own_k = _positions(QKV + H * D, own, S, 3 * H * D, 1, D, BLOCK_D)
    own_v = _positions(QKV + 2 * H * D, own, S, 3 * H * D, 1, D, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(first, S, OTHER):
        m = start + tl.arange(0, OTHER)
        q = _positions(QKV, m, S, 3 * H * D, 1, D, BLOCK_D)
        do = _positions(DO, m, S, do_t, do_d, D, BLOCK_D)
        # Infinity for positions past S makes their probabilities exact zeros.
        lse = tl.load(LSE + row + m, mask=m < S, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < S, other=0.0)
        p = tl.exp2(tl.dot(own_k, tl.trans(q)) * scale_log2 - lse[None, :])
        p = tl.where(m[None, :] >= own[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(own_v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(into + H * D, dk * scale, mask=inside)
    tl.store(into + 2 * H * D, dv, mask=inside)

    own_q = _positions(QKV, own, S, 3 * H * D, 1, D, BLOCK_D)
    own_do = _positions(DO, own, S, do_t, do_d, D, BLOCK_D)
    own_lse = tl.load(LSE + row + own, mask=own < S, other=float("inf"))
    own_delta = tl.load(Delta + row + own, mask=own < S, other=0.0)
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + OWN, S), OTHER):
        n = start + tl.arange(0, OTHER)
        k = _positions(QKV + H * D, n, S, 3 * H * D, 1, D, BLOCK_D)
        v = _positions(QKV + 2 * H * D, n, S, 3 * H * D, 1, D, BLOCK_D)
        p = tl.exp2(tl.dot(own_q, tl.trans(k)) * scale_log2 - own_lse[:, None])
        p = tl.where(own[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(own_do, tl.trans(v)) - own_delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(into, dq * scale, mask=inside)


def backward(saved, grad_o, needs=None):
    qkv, o, lse = saved
    B, S, _, H, D = qkv.shape
    scale = D**-0.5
    widths = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    delta, dqkv = torch.empty_like(lse), torch.empty_like(qkv)
    _packed_delta[(triton.cdiv(S, 64), B * H)](o, grad_o, delta, S, H, *grad_o.stride(), **widths, OWN=64)
    tiles = _tiles(S, D, qkv.element_size())
    _packed_bwd[(triton.cdiv(S, tiles["OWN"]), B * H)](
        qkv, grad_o, lse, delta, dqkv, S, H, *grad_o.stride(), scale, scale * 1.4426950408889634, **widths, **tiles
    )
    return dqkv


# --- check ---
SWEEP = (
    {"B": 1, "S": 64, "H": 2, "D": 32},
    {"B": 2, "S": 77, "H": 3, "D": 20, "dtype": "float16"},
    {"B": 1, "S": 50, "H": 2, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 2048, "H": 16, "D": 64, "dtype": "bfloat16"},)


def make_args(B, S, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, S, 3, H, D, generator=g).to(device, getattr(torch, dtype)),)


def reference(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
