"""Operations that check or print: assertions become findings, prints stay silent, hints change nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import FindingKind, execute


@triton.jit
def _positive(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    tl.device_assert(x > 0, "x must be positive")
    tl.store(Y + c, tl.sqrt(x))


def _stub(x):
    y = torch.empty_like(x)
    _positive[(1,)](x, y, x.numel())
    return y


def test_a_device_assertion_that_fails_is_a_finding_at_its_line():
    # Triton drops assertions unless it compiles for debugging
    (finding,) = execute(_stub, (torch.tensor([1.0, -1.0, 4.0, -2.0]),)).findings
    assert finding.kind is FindingKind.ASSERTION
    assert "x must be positive" in finding.message
    assert finding.line == _positive.fn.__code__.co_firstlineno + 4
    assert finding.count == 2


def test_a_device_assertion_that_holds_is_silent():
    assert execute(_stub, (torch.tensor([1.0, 9.0, 4.0, 2.0]),)).findings == ()


@triton.jit
def _hints(X, Y, n, B: tl.constexpr):
    tl.static_assert(B % 2 == 0)
    tl.assume(n > 0)
    c = tl.max_contiguous(tl.multiple_of(tl.arange(0, B), B), B)
    x = tl.max_constancy(tl.load(X + c), 1)
    tl.device_print("x =", x)
    tl.debug_barrier()
    for _ in tl.static_range(2):
        x = x + n
    tl.store(Y + c, x)


@triton.jit
def _promises(X, Y, n, step, KIND: tl.constexpr, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    o = c * step
    if KIND == "contiguous":
        o = tl.max_contiguous(o, B)
    elif KIND == "multiple":
        o = tl.multiple_of(o, B)
    elif KIND == "constant":
        o = tl.max_constancy(c // 2 * step, 2)
    elif KIND == "wrapped":
        o = tl.max_contiguous(tl.multiple_of(c % n, B), B)
    elif KIND == "assumed":
        tl.assume(step == 1)
    pointers = tl.multiple_of(X + o, 32) if KIND == "pointer" else X + o
    x = tl.load(pointers, mask=(c < n) & (o < n))
    tl.store(Y + c, x, mask=(c < n) & (o < n))


@pytest.mark.parametrize("kind", ["contiguous", "multiple", "constant", "pointer", "assumed", "wrapped"])
def test_a_promise_to_the_compiler_is_a_finding_where_it_does_not_hold(kind):
    # The values are right here whatever is promised; a device may load vectors from other places.
    def stub(x, step):
        y = torch.empty_like(x)
        _promises[(2,)](x, y, x.numel(), step, KIND=kind, B=8)
        return y

    kept, broken = (16, 1), (16, 3)
    if kind == "constant":
        kept, broken = (16, 3), None
    if kind == "wrapped":  # the classic of matrix products: false where the size is no multiple of the block
        kept, broken = (16, 3), (13, 3)
    found = {FindingKind.FALSE_PROMISE}
    assert found.isdisjoint({one.kind for one in execute(stub, (torch.randn(kept[0]), kept[1])).findings})
    if broken is not None:
        assert found <= {one.kind for one in execute(stub, (torch.randn(broken[0]), broken[1])).findings}


def test_hints_barriers_and_prints_change_nothing(capfd):
    def stub(x):
        y = torch.empty_like(x)
        _hints[(1,)](x, y, 3, B=8)
        return y

    x = torch.randn(8)
    torch.testing.assert_close(execute(stub, (x,)).result, x.double() + 6)
    assert capfd.readouterr().out == ""


@triton.jit
def _wraps(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.load(X + c) * 65536)


def test_integer_overflow_is_no_assertion():
    # debug mode brings overflow checks with it, which hash functions and random numbers would fail
    def stub(x):
        y = torch.empty_like(x)
        _wraps[(1,)](x, y, 4)
        return y

    execution = execute(stub, (torch.full((4,), 65536, dtype=torch.int32),))
    assert execution.findings == ()
    assert execution.result.tolist() == [0] * 4
