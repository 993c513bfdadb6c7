"""Operations that check or print: assertions become findings, prints stay silent, hints change nothing."""

from __future__ import annotations

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
