"""Corners of integer arithmetic: shifts by the width, unsigned division of large numbers, conversions that saturate."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import execute


@triton.jit
def _shifts(A, S, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    a, s = tl.load(A + c), tl.load(S + c)
    tl.store(Y + c, a << s)
    tl.store(Y + n + c, a >> s)


@pytest.mark.parametrize("name", ["int32", "int64", "uint32", "uint64"])
def test_shifts_by_the_width_or_more_leave_no_bits_but_the_sign(name):
    # PTX clamps the amount; the processor this runs on would take it modulo the width
    dtype = getattr(torch, name)
    signed = getattr(torch, name.removeprefix("u"))
    width = torch.iinfo(dtype).bits

    def stub(a, s):
        y = torch.empty(2 * a.numel(), dtype=a.dtype, device=a.device)
        _shifts[(1,)](a, s, y, a.numel())
        return y

    a = torch.tensor([-7, 5, -7, 5, -7, 5, -1, 1], dtype=signed)
    s = torch.tensor([0, 1, width - 1, width - 1, width, width, width + 5, 1 << 20], dtype=signed)
    got = execute(stub, (a.view(dtype), s.view(dtype))).result.view(signed).tolist()
    for place, (value, amount) in enumerate(zip(a.tolist(), s.tolist(), strict=True)):
        bits = value % 2**width
        down = (bits if name.startswith("u") else value) >> amount
        assert got[place] % 2**width == (bits << amount) % 2**width, f"{value} << {amount}"
        assert got[8 + place] % 2**width == down % 2**width, f"{value} >> {amount}"


@triton.jit
def _unsigned(A, B, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    a, b = tl.load(A + c), tl.load(B + c)
    tl.store(Y + c, a // b)
    tl.store(Y + n + c, a % b)
    tl.store(Y + 2 * n + c, tl.maximum(a, b))
    tl.store(Y + 3 * n + c, tl.minimum(a, b))


def test_unsigned_division_of_numbers_above_the_signed_range():
    # read signed, 2**64 - 1 is -1 and its quotients are wrong by far
    def stub(a, b):
        y = torch.empty(4 * a.numel(), dtype=torch.uint64, device="cuda")
        _unsigned[(1,)](a, b, y, a.numel())
        return y

    a = [2**64 - 1, 2**63, 2**63 - 1, 5, 2**64 - 2, 2**63 + 12345, 2**40, 1]
    b = [1, 3, 2**63, 2**64 - 1, 2**64 - 1, 7, 2**20 + 1, 1]
    inputs = [torch.tensor([v - 2**64 if v >= 2**63 else v for v in given]).view(torch.uint64) for given in (a, b)]
    got = [v % 2**64 for v in execute(stub, tuple(inputs)).result.view(torch.int64).tolist()]
    assert got[:8] == [x // y for x, y in zip(a, b, strict=True)], "quotient"
    assert got[8:16] == [x % y for x, y in zip(a, b, strict=True)], "remainder"
    assert got[16:24] == [max(x, y) for x, y in zip(a, b, strict=True)], "maximum"
    assert got[24:] == [min(x, y) for x, y in zip(a, b, strict=True)], "minimum"


@triton.jit
def _convert(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.load(X + c).to(Y.dtype.element_ty))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.int32, [2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1]),
        (torch.uint32, [2, 0, 2**32 - 1, 0, 0, 2**32 - 1]),
        (torch.int64, [2, -2, 10**12, -(2**63), 0, 2**63 - 1]),
        (torch.uint64, [2, 0, 10**12, 0, 0, 2**64 - 1]),
    ],
)
def test_conversions_of_floats_out_of_range_saturate(dtype, wanted):
    # `cvt.rzi` of PTX; a cast in C is undefined there and wraps on this processor
    def stub(x):
        y = torch.empty(8, dtype=dtype, device="cuda")
        _convert[(1,)](x, y, 8)
        return y

    x = torch.tensor([2.9, -2.9, 1e12, -math.inf, math.nan, math.inf, 0.0, 0.0], dtype=torch.float64)
    bits = torch.iinfo(dtype).bits
    signed = torch.int32 if bits == 32 else torch.int64
    got = execute(stub, (x,)).result.view(signed)[:6].tolist()
    assert [v % 2**bits for v in got] == [v % 2**bits for v in wanted]


@triton.jit
def _halves(A, B, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    a, b = tl.load(A + c), tl.load(B + c)
    tl.store(Y + c, (a // b).to(tl.int64))
    tl.store(Y + n + c, (a % b).to(tl.int64))
    tl.store(Y + 2 * n + c, tl.cdiv(a, b).to(tl.int64))
    tl.store(Y + 3 * n + c, tl.abs(a).to(tl.int64))


def test_signed_division_rounds_towards_zero_as_in_c():
    def stub(a, b):
        y = torch.empty(16, dtype=torch.int64, device="cuda")
        _halves[(1,)](a, b, y, 4)
        return y

    a, b = torch.tensor([7, -7, 7, -8], dtype=torch.int32), torch.tensor([2, 2, -2, 4], dtype=torch.int32)
    assert execute(stub, (a, b)).result.view(4, 4).tolist() == [
        [3, -3, -3, -2],
        [1, -1, 1, 0],
        [4, -3, -2, -1],
        [7, 7, 7, 8],
    ]
