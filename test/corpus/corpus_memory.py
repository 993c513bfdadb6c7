"""Kernels that change memory: in place, through atomics and locks, and between torch code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _scale_in_place(X, n, factor, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n)
    tl.store(X + o, x * x * factor, mask=o < n)


def in_place_thrice(x: Tensor) -> Tensor:
    """Every launch overwrites what the one before left."""
    for factor in (0.5, 2.0, -1.0):
        _scale_in_place[(triton.cdiv(x.numel(), 16),)](x, x.numel(), factor, BLOCK=16)
    return x


@triton.jit
def _affine(X, W, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    tl.store(Y + o, tl.load(X + o, mask=live, other=0.0) * tl.load(W + o, mask=live, other=0.0), mask=live)


def torch_between_launches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Allocations, views, reductions and arithmetic in torch around three launches."""
    n = x.numel()
    y = torch.empty_like(x)
    _affine[(triton.cdiv(n, 16),)](x, w, y, n, BLOCK=16)
    y = (y - y.mean(-1, keepdim=True)).contiguous()
    scale = y.abs().amax().clamp(min=1e-3)
    z = torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device)
    _affine[(triton.cdiv(n, 16),)](y, w, z[0], n, BLOCK=16)
    _affine[(triton.cdiv(n, 16),)](z[0] / scale, x.exp(), z[1], n, BLOCK=16)
    z[1, 0] += 1.0
    return z.sum(0), torch.cat([z[1], y[:1]], 0)


def _between_reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * w
    y = y - y.mean(-1, keepdim=True)
    scale = y.abs().amax().clamp(min=1e-3)
    first = y * w
    second = first / scale * x.exp()
    second = torch.cat([second[:1] + 1, second[1:]])
    return first + second, torch.cat([second, y[:1]])


@triton.jit
def _fill_slots(X, OUT, N, slot, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    tl.store(OUT + (tl.program_id(0) * 3 + slot) * N + c, x * (slot + 1), mask=c < N)


def output_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Three launches write into one allocation; the outputs are overlapping views of it."""
    out = torch.empty((x.shape[0], 3, x.shape[1]), dtype=x.dtype, device=x.device)
    for slot in range(3):
        _fill_slots[(x.shape[0],)](x, out, x.shape[1], slot, BLOCK=16)
    return out[:, :2].flatten(1), out.transpose(1, 2)[..., 1:]


def _output_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.stack([x, 2 * x, 3 * x], 1)
    return out[:, :2].flatten(1), out.transpose(1, 2)[..., 1:]


@triton.jit
def _scatter_max(X, INDEX, HIGH, LOW, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    x = tl.load(X + o, mask=live, other=0.0)
    index = tl.load(INDEX + o, mask=live, other=0)
    tl.atomic_max(HIGH + index, x, mask=live)
    tl.atomic_min(LOW + index, x, mask=live)


def scatter_max(x: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    high = torch.full((size,), -10.0, device=x.device)
    low = torch.full((size,), 10.0, device=x.device)
    _scatter_max[(triton.cdiv(x.numel(), 8),)](x, index, high, low, x.numel(), BLOCK=8)
    return high, low


def _scatter_max_reference(x: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    high, low = x.new_full((size,), -10.0), x.new_full((size,), 10.0)
    return high.scatter_reduce(0, index, x, "amax"), low.scatter_reduce(0, index, x, "amin")


@triton.jit
def _locked_sum(X, OUT, LOCK, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    # the accumulation of layer norm's weight gradient: a lock and a first-comer flag per group
    row = tl.program_id(0)
    group = row % GROUPS
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    part = x * x * x
    lock = LOCK + group
    count = LOCK + GROUPS + group
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part += tl.load(OUT + group * N + c, mask=c < N, other=0.0)
    tl.store(OUT + group * N + c, part, mask=c < N)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def locked_sum(x: Tensor) -> Tensor:
    out = torch.empty((3, x.shape[1]), dtype=torch.float32, device=x.device)
    locks = torch.zeros(6, dtype=torch.int32, device=x.device)
    _locked_sum[(x.shape[0],)](x, out, locks, x.shape[1], GROUPS=3, BLOCK=16)
    return out


@triton.jit
def _running_mean(X, STATE, LOCK, OUT, n):
    # a chain through memory: each program waits for its turn
    pid = tl.program_id(0)
    while tl.atomic_add(LOCK, 0) != pid:
        pass
    state = tl.load(STATE)
    state = 0.5 * state + 0.5 * tl.load(X + pid)
    tl.store(STATE, state)
    tl.store(OUT + pid, state * state)
    tl.debug_barrier()
    tl.atomic_add(LOCK, 1)


def running_mean_by_turns(x: Tensor) -> Tensor:
    state, turn = torch.zeros(1, device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty_like(x)
    _running_mean[(x.numel(),)](x, state, turn, out, x.numel())
    return out


def _running_reference(x: Tensor) -> Tensor:
    state, out = torch.zeros((), dtype=torch.float64), []
    for value in x:
        state = (state + value) / 2
        out.append(state * state)
    return torch.stack(out)


@triton.jit
def _swap(X, SLOT, OLD):
    pid = tl.program_id(0)
    old = tl.atomic_xchg(SLOT + pid % 2, tl.load(X + pid))
    tl.store(OLD + pid, old * 2.0)


def exchange_chain(x: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Each program takes what the one before left; only the multiset of results is promised."""
    slot = slot.clone()
    old = torch.empty_like(x)
    _swap[(x.numel(),)](x, slot, old)
    everything = torch.cat([old / 2, slot])
    return everything.sort().values, everything.sum()


def _exchange_reference(x: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    everything = torch.cat([x, slot])
    return everything.sort().values, everything.sum()


@triton.jit
def _append_positive(X, OUT, COUNT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=-1.0)
    keep = x > 0
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    base = tl.atomic_add(COUNT, tl.sum(keep.to(tl.int32), 0))
    tl.store(OUT + base + place, x * x, mask=keep)


def compact_positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """Stream compaction: a counter hands out space; the order of programs is not promised."""
    out, count = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device=x.device)
    _append_positive[(triton.cdiv(x.numel(), 8),)](x, out, count, x.numel(), BLOCK=8)
    return out.sort().values, count


@triton.jit
def _integer_atomics(X, OUT, OLD, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0)
    one = OUT + tl.zeros((BLOCK,), tl.int32)
    tl.atomic_or(one, x, mask=o < n)
    tl.atomic_and(one + 1, x, mask=o < n)
    tl.atomic_xor(one + 2, x, mask=o < n)
    tl.atomic_max(one + 3, x, mask=o < n)
    unsigned = (one + 4).to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.atomic_min(unsigned, x.to(tl.uint32, bitcast=True), mask=o < n)
    tl.store(OLD + o, tl.atomic_add(OUT + 5 + o, x, mask=o < n), mask=o < n)


def integer_atomics(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.cat([torch.tensor([0, -1, 0, -(2**31), -1], dtype=torch.int32), torch.ones_like(x)])
    old = torch.empty_like(x)
    _integer_atomics[(1,)](x, out, old, x.numel(), BLOCK=16)
    return out, old


def _integer_atomics_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    one, every, odd = 0, -1, 0
    for value in x.tolist():
        one, every, odd = one | value, every & value, odd ^ value
    lowest = min(x.tolist(), key=lambda value: value & 0xFFFFFFFF)
    return torch.cat([torch.tensor([one, every, odd, int(x.max()), lowest]), x.long() + 1]), torch.ones_like(x)


@triton.jit
def _adamw(P, G, M, V, n, lr, beta1, beta2, eps, decay, correct1, correct2, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    g = tl.load(G + o, mask=live, other=0.0).to(tl.float32)
    m = beta1 * tl.load(M + o, mask=live, other=0.0) + (1 - beta1) * g
    v = beta2 * tl.load(V + o, mask=live, other=0.0) + (1 - beta2) * g * g
    p = tl.load(P + o, mask=live, other=0.0).to(tl.float32)
    p = p * (1 - lr * decay) - lr * (m / correct1) / (tl.sqrt(v / correct2) + eps)
    tl.store(P + o, p, mask=live)
    tl.store(M + o, m, mask=live)
    tl.store(V + o, v, mask=live)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    for step in range(1, steps + 1):
        _adamw[(triton.cdiv(p.numel(), 32),)](
            p, g, m, v, p.numel(), 0.1, 0.9, 0.99, 1e-8, 0.01, 1 - 0.9**step, 1 - 0.99**step, BLOCK=32
        )
    return p, m, v


def _adamw_reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    for step in range(1, steps + 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        update = m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        p = p * (1 - 0.1 * 0.01) - 0.1 * update
    return p, m, v


CASES = [
    *in_dtypes(
        Case("in_place_thrice", in_place_thrice, lambda: (torch.randn(5, 9),), lambda x: -4 * (x * x / 2) ** 4), HALF
    ),
    Case(
        "torch_between_launches",
        torch_between_launches,
        lambda: (torch.randn(4, 9), torch.randn(4, 9)),
        _between_reference,
    ),
    *in_dtypes(Case("output_views_alias", output_views, lambda: (torch.randn(4, 11),), _output_reference), BF16),
    Case(
        "scatter_max_atomics",
        scatter_max,
        lambda: (torch.randn(37), torch.randint(0, 6, (37,)), 7),
        _scatter_max_reference,
    ),
    Case(
        "locked_sum",
        locked_sum,
        lambda: (torch.randn(10, 13),),
        lambda x: x.new_zeros(3, 13).index_add(0, torch.arange(10) % 3, x**3),
    ),
    Case("running_mean_by_turns", running_mean_by_turns, lambda: (torch.randn(6),), _running_reference),
    Case("exchange_chain", exchange_chain, lambda: (torch.randn(7), torch.randn(2)), _exchange_reference),
    Case(
        "compact_positive",
        compact_positive,
        lambda: (torch.randn(29),),
        lambda x: ((x.relu() ** 2).sort().values, (x > 0).sum()[None]),
    ),
    Case(
        "integer_atomics",
        integer_atomics,
        lambda: (torch.randint(-(2**31), 2**31 - 1, (13,)).to(torch.int32),),
        _integer_atomics_reference,
    ),
    *in_dtypes(
        Case(
            "adamw_in_place",
            adamw,
            lambda: (torch.randn(50), torch.randn(50), torch.randn(50), torch.rand(50) + 0.1, 3),
            _adamw_reference,
        ),
        BF16,
    ),
]
