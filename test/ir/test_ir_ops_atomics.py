"""Atomic updates of every kind: what they leave in memory, what they find there, and whose gradient it is."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import UnsupportedOp, execute


@triton.jit
def _into_one(X, Y, OLD, n: tl.constexpr, UPDATE: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + tl.program_id(0) * n + c)
    old = UPDATE(Y + c % 2, x, mask=c != 3, sem="acq_rel", scope="gpu")
    tl.store(OLD + tl.program_id(0) * n + c, old, mask=c != 3)


@triton.jit
def _into_one_silently(X, Y, n: tl.constexpr, UPDATE: tl.constexpr):
    c = tl.arange(0, n)
    UPDATE(Y + c % 2, tl.load(X + tl.program_id(0) * n + c), mask=c != 3)


KINDS = {
    "atomic_add": operator.add,
    "atomic_and": operator.and_,
    "atomic_max": max,
    "atomic_min": min,
    "atomic_or": operator.or_,
    "atomic_xchg": lambda _, new: new,
    "atomic_xor": operator.xor,
}


def _turns(x, start, combine, bits):
    """Memory and old values when lanes take their turns in order; both wrap."""
    memory, olds = list(start), []
    for place, value in enumerate(x):
        slot = place % 4
        olds.append(None if slot == 3 else memory[slot % 2])
        if slot != 3:
            memory[slot % 2] = combine(memory[slot % 2], value) % 2**bits
    return memory, olds


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint64])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_integers_and_what_they_find(kind, dtype):
    bits = torch.iinfo(dtype).bits
    signed = torch.int32 if bits == 32 else torch.int64
    x = torch.randint(-(2**31), 2**31 - 1, (12,), dtype=torch.int64).mul(2 ** (bits - 32)).to(signed)
    start = torch.tensor([5, -9], dtype=signed)

    def stub(x, y):
        old = torch.zeros(12, dtype=dtype, device=x.device)
        _into_one[(3,)](x, y, old, 4, getattr(tl, kind))
        return y, old

    y, old = execute(stub, (x.view(dtype), start.view(dtype))).result
    as_declared = (lambda v: v % 2**bits) if dtype in (torch.uint32, torch.uint64) else (lambda v: v)

    def combine(a, b):
        sign = (lambda v: v - 2**bits if v >= 2 ** (bits - 1) else v) if dtype == signed else (lambda v: v)
        return KINDS[kind](sign(a % 2**bits), sign(b % 2**bits))

    memory, olds = _turns([as_declared(v) for v in x.tolist()], [as_declared(v) for v in start.tolist()], combine, bits)
    assert [v % 2**bits for v in y.view(signed).tolist()] == [v % 2**bits for v in memory]
    found = [v % 2**bits for v in old.view(signed).tolist()]
    assert found == [0 if v is None else v % 2**bits for v in olds]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_whose_old_value_nobody_asks_for(kind):
    # these run for all programs at once: an exchange keeps any one of the values
    x = torch.randint(-1000, 1000, (12,), dtype=torch.int32)

    def stub(x, y):
        _into_one_silently[(3,)](x, y, 4, getattr(tl, kind))
        return y

    got = execute(stub, (x, torch.tensor([5, -9], dtype=torch.int32))).result.tolist()
    even, odd = [5, *x.view(3, 4)[:, [0, 2]].flatten().tolist()], [-9, *x.view(3, 4)[:, 1].tolist()]
    if kind == "atomic_xchg":
        assert got[0] in even[1:]
        assert got[1] in odd[1:]
    else:
        assert got == [functools.reduce(KINDS[kind], even), functools.reduce(KINDS[kind], odd)]


@pytest.mark.parametrize("kind", ["atomic_max", "atomic_min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_of_floats_find_old_values_with_their_gradient(kind, dtype):
    # Triton updates floats as integers of their bits, in two atomics, one for each sign
    def stub(x, y):
        old = torch.zeros(12, dtype=dtype, device=x.device)
        _into_one[(3,)](x, y, old, 4, getattr(tl, kind))
        return y, old

    def reference(x, y):
        memory, olds = list(y.unbind()), []
        for place, value in enumerate(x.unbind()):
            slot = place % 4
            olds.append(memory[slot % 2] if slot != 3 else torch.zeros_like(value))
            if slot != 3:
                memory[slot % 2] = (torch.maximum if kind == "atomic_max" else torch.minimum)(memory[slot % 2], value)
        return torch.stack(memory), torch.stack(olds)

    check_gradients(stub, (torch.randn(12, dtype=dtype), torch.tensor([-0.5, 0.5], dtype=dtype)), reference)


def test_sums_of_floats_find_old_values_with_their_gradient():
    def stub(x, y):
        old = torch.zeros(12, device=x.device)
        _into_one[(3,)](x, y, old, 4, tl.atomic_add)
        return y, old

    def reference(x, y):
        memory, olds = list(y.unbind()), []
        for place, value in enumerate(x.unbind()):
            slot = place % 4
            olds.append(memory[slot % 2] if slot != 3 else torch.zeros_like(value))
            if slot != 3:
                memory[slot % 2] = memory[slot % 2] + value
        return torch.stack(memory), torch.stack(olds)

    check_gradients(stub, (torch.randn(12), torch.randn(2)), reference)


@triton.jit
def _add_by_exchange(X, Y, n: tl.constexpr):
    x = tl.load(X + tl.program_id(0))
    bits = Y.to(tl.pointer_type(tl.int32), bitcast=True)
    old = tl.load(bits)
    done = False
    while not done:
        new = (old.to(tl.float32, bitcast=True) + x * x).to(tl.int32, bitcast=True)
        found = tl.atomic_cas(bits, old, new)
        done = found == old
        old = found


def test_a_sum_by_compare_and_exchange_of_bits_has_its_gradient():
    # compared as values of float64 the bits would never be equal, or the new value would come back without gradient
    def stub(x, y):
        _add_by_exchange[(5,)](x, y, 5)
        return y

    check_gradients(stub, (torch.randn(5), torch.randn(1)), lambda x, y: y + (x * x).sum(), clean=False)


@triton.jit
def _swap_floats(Y, OLD):
    tl.store(OLD, tl.atomic_cas(Y, 1.0, 7.0))
    tl.store(OLD + 1, tl.atomic_cas(Y + 1, 1.0, 7.0))


def test_compare_and_exchange_of_floats():
    def stub(y):
        old = torch.empty(2, device=y.device)
        _swap_floats[(1,)](y, old)
        return y, old

    y, old = execute(stub, (torch.tensor([1.0, 2.0]),)).result
    assert y.tolist() == [7.0, 2.0]
    assert old.tolist() == [1.0, 2.0]


@triton.jit
def _integer_update_of_bits(Y):
    tl.atomic_add(Y.to(tl.pointer_type(tl.int32), bitcast=True), 1)


def test_integer_arithmetic_on_the_bits_of_floats_in_memory_is_refused():
    # adding 1 to the bits is not adding 1 to the float
    with pytest.raises(UnsupportedOp, match="integer update of the bits"):
        execute(lambda y: _integer_update_of_bits[(1,)](y), (torch.ones(1),))


@triton.jit
def _queue(NEXT, Y, n: tl.constexpr):
    for _ in range(2):
        mine = tl.atomic_add(NEXT, 1)
        if mine < n:
            tl.store(Y + mine, mine * 10)


def test_programs_that_draw_their_work_from_a_counter():
    def stub(y):
        counter = torch.zeros(1, dtype=torch.int32, device=y.device)
        _queue[(4,)](counter, y, 6)
        return y, counter

    y, counter = execute(stub, (torch.zeros(6, dtype=torch.int32),)).result
    assert y.tolist() == [0, 10, 20, 30, 40, 50]
    assert counter.tolist() == [8]


@triton.jit
def _flags(X, FLAG, Y):
    p = tl.program_id(0)
    if p > 0:
        while tl.atomic_load(FLAG + p - 1) == 0:
            pass
    before = tl.load(Y + p)
    tl.store(Y + p + 1, before + tl.load(X + p))
    tl.atomic_store(FLAG + p, 1)


@pytest.mark.skipif(not hasattr(tl, "atomic_load"), reason="this Triton has no atomic loads")
def test_programs_that_wait_for_the_flag_of_the_one_before():
    def stub(x, y):
        flags = torch.zeros(4, dtype=torch.int32, device=x.device)
        _flags[(4,)](x, flags, y)
        return y

    x, y = torch.randn(4), torch.zeros(5)
    check_gradients(stub, (x, y), lambda x, y: torch.cat([y[:1], y[0] + x.cumsum(0)]))
