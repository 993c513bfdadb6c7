"""Attention without softmax: retention, gated and delta-rule recurrences, in chunks and step by step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _retention(Q, K, V, GAMMA, OUT, STATE, T, heads, scale, D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr):
    # one pass over chunks; the state of a head stays in registers
    bh = tl.program_id(0)
    log_gamma = tl.log(tl.load(GAMMA + bh % heads).to(tl.float32))
    i, d, e = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, DV)
    state = tl.zeros((D, DV), tl.float32)
    decay = tl.where(i[:, None] >= i[None, :], tl.exp((i[:, None] - i[None, :]) * log_gamma), 0.0)
    for start in range(0, T, BT):
        t = start + i
        live = t < T
        q = tl.load(Q + (bh * T + t)[:, None] * D + d[None, :], mask=live[:, None], other=0.0) * scale
        k = tl.load(K + (bh * T + t)[None, :] * D + d[:, None], mask=live[None, :], other=0.0)
        v = tl.load(V + (bh * T + t)[:, None] * DV + e[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(q.to(k.dtype), k) * decay
        out = tl.dot(scores.to(v.dtype), v)
        out += tl.dot((q * tl.exp((i + 1) * log_gamma)[:, None]).to(state.dtype), state)
        tl.store(OUT + (bh * T + t)[:, None] * DV + e[None, :], out, mask=live[:, None])
        left = tl.minimum(BT, T - start)
        reach = tl.where(live, tl.exp((left - 1 - i) * log_gamma), 0.0)
        state = state * tl.exp(left * log_gamma) + tl.dot((k * reach[None, :]).to(v.dtype), v)
    tl.store(STATE + bh * D * DV + d[:, None] * DV + e[None, :], state)


def retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    (B, H, T, D), DV = q.shape, v.shape[-1]
    out = torch.empty((B, H, T, DV), dtype=v.dtype, device=v.device)
    state = torch.empty((B, H, D, DV), dtype=torch.float32, device=v.device)
    _retention[(B * H,)](q, k, v, gamma, out, state, T, H, D**-0.5, D=D, DV=DV, BT=16)
    return out, state


def _retention_reference(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    state, steps = v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = gamma[:, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
        steps.append((q[:, :, t, None] @ state)[..., 0, :] * q.shape[3] ** -0.5)
    return torch.stack(steps, 2), state


@triton.jit
def _gla_states(K, V, G, STATES, T, D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr):
    # states before every chunk, through the logarithm of gates per key channel
    bh = tl.program_id(0)
    i, d, e = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, DV)
    state = tl.zeros((D, DV), tl.float32)
    for chunk in range(tl.cdiv(T, BT)):
        tl.store(STATES + (bh * tl.cdiv(T, BT) + chunk) * D * DV + d[:, None] * DV + e[None, :], state)
        t = chunk * BT + i
        live = (t < T)[:, None]
        g = tl.load(G + (bh * T + t)[:, None] * D + d[None, :], mask=live, other=0.0)
        k = tl.load(K + (bh * T + t)[:, None] * D + d[None, :], mask=live, other=0.0)
        v = tl.load(V + (bh * T + t)[:, None] * DV + e[None, :], mask=live, other=0.0)
        total = tl.sum(g, 0)
        k = k * tl.exp(total[None, :] - tl.cumsum(g, 0))
        state = state * tl.exp(total)[:, None] + tl.dot(tl.trans(k), v)


@triton.jit
def _gla_outputs(Q, K, V, G, STATES, OUT, T, D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr):
    chunk, bh = tl.program_id(0), tl.program_id(1)
    i, d, e = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, DV)
    t = chunk * BT + i
    live = (t < T)[:, None]
    at = (bh * T + t)[:, None] * D + d[None, :]
    g = tl.cumsum(tl.load(G + at, mask=live, other=0.0), 0)
    q = tl.load(Q + at, mask=live, other=0.0) * tl.exp(g)
    k = tl.load(K + at, mask=live, other=0.0) * tl.exp(-g)
    v = tl.load(V + (bh * T + t)[:, None] * DV + e[None, :], mask=live, other=0.0)
    scores = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k)), 0.0)
    state = tl.load(STATES + (bh * tl.num_programs(0) + chunk) * D * DV + d[:, None] * DV + e[None, :])
    out = tl.dot(scores, v) + tl.dot(q, state)
    tl.store(OUT + (bh * T + t)[:, None] * DV + e[None, :], out, mask=live)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Two launches: states of chunks first, then all outputs side by side. Gates are logarithms."""
    (BH, T, D), DV = q.shape, v.shape[-1]
    chunks = triton.cdiv(T, 16)
    states = torch.empty((BH, chunks, D, DV), dtype=torch.float32, device=q.device)
    out = torch.empty((BH, T, DV), dtype=v.dtype, device=q.device)
    _gla_states[(BH,)](k, v, gates, states, T, D=D, DV=DV, BT=16)
    _gla_outputs[(chunks, BH)](q, k, v, gates, states, out, T, D=D, DV=DV, BT=16)
    return out


def _gla_reference(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    state, steps = v.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        state = gates[:, t, :, None].exp() * state + k[:, t, :, None] * v[:, t, None]
        steps.append((q[:, t, None] @ state)[:, 0])
    return torch.stack(steps, 1)


@triton.jit
def _delta_rule(Q, K, V, BETA, OUT, T, D: tl.constexpr, DV: tl.constexpr):
    bh = tl.program_id(0)
    d, e = tl.arange(0, D), tl.arange(0, DV)
    state = tl.zeros((D, DV), tl.float32)
    for t in range(T):
        at = bh * T + t
        q = tl.load(Q + at * D + d).to(tl.float32)
        k = tl.load(K + at * D + d).to(tl.float32)
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        v = tl.load(V + at * DV + e).to(tl.float32)
        known = tl.sum(state * k[:, None], 0)
        state += k[:, None] * (tl.load(BETA + at) * (v - known))[None, :]
        tl.store(OUT + at * DV + e, tl.sum(state * q[:, None], 0))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    out = torch.empty_like(v)
    _delta_rule[(q.shape[0],)](q, k, v, beta, out, q.shape[1], D=q.shape[2], DV=v.shape[2])
    return out


def _delta_reference(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state, steps = v.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    for t in range(q.shape[1]):
        known = (k[:, t, None] @ state)[:, 0]
        state = state + k[:, t, :, None] * (beta[:, t, None] * (v[:, t] - known))[:, None]
        steps.append((q[:, t, None] @ state)[:, 0])
    return torch.stack(steps, 1)


@triton.jit
def _wkv(W, U, K, V, Y, T, C, BC: tl.constexpr):
    # the exponents are kept below a running maximum
    batch = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    live = c < C
    w = tl.load(W + c, mask=live, other=0.0)
    u = tl.load(U + c, mask=live, other=0.0)
    top_sum = tl.zeros((BC,), tl.float32)
    bottom_sum = tl.zeros((BC,), tl.float32)
    top = tl.full((BC,), -1e38, tl.float32)
    for t in range(T):
        at = (batch * T + t) * C + c
        k = tl.load(K + at, mask=live, other=0.0)
        v = tl.load(V + at, mask=live, other=0.0)
        peak = tl.maximum(top, u + k)
        old, new = tl.exp(top - peak), tl.exp(u + k - peak)
        tl.store(Y + at, (old * top_sum + new * v) / (old * bottom_sum + new), mask=live)
        peak = tl.maximum(top - w, k)
        old, new = tl.exp(top - w - peak), tl.exp(k - peak)
        top_sum = old * top_sum + new * v
        bottom_sum = old * bottom_sum + new
        top = peak


def wkv(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, T, C = k.shape
    y = torch.empty_like(v)
    _wkv[(triton.cdiv(C, 4), B)](w, u, k, v, y, T, C, BC=4)
    return y


def _wkv_reference(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    steps = []
    for t in range(k.shape[1]):
        age = torch.arange(t - 1, -1, -1, dtype=k.dtype)
        weights = torch.cat([(k[:, :t] - age[:, None] * w).exp(), (u + k[:, t : t + 1]).exp()], 1)
        steps.append((weights * v[:, : t + 1]).sum(1) / weights.sum(1))
    return torch.stack(steps, 1)


@triton.jit
def _ssd_chunk(X, A, B, C, Y, T, D: tl.constexpr, S: tl.constexpr, BT: tl.constexpr):
    # the state space dual: a lower triangular matrix of decays, inside of chunks and between them
    bh = tl.program_id(0)
    i, d, s = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, S)
    state = tl.zeros((S, D), tl.float32)
    for start in tl.range(0, T, BT, num_stages=1):
        t = start + i
        live = t < T
        a = tl.cumsum(tl.load(A + bh * T + t, mask=live, other=0.0), 0)
        x = tl.load(X + (bh * T + t)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        b = tl.load(B + (bh * T + t)[:, None] * S + s[None, :], mask=live[:, None], other=0.0)
        c = tl.load(C + (bh * T + t)[:, None] * S + s[None, :], mask=live[:, None], other=0.0)
        segment = tl.where(i[:, None] >= i[None, :], a[:, None] - a[None, :], float("-inf"))
        y = tl.dot(tl.dot(c, tl.trans(b)) * tl.exp(segment), x) + tl.dot(c * tl.exp(a)[:, None], state)
        tl.store(Y + (bh * T + t)[:, None] * D + d[None, :], y, mask=live[:, None])
        last = tl.sum(tl.where(i == BT - 1, a, 0.0), 0)
        state = state * tl.exp(last) + tl.dot(tl.trans(b * tl.exp(last - a)[:, None]), x)


def ssd(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _ssd_chunk[(x.shape[0],)](x, a, b, c, y, x.shape[1], D=x.shape[2], S=b.shape[2], BT=16)
    return y


def _ssd_reference(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    total = a.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
    return (c @ b.mT * decay) @ x


@triton.jit
def _normalized_linear(Q, K, V, OUT, T, D: tl.constexpr, BT: tl.constexpr):
    # features elu + 1; a sum of keys divides
    bh = tl.program_id(0)
    i, d = tl.arange(0, BT), tl.arange(0, D)
    kv = tl.zeros((D, D), tl.float32)
    keys = tl.zeros((D,), tl.float32)
    for start in range(0, T, BT):
        at = (bh * T + start + i)[:, None] * D + d[None, :]
        live = (start + i < T)[:, None]
        k = tl.load(K + at, mask=live, other=0.0)
        k = tl.where(live, tl.where(k > 0, k + 1.0, tl.exp(k)), 0.0)
        kv = tl.dot(tl.trans(k), tl.load(V + at, mask=live, other=0.0), kv)
        keys += tl.sum(k, 0)
    for start in range(0, T, BT):
        at = (bh * T + start + i)[:, None] * D + d[None, :]
        live = (start + i < T)[:, None]
        q = tl.load(Q + at, mask=live, other=0.0)
        q = tl.where(q > 0, q + 1.0, tl.exp(q))
        tl.store(OUT + at, tl.dot(q, kv) / tl.sum(q * keys[None, :], 1)[:, None], mask=live)


def normalized_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(v)
    _normalized_linear[(q.shape[0],)](q, k, v, out, q.shape[1], D=q.shape[2], BT=16)
    return out


def _normalized_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    return q @ (k.mT @ v) / (q @ k.sum(1)[..., None])


def _heads(*widths: int, length: int = 37) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, length, width) for width in widths)


CASES = [
    *in_dtypes(
        Case(
            "retention_chunks",
            retention,
            lambda: (*(torch.randn(1, 2, 37, 16) for _ in range(3)), torch.tensor([0.9, 0.8])),
            _retention_reference,
        ),
        BF16,
    ),
    Case(
        "gated_linear_attention",
        gated_linear_attention,
        lambda: (*_heads(16, 16, 16), -torch.rand(2, 37, 16) * 0.3),
        _gla_reference,
    ),
    *in_dtypes(
        Case("delta_rule", delta_rule, lambda: (*_heads(8, 8, 4, length=11), torch.rand(2, 11)), _delta_reference),
        HALF,
    ),
    Case("wkv_stabilised", wkv, lambda: (torch.rand(6), torch.randn(6), *_heads(6, 6, length=13)), _wkv_reference),
    Case("ssd_chunks", ssd, lambda: (*_heads(16), -torch.rand(2, 37), *_heads(16, 16)), _ssd_reference),
    Case("normalized_linear_attention", normalized_linear, lambda: _heads(16, 16, 16), _normalized_reference),
]
