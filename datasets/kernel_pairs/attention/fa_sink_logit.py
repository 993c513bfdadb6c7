"""Causal attention with a learned sink per head: its gradient is -sum of p_sink delta, and needs no score.

The sink is one more logit in the softmax, with no value: rows may leave part of their weight there. Once it is in the
log-sum-exp, the gradients of q, k and v are those of plain attention; as the sink's value is 0, its dS is p_sink (0 -
delta). The delta kernel, which has every row of o and do, therefore sums it on its way.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_sink_logit",
    "family": "attention",
    "op": "attention_sink",
    "schema": 1,
    "techniques": (
        "saved-lse", "delta-preprocess", "two-stage-partials", "scalar-gradient", "causal-bounds", "loop-swap",
        "owner-grid", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, T, H, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "sink"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _head_rows(X, row, length, s_row, s_col, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < length) & (d[None, :] < D)
    return tl.load(X + row[:, None].to(tl.int64) * s_row + d[None, :] * s_col, mask=inside, other=0.0)


@triton.jit
def _sink_fwd(
    Q, K, V, Sink, Out, LSE, H, T, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _head_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
    # The sink opens the softmax: a maximum and a weight of 1 before any key is seen.
    top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(Sink + head).to(tl.float32) * 1.4426950408889634
    norm = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _head_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
        v = _head_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
        s = tl.where(m[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    out_at = base + m[:, None] * H * D + d[None, :]
    tl.store(Out + out_at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + (batch * H + head) * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    T, D = q.shape[1], q.shape[3]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v, sink):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _sink_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, sink, o, lse, H, T, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, sink, o, lse)


# --- backward ---
@triton.jit
def _sink_delta(
    Out, DO, LSE, Sink, Delta, DSink, H, T, D, do_b, do_t, do_h, do_d, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = _head_rows(Out + (batch * T * H + head) * D, m, T, H * D, 1, D, BLOCK_D).to(tl.float32)
    do = _head_rows(DO + batch * do_b + head.to(tl.int64) * do_h, m, T, do_t, do_d, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(o * do, 1)
    row = (batch * H + head) * T + m
    tl.store(Delta + row, delta, mask=m < T)
    lse = tl.load(LSE + row, mask=m < T, other=float("inf"))
    p_sink = tl.exp2(tl.load(Sink + head).to(tl.float32) * 1.4426950408889634 - lse)
    # (tiles, B * H): summed over tiles and batch afterwards.
    tl.store(DSink + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), -tl.sum(p_sink * delta, 0))


@triton.jit
def _sink_dq(
    Q, K, V, DO, LSE, Delta, DQ, H, T, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    row = (batch * H + head) * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _head_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
    do = _head_rows(DO + batch * do_b + head.to(tl.int64) * do_h, m, T, do_t, do_d, D, BLOCK_D)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _head_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
        v = _head_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    out_at = base + m[:, None] * H * D + d[None, :]
    tl.store(DQ + out_at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _sink_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    base = (batch * T * H + head) * D
    row = (batch * H + head) * T
    DO += batch * do_b + head.to(tl.int64) * do_h
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = _head_rows(K + base, n, T, H * D, 1, D, BLOCK_D)
    v = _head_rows(V + base, n, T, H * D, 1, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _head_rows(Q + base, m, T, H * D, 1, D, BLOCK_D)
        do = _head_rows(DO, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = base + n[:, None] * H * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, sink, o, lse = saved
    need_q, need_k, need_v, _ = needs or (True,) * 4
    B, T, H, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    parts = torch.empty(triton.cdiv(T, 64), B, H, device=q.device, dtype=torch.float32)
    _sink_delta[(triton.cdiv(T, 64), B * H)](
        o, grad_o, lse, sink, delta, parts, H, T, D, *grad_o.stride(), BLOCK_M=64, BLOCK_D=BLOCK_D
    )
    own, other, warps = _blocks(q)
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, D, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _sink_dq[grid](
            q, k, v, grad_o, lse, delta, dq, *sizes, BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _sink_dkdv[grid](
            q, k, v, grad_o, lse, delta, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps
        )
    return dq, dk, dv, parts.sum((0, 1)).to(sink.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 3, "T": 75, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, T, H, D),) * 3, (H,))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, sink):
    B, T, H, D = q.shape
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    s = ((q @ k.transpose(-1, -2)).float() * D**-0.5).masked_fill(later, float("-inf"))
    with_sink = torch.cat((s, sink.float().view(1, H, 1, 1).expand(B, H, T, 1)), -1)
    return (with_sink.softmax(-1)[..., :-1].to(v.dtype) @ v).transpose(1, 2)
