"""Gather and scatter: embeddings, index_add, routing of experts, cross entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _embed(TABLE, IDS, OUT, D, PAD, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.load(IDS + row)
    c = tl.arange(0, BLOCK)
    x = tl.load(TABLE + index * D + c, mask=(c < D) & (index != PAD), other=0.0)
    tl.store(OUT + row * D + c, x, mask=c < D)


def embed(table: Tensor, ids: Tensor, padding: int) -> Tensor:
    out = torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=table.device)
    _embed[(ids.numel(),)](table, ids, out, table.shape[1], padding, BLOCK=16)
    return out


def _embed_reference(table: Tensor, ids: Tensor, padding: int) -> Tensor:
    return table[ids] * (ids != padding)[..., None]


@triton.jit
def _index_add(X, INDEX, OUT, n, D, alpha, BN: tl.constexpr, BD: tl.constexpr):
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BD)
    index = tl.load(INDEX + r, mask=r < n, other=0)
    live = (r < n)[:, None] & (c < D)[None, :]
    x = tl.load(X + r[:, None] * D + c[None, :], mask=live, other=0.0)
    tl.atomic_add(OUT + index[:, None] * D + c[None, :], alpha * x, mask=live)


def index_add(base: Tensor, index: Tensor, x: Tensor) -> Tensor:
    out = base.clone()
    _index_add[(triton.cdiv(x.shape[0], 4),)](x, index, out, *x.shape, 0.5, BN=4, BD=16)
    return out


@triton.jit
def _segment_sum(X, ORDER, STARTS, OUT, D, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in range(tl.load(STARTS + segment), tl.load(STARTS + segment + 1)):
        row = tl.load(ORDER + k)
        acc += tl.load(X + row * D + c, mask=c < D, other=0.0)
    tl.store(OUT + segment * D + c, acc, mask=c < D)


def scatter_by_sorting(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Torch sorts the indices between allocation and launch, so that no atomics are needed."""
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=size)
    starts = torch.zeros(size + 1, dtype=torch.int64, device=x.device)
    torch.cumsum(counts, 0, out=starts[1:])
    out = torch.empty((size, x.shape[1]), dtype=x.dtype, device=x.device)
    _segment_sum[(size,)](x, order, starts, out, x.shape[1], BLOCK=16)
    return out


@triton.jit
def _route(LOGITS, WEIGHTS, EXPERTS, E, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    logits = tl.load(LOGITS + token * E + e, mask=e < E, other=-float("inf")).to(tl.float32)
    p = tl.exp(logits - tl.max(logits, 0))
    p = p / tl.sum(p, 0)
    left = tl.where(e < E, p, -1.0)
    total = 0.0
    for k in tl.static_range(K):
        best, where = tl.max(left, 0, return_indices=True)
        tl.store(WEIGHTS + token * K + k, best)
        tl.store(EXPERTS + token * K + k, where)
        total += best
        left = tl.where(e == where, -1.0, left)
    k = tl.arange(0, K)
    tl.debug_barrier()
    tl.store(WEIGHTS + token * K + k, tl.load(WEIGHTS + token * K + k) / total)


@triton.jit
def _experts(X, W, ORDER, EXPERT, SCALE, OUT, T, D, F_, K: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr):
    slot = tl.load(ORDER + tl.program_id(0))
    token, expert = slot // K, tl.load(EXPERT + slot)
    f = tl.arange(0, BF)
    acc = tl.zeros((BF,), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x = tl.load(X + token * D + d, mask=d < D, other=0.0)
        w = tl.load(
            W + expert * D * F_ + d[:, None] * F_ + f[None, :], mask=(d < D)[:, None] & (f < F_)[None, :], other=0.0
        )
        acc += tl.sum(x[:, None] * w, 0)
    tl.atomic_add(OUT + token * F_ + f, acc * tl.load(SCALE + slot), mask=f < F_)


def mixture_of_experts(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    """Top 2 of the experts, renormalised; slots are sorted by expert."""
    (T, D), width = x.shape, w.shape[2]
    weights = torch.empty((T, 2), dtype=torch.float32, device=x.device)
    experts = torch.empty((T, 2), dtype=torch.int32, device=x.device)
    _route[(T,)](logits, weights, experts, logits.shape[1], K=2, BLOCK=8)
    order = experts.flatten().argsort(stable=True).to(torch.int32)
    out = torch.zeros((T, width), dtype=torch.float32, device=x.device)
    _experts[(2 * T,)](x, w, order, experts, weights, out, T, D, width, K=2, BD=8, BF=16)
    return out


def _experts_reference(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    best, where = logits.softmax(-1).topk(2, -1)
    best = best / best.sum(-1, keepdim=True)
    return torch.einsum("td,tkdf,tk->tf", x, w[where], best)


@triton.jit
def _cross_entropy(
    LOGITS, TARGET, LOSS, Z, V, ignore, smoothing, z_scale, softcap, BLOCK: tl.constexpr, CAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    if target == ignore:
        tl.store(LOSS + row, 0.0)
        tl.store(Z + row, 0.0)
        return
    top = float("-inf")
    total = 0.0
    plain_sum = 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row * V + c, mask=c < V, other=float("-inf")).to(tl.float32)
        if CAP:
            x = tl.where(c < V, softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0), float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        plain_sum += tl.sum(tl.where(c < V, x, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    at_target = tl.load(LOGITS + row * V + target).to(tl.float32)
    if CAP:
        at_target = softcap * (2.0 * tl.sigmoid(2.0 * at_target / softcap) - 1.0)
    loss = lse - at_target
    if smoothing > 0:
        loss = (1 - smoothing) * loss + smoothing * (lse - plain_sum / V)
    z = z_scale * lse * lse
    tl.store(LOSS + row, loss + z)
    tl.store(Z + row, z)


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    loss, z = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _cross_entropy[(rows,)](
        logits, target, loss, z, vocabulary, -100, smoothing, 1e-3, softcap, BLOCK=16, CAP=softcap is not None
    )
    count = (target != -100).sum()
    return loss.sum() / count, z.sum() / count


def _cross_entropy_reference(
    logits: Tensor, target: Tensor, smoothing: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    z = (1e-3 * logits.logsumexp(-1) ** 2)[target != -100].mean()
    return F.cross_entropy(logits, target, label_smoothing=smoothing) + z, z


@triton.jit
def _one_hot(LABELS, X, OUT, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    hot = tl.load(LABELS + row) == c
    x = tl.load(X + row)
    tl.store(OUT + row * C + c, tl.where(hot, x, 0).to(OUT.dtype.element_ty), mask=c < C)


def one_hot(labels: Tensor, x: Tensor) -> Tensor:
    out = torch.empty((labels.numel(), 5), dtype=x.dtype, device=x.device)
    _one_hot[(labels.numel(),)](labels, x, out, 5, BLOCK=8)
    return out


@triton.jit
def _gather_tile(X, INDEX, Y, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    x = tl.load(X + m * N + tl.arange(0, N)[None, :])
    index = tl.load(INDEX + m * K + tl.arange(0, K)[None, :])
    picked = tl.gather(x, index, axis=1)
    tl.store(Y + m * K + tl.arange(0, K)[None, :], picked * picked)


def gather_tile(x: Tensor, index: Tensor) -> Tensor:
    y = torch.empty(index.shape, dtype=x.dtype, device=x.device)
    _gather_tile[(1,)](x, index, y, *x.shape, index.shape[1])
    return y


@triton.jit
def _pointer_table(TABLE, SIZES, OUT, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(TABLE + row).to(tl.pointer_type(tl.float32))
    c = tl.arange(0, BLOCK)
    x = tl.load(start + c, mask=c < tl.load(SIZES + row), other=0.0)
    tl.store(OUT + row, tl.sum(x * x, 0))


def pointer_table(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Tensors of different sizes reached through a table of their addresses."""
    tensors = (a, b, c)
    table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=a.device)
    sizes = torch.tensor([t.numel() for t in tensors], dtype=torch.int32, device=a.device)
    out = torch.empty(3, device=a.device)
    _pointer_table[(3,)](table, sizes, out, BLOCK=16)
    return out


CASES = [
    *in_dtypes(
        Case("embedding", embed, lambda: (torch.randn(11, 13), torch.randint(0, 11, (4, 5)), 3), _embed_reference), BF16
    ),
    *in_dtypes(
        Case(
            "index_add_atomics",
            index_add,
            lambda: (torch.randn(5, 9), torch.randint(0, 5, (14,)), torch.randn(14, 9)),
            lambda base, index, x: base.index_add(0, index, x, alpha=0.5),
        ),
        HALF,
    ),
    Case(
        "scatter_by_sorting",
        scatter_by_sorting,
        lambda: (torch.randn(17, 10), torch.randint(0, 6, (17,)), 7),
        lambda x, index, size: x.new_zeros(size, 10).index_add(0, index, x),
    ),
    *in_dtypes(
        Case(
            "mixture_of_experts",
            mixture_of_experts,
            lambda: (torch.randn(7, 12), torch.randn(7, 5), torch.randn(5, 12, 10)),
            _experts_reference,
        ),
        BF16,
    ),
    *in_dtypes(
        Case(
            "cross_entropy_smoothed",
            cross_entropy,
            lambda: (torch.randn(6, 37) * 3, torch.tensor([3, -100, 36, 0, -100, 17]), 0.1, None),
            _cross_entropy_reference,
        ),
        BF16,
    ),
    Case(
        "cross_entropy_softcap",
        cross_entropy,
        lambda: (torch.randn(4, 20) * 9, torch.tensor([3, 19, -100, 7]), 0.0, 5.0),
        _cross_entropy_reference,
    ),
    Case(
        "one_hot",
        one_hot,
        lambda: (torch.tensor([1, 4, 0]), torch.randn(3)),
        lambda labels, x: F.one_hot(labels, 5) * x[:, None],
    ),
    *in_dtypes(
        Case(
            "gather_in_tile",
            gather_tile,
            lambda: (torch.randn(8, 16), torch.randint(0, 16, (8, 4), dtype=torch.int32)),
            lambda x, index: x.gather(1, index.long()) ** 2,
        ),
        HALF,
    ),
    Case(
        "pointer_table",
        pointer_table,
        lambda: (torch.randn(3), torch.randn(15), torch.randn(8)),
        lambda *tensors: torch.stack([t.square().sum() for t in tensors]),
    ),
]
