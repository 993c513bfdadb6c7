"""Attention as it is trained: dense, causal, grouped heads, windows, biases, sinks and ragged batches."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _online(acc, total, top, scores, v):
    new_top = tl.maximum(top, tl.max(scores, 1))
    # a row that has seen nothing yet keeps -inf, and -inf - -inf is NaN
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - shift[:, None])
    shrink = tl.exp(top - shift)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, total * shrink + tl.sum(p, 1), new_top


@triton.jit
def _attend(
    Q, K, V, OUT, LSE, SLOPES, SINKS,
    sqb, sqh, sqn, skb, skh, skn, heads, group, N_Q, N_K, scale, window,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BM
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    m, d = first + tl.arange(0, BM), tl.arange(0, D)
    K += batch * skb + (head // group) * skh
    V += batch * skb + (head // group) * skh
    q = tl.load(Q + batch * sqb + head * sqh + m[:, None] * sqn + d[None, :], mask=m[:, None] < N_Q, other=0.0)
    q = (q * scale).to(q.dtype)
    acc = tl.zeros((BM, D), tl.float32)
    if SINK:  # a learned logit that takes weight but has no value
        top = tl.zeros((BM,), tl.float32) + tl.load(SINKS + head)
        total = tl.full((BM,), 1.0, tl.float32)
    else:
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
    low = 0
    high = N_K
    if CAUSAL:
        high = tl.minimum(N_K, first + BM)
    if WINDOW:
        low = tl.maximum(0, first - window + 1) // BN * BN
    for start in tl.range(low, high, BN, num_stages=2):
        n = start + tl.arange(0, BN)
        k = tl.load(K + n[None, :] * skn + d[:, None], mask=n[None, :] < N_K, other=0.0)
        v = tl.load(V + n[:, None] * skn + d[None, :], mask=n[:, None] < N_K, other=0.0)
        scores = tl.dot(q, k)
        distance = m[:, None] - n[None, :]
        if ALIBI:
            scores -= tl.load(SLOPES + head) * tl.abs(distance)
        live = n[None, :] < N_K
        if CAUSAL:
            live = live & (distance >= 0)
        if WINDOW:
            live = live & (distance < window)
        acc, total, top = _online(acc, total, top, tl.where(live, scores, float("-inf")), v)
    out = acc / total[:, None]
    tl.store(OUT + batch * sqb + head * sqh + m[:, None] * sqn + d[None, :], out, mask=m[:, None] < N_Q)
    tl.store(LSE + tl.program_id(1) * N_Q + m, top + tl.log(total), mask=m < N_Q)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q is (batch, heads, queries, width), k and v (batch, key heads, keys, width)."""
    B, H, N_Q, D = q.shape
    out, lse = torch.empty_like(q), torch.empty((B, H, N_Q), dtype=torch.float32, device=q.device)
    assert out.stride() == q.stride()
    assert k.stride() == v.stride()
    _attend[(triton.cdiv(N_Q, 16), B * H)](
        q, k, v, out, lse, slopes, sinks, *q.stride()[:3], *k.stride()[:3], H, H // k.shape[1], N_Q, k.shape[2],
        D**-0.5, window or 0, D=D, BM=16, BN=32,
        CAUSAL=causal, WINDOW=window is not None, ALIBI=slopes is not None, SINK=sinks is not None,
    )  # fmt: skip
    return out, lse


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    live = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        live = live & (distance >= 0)
    if window is not None:
        live = live & (distance < window)
    scores = scores.masked_fill(~live, -math.inf)
    with_sink = scores
    if sinks is not None:
        with_sink = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = with_sink.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


@triton.jit
def _ragged(Q, K, V, OUT, STARTS, sn, sh, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    sequence, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(STARTS + sequence).to(tl.int32)
    length = tl.load(STARTS + sequence + 1).to(tl.int32) - begin
    first = tl.program_id(0) * BM
    if first >= length:
        return
    m, d = first + tl.arange(0, BM), tl.arange(0, D)
    base = begin * sn + head * sh
    q = tl.load(Q + base + m[:, None] * sn + d[None, :], mask=m[:, None] < length, other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    for start in range(0, tl.minimum(length, first + BM), BN):
        n = start + tl.arange(0, BN)
        k = tl.load(K + base + n[None, :] * sn + d[:, None], mask=n[None, :] < length, other=0.0)
        v = tl.load(V + base + n[:, None] * sn + d[None, :], mask=n[:, None] < length, other=0.0)
        scores = tl.where(m[:, None] >= n[None, :], tl.dot(q, k) * scale, float("-inf"))
        acc, total, top = _online(acc, total, top, scores, v)
    tl.store(OUT + base + m[:, None] * sn + d[None, :], acc / total[:, None], mask=m[:, None] < length)


def ragged(qkv: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Packed (tokens, 3, heads, width) with the sequences' starts; the longest one decides the grid."""
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    heads, width = q.shape[1:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.zeros_like(q)
    grid = (triton.cdiv(longest, 16), starts.numel() - 1, heads)
    _ragged[grid](q, k, v, out, starts, *q.stride()[:2], width**-0.5, D=width, BM=16, BN=16)
    return out


def _ragged_reference(qkv: Tensor, starts: Tensor, longest: int) -> Tensor:
    parts = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = qkv[begin:end].permute(1, 2, 0, 3)
        parts.append(attend_reference(q[None], k[None], v[None], causal=True)[0][0].transpose(0, 1))
    return torch.cat(parts)


@triton.jit
def _decode_part(
    Q, CACHE_K, CACHE_V, TABLE, LENGTHS, OUT, LSE, pages, scale,
    PAGE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(LENGTHS + row)
    d, n = tl.arange(0, D), tl.arange(0, PAGE)
    q = tl.load(Q + row * D + d)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for page in range(split, tl.cdiv(length, PAGE), SPLITS):
        block = tl.load(TABLE + row * pages + page).to(tl.int64)
        at = (block * PAGE + n)[:, None] * D + d[None, :]
        live = page * PAGE + n < length
        k = tl.load(CACHE_K + at, mask=live[:, None], other=0.0)
        v = tl.load(CACHE_V + at, mask=live[:, None], other=0.0)
        scores = tl.where(live, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        p = tl.exp(scores - new_top)
        acc = acc * tl.exp(top - new_top) + tl.sum(p[:, None] * v, 0)
        total = total * tl.exp(top - new_top) + tl.sum(p, 0)
        top = new_top
    slot = row * SPLITS + split
    if total > 0:
        tl.store(OUT + slot * D + d, acc / total)
        tl.store(LSE + slot, top + tl.log(total))
    else:
        tl.store(OUT + slot * D + d, tl.zeros((D,), tl.float32))
        tl.store(LSE + slot, float("-inf"))


@triton.jit
def _decode_merge(PARTS, LSE, OUT, D: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    lse = tl.load(LSE + row * SPLITS + s)
    weight = tl.exp(lse - tl.max(lse, 0))
    parts = tl.load(PARTS + (row * SPLITS + s)[:, None] * D + d[None, :])
    tl.store(OUT + row * D + d, tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0))


def decode(q: Tensor, cache_k: Tensor, cache_v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One query per row over pages named by a table; parts of the pages are merged by a second launch."""
    rows, width = q.shape
    splits = 4
    parts = torch.empty((rows, splits, width), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, splits), dtype=torch.float32, device=q.device)
    _decode_part[(rows, splits)](
        q, cache_k, cache_v, table, lengths, parts, lse, table.shape[1], width**-0.5,
        PAGE=cache_k.shape[1], D=width, SPLITS=splits,
    )  # fmt: skip
    out = torch.empty_like(q)
    _decode_merge[(rows,)](parts, lse, out, D=width, SPLITS=splits)
    return out


def _decode_reference(q: Tensor, cache_k: Tensor, cache_v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    rows = []
    for row, length in enumerate(lengths.tolist()):
        k, v = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (cache_k, cache_v))
        rows.append(((q[row] @ k.t()) * q.shape[1] ** -0.5).softmax(-1) @ v)
    return torch.stack(rows)


def _decode_args() -> tuple[Tensor, ...]:
    table = torch.randperm(12)[:12].view(3, 4).to(torch.int32)
    lengths = torch.tensor([5, 16, 11], dtype=torch.int32)
    return torch.randn(3, 16), torch.randn(12, 4, 16), torch.randn(12, 4, 16), table, lengths


def _qkv(heads: int, key_heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, queries, 16), torch.randn(2, key_heads, keys, 16), torch.randn(2, key_heads, keys, 16)


def _positions_first() -> tuple[Tensor, Tensor, Tensor]:
    """(batch, positions, heads, width) in memory, as a projection leaves it."""
    return tuple(torch.randn(1, 37, 2, 16).transpose(1, 2) for _ in range(3))


CASES = [
    *in_dtypes(Case("attention_full", attend, lambda: _qkv(2, 2, 33, 50), attend_reference), BF16, HALF),
    *in_dtypes(
        Case("attention_causal", attend, lambda: (*_qkv(2, 2, 41, 41), None, None, True), attend_reference), BF16
    ),
    Case("attention_positions_first", attend, lambda: (*_positions_first(), None, None, True), attend_reference),
    Case("attention_grouped_heads", attend, lambda: (*_qkv(4, 2, 20, 20), None, None, True), attend_reference),
    Case("attention_window", attend, lambda: (*_qkv(2, 1, 75, 75), None, None, True, 19), attend_reference),
    Case("attention_alibi", attend, lambda: (*_qkv(3, 3, 24, 24), torch.rand(3), None, True), attend_reference),
    *in_dtypes(
        Case("attention_sinks", attend, lambda: (*_qkv(2, 2, 24, 24), None, torch.randn(2), True), attend_reference),
        BF16,
    ),
    Case(
        "attention_ragged_packed",
        ragged,
        lambda: (torch.randn(50, 3, 2, 16), torch.tensor([0, 17, 18, 50], dtype=torch.int32), 32),
        _ragged_reference,
    ),
    Case("attention_decode_paged_split", decode, _decode_args, _decode_reference),
]
