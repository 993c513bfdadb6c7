"""Steps in time: recurrent cells, decoding by dynamic programming, moving averages, sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case


@triton.jit
def _lstm(GATES, WH, H0, C0, H, C, T, B, D: tl.constexpr, BB: tl.constexpr):
    # the hidden state goes through memory between steps, because a product wants it whole
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    d, k = tl.arange(0, D), tl.arange(0, D)
    live = (b < B)[:, None]
    at = b[:, None] * D + d[None, :]
    h = tl.load(H0 + at, mask=live, other=0.0)
    c = tl.load(C0 + at, mask=live, other=0.0)
    for t in range(T):
        gate = GATES + (t * B + b)[:, None] * 4 * D + d[None, :]
        pre_i = tl.load(gate, mask=live, other=0.0)
        pre_f = tl.load(gate + D, mask=live, other=0.0)
        pre_g = tl.load(gate + 2 * D, mask=live, other=0.0)
        pre_o = tl.load(gate + 3 * D, mask=live, other=0.0)
        w = WH + k[:, None] * 4 * D + d[None, :]
        pre_i = tl.dot(h, tl.load(w), pre_i, input_precision="ieee")
        pre_f = tl.dot(h, tl.load(w + D), pre_f, input_precision="ieee")
        pre_g = tl.dot(h, tl.load(w + 2 * D), pre_g, input_precision="ieee")
        pre_o = tl.dot(h, tl.load(w + 3 * D), pre_o, input_precision="ieee")
        c = tl.sigmoid(pre_f) * c + tl.sigmoid(pre_i) * (2.0 * tl.sigmoid(2.0 * pre_g) - 1.0)
        h = tl.sigmoid(pre_o) * (2.0 * tl.sigmoid(2.0 * c) - 1.0)
        tl.store(H + t * B * D + at, h, mask=live)
    tl.store(C + at, c, mask=live)


def lstm(gates: Tensor, wh: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
    T, B, D = gates.shape[0], *h0.shape
    h, c = torch.empty((T, B, D), device=h0.device), torch.empty_like(c0)
    _lstm[(triton.cdiv(B, 16),)](gates, wh, h0, c0, h, c, T, B, D=D, BB=16)
    return h, c


def _lstm_reference(gates: Tensor, wh: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    steps = []
    for gate in gates:
        i, f, g, o = (gate + h @ wh).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        steps.append(h)
    return torch.stack(steps), c


@triton.jit
def _ema(X, RATE, Y, T, C, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.sigmoid(tl.load(RATE + c, mask=c < C, other=0.0))
    state = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32) + 1.0
    for t in range(T):
        x = tl.load(X + t * C + c, mask=c < C, other=0.0)
        state = rate * state + (1.0 - rate) * x
        weight *= rate
        # the bias of the start is divided out
        tl.store(Y + t * C + c, state / (1.0 - weight), mask=c < C)


def moving_average(x: Tensor, rate: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _ema[(triton.cdiv(x.shape[1], 8),)](x, rate, y, *x.shape, BLOCK=8)
    return y


def _moving_reference(x: Tensor, rate: Tensor) -> Tensor:
    rate, state, steps = rate.sigmoid(), torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        state = rate * state + (1 - rate) * x[t]
        steps.append(state / (1 - rate ** (t + 1)))
    return torch.stack(steps)


@triton.jit
def _gumbel(LOGITS, Y, SAMPLE, N, seed, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    logits = tl.load(LOGITS + row * N + c, mask=c < N, other=float("-inf"))
    # a hash for noise: integers that are the same everywhere
    h = (row * BLOCK + c + seed).to(tl.uint32) * 2654435761
    u = ((h >> 9).to(tl.float32) + 0.5) / 8388608.0
    z = (logits - tl.log(-tl.log(u))) / temperature
    e = tl.exp(z - tl.max(z, 0))
    tl.store(Y + row * N + c, e / tl.sum(e, 0), mask=c < N)
    tl.store(SAMPLE + row, tl.argmax(z, 0))


def gumbel_softmax(logits: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(logits)
    sample = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _gumbel[(logits.shape[0],)](logits, y, sample, logits.shape[1], seed, 0.7, BLOCK=16)
    return y, sample


def _gumbel_reference(logits: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    rows, N = logits.shape
    h = (torch.arange(rows)[:, None] * 16 + torch.arange(N) + seed) * 2654435761 % (1 << 32)
    u = ((h >> 9).double() + 0.5) / 8388608
    z = (logits - (-u.log()).log()) / 0.7
    return z.softmax(1), z.argmax(1)


@triton.jit
def _viterbi(SCORES, TRANSITIONS, BEST, PATH, BACK, T, K: tl.constexpr):
    # forward for the best score, backwards through stored places for the path
    row = tl.program_id(0)
    i, j = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :]
    transitions = tl.load(TRANSITIONS + i * K + j)
    state = tl.load(SCORES + row * T * K + tl.arange(0, K))
    for t in range(1, T):
        options = state[:, None] + transitions
        best, place = tl.max(options, 0, return_indices=True)
        tl.store(BACK + (row * T + t) * K + tl.arange(0, K), place)
        state = best + tl.load(SCORES + (row * T + t) * K + tl.arange(0, K))
    best, place = tl.max(state, 0, return_indices=True)
    tl.store(BEST + row, best)
    tl.debug_barrier()
    for t in range(T - 1, 0, -1):
        tl.store(PATH + row * T + t, place)
        place = tl.load(BACK + (row * T + t) * K + place)
    tl.store(PATH + row * T, place)


def viterbi(scores: Tensor, transitions: Tensor) -> tuple[Tensor, Tensor]:
    B, T, K = scores.shape
    best = torch.empty(B, device=scores.device)
    path = torch.empty((B, T), dtype=torch.int32, device=scores.device)
    back = torch.empty((B, T, K), dtype=torch.int32, device=scores.device)
    _viterbi[(B,)](scores, transitions, best, path, back, T, K=K)
    return best, path


def _viterbi_reference(scores: Tensor, transitions: Tensor) -> tuple[Tensor, Tensor]:
    state, places = scores[:, 0], []
    for t in range(1, scores.shape[1]):
        best, place = (state[:, :, None] + transitions).max(1)
        state, _ = best + scores[:, t], places.append(place)
    best, last = state.max(1)
    path = [last]
    for place in reversed(places):
        path.append(place.gather(1, path[-1][:, None])[:, 0])
    return best, torch.stack(path[::-1], 1)


@triton.jit
def _crf(SCORES, TRANSITIONS, LENGTHS, OUT, T, K: tl.constexpr):
    row = tl.program_id(0)
    i, j = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :]
    transitions = tl.load(TRANSITIONS + i * K + j)
    state = tl.load(SCORES + row * T * K + tl.arange(0, K))
    for t in range(1, tl.load(LENGTHS + row)):
        options = state[:, None] + transitions
        top = tl.max(options, 0)
        state = top + tl.log(tl.sum(tl.exp(options - top[None, :]), 0))
        state += tl.load(SCORES + (row * T + t) * K + tl.arange(0, K))
    top = tl.max(state, 0)
    tl.store(OUT + row, top + tl.log(tl.sum(tl.exp(state - top), 0)))


def crf_partition(scores: Tensor, transitions: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty(scores.shape[0], device=scores.device)
    _crf[(scores.shape[0],)](scores, transitions, lengths, out, scores.shape[1], K=scores.shape[2])
    return out


def _crf_reference(scores: Tensor, transitions: Tensor, lengths: Tensor) -> Tensor:
    rows = []
    for row, length in zip(scores, lengths.tolist(), strict=True):
        state = row[0]
        for t in range(1, length):
            state = (state[:, None] + transitions).logsumexp(0) + row[t]
        rows.append(state.logsumexp(0))
    return torch.stack(rows)


@triton.jit
def _weight_norm(V, G, X, Y, N, K, eps, BLOCK: tl.constexpr):
    # y = x W^T with W = g v / |v|, one row of W per program
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    v = tl.load(V + row * K + k, mask=k < K, other=0.0)
    w = tl.load(G + row) * v / (tl.sqrt(tl.sum(v * v, 0)) + eps)
    for n in range(N):
        tl.store(Y + n * tl.num_programs(0) + row, tl.sum(w * tl.load(X + n * K + k, mask=k < K, other=0.0), 0))


def weight_norm(v: Tensor, g: Tensor, x: Tensor) -> Tensor:
    y = torch.empty((x.shape[0], v.shape[0]), dtype=x.dtype, device=x.device)
    _weight_norm[(v.shape[0],)](v, g, x, y, *x.shape, 0.0, BLOCK=16)
    return y


CASES = [
    Case(
        "lstm_cell_in_time",
        lstm,
        lambda: (torch.randn(4, 5, 64), torch.randn(16, 64) * 0.3, torch.randn(5, 16), torch.randn(5, 16)),
        _lstm_reference,
    ),
    Case("moving_average_unbiased", moving_average, lambda: (torch.randn(9, 11), torch.randn(11)), _moving_reference),
    Case("gumbel_softmax", gumbel_softmax, lambda: (torch.randn(4, 11), 77), _gumbel_reference),
    Case("viterbi_path", viterbi, lambda: (torch.randn(3, 7, 8), torch.randn(8, 8)), _viterbi_reference),
    Case(
        "crf_partition",
        crf_partition,
        lambda: (torch.randn(3, 7, 8), torch.randn(8, 8), torch.tensor([7, 1, 4], dtype=torch.int32)),
        _crf_reference,
    ),
    Case(
        "weight_norm",
        weight_norm,
        lambda: (torch.randn(6, 13), torch.randn(6), torch.randn(4, 13)),
        lambda v, g, x: F.linear(x, g[:, None] * F.normalize(v, dim=1)),
    ),
]
