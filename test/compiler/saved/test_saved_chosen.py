"""What is stored under a mask is read back where a select leaves out the other lanes before they count for anything."""

from __future__ import annotations

import pytest

from kernel_agent.compiler.saved.outputs import use_saved
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8


def kernel_with(*arguments: str) -> tuple[Kernel, Builder, dict[str, Value]]:
    """`arguments`: name and type, `X:*f32`."""
    values = {name: Value(element, (), name) for name, element in (text.split(":") for text in arguments)}
    kernel = Kernel("chosen", list(values.values()))
    return kernel, Builder(kernel), values


def running(b: Builder, x: Value) -> Value:
    return b.pure(Code.CUMSUM, (x,), "f32", (N,), {"axis": 0, "reverse": False})


def chosen_sum(how: str) -> Kernel:
    """Running totals of a row, stored to T for the first n lanes, and a sum of some of them."""
    kernel, b, a = kernel_with("X:*f32", "T:*f32", "Y:*f32", "n:i32")
    row, lanes, zero = b.program_id(0), b.arange(0, N), b.const(0.0, "f32")
    offset = b.add(b.mul(row, b.const(N)), lanes)
    totals = running(b, b.load(a["X"], offset))
    there = b.compare("lt", lanes, a["n"])
    b.store(a["T"], offset, totals, there)
    test = b.compare("le", lanes, a["n"]) if how == "of one more" else there
    found = b.select(test, zero, totals) if how == "of the others" else b.select(test, totals, zero)
    if how == "exponentials":
        found = b.select(there, b.unary(Code.EXP, b.mul(totals, b.number(2.0, totals))), zero)
    total = b.sum(found, 0)
    if how == "of all, too":
        total = b.add(total, b.sum(b.mul(totals, totals), 0))
    b.store(a["Y"], row, total)
    return kernel


@pytest.mark.parametrize("how", ["of those", "exponentials"])
def test_a_sum_of_the_lanes_that_were_stored_reads_them(how: str) -> None:
    # A loss adds up `where(row < rows, lse - target, 0)`, and stored the log-sum-exps under `row < rows`: they were
    # computed again, with a loop over all columns.
    assert "T" in use_saved(chosen_sum(how)).read


@pytest.mark.parametrize("how", ["of one more", "of the others", "of all, too"])
def test_a_sum_of_other_lanes_computes_them_again(how: str) -> None:
    # What memory holds where the store was masked would be in the derivative.
    saved = use_saved(chosen_sum(how))
    assert "T" not in saved.read
    assert any("used where the store to T is masked" in remark for remark in saved.remarks)


def of_trips(*, before: bool) -> Kernel:
    """Each trip stores the running totals of a row for as many lanes as L says, and adds up that many of them.

    `before`: of those of the trip before, which stored as many as its own L says.
    """
    kernel, b, a = kernel_with("X:*f32", "L:*i32", "T:*f32", "Y:*f32", "rows:i32")
    lanes, zero = b.arange(0, N), b.const(0.0, "f32")

    def trip(row: Value, carries: list[Value]) -> list[Value]:
        last, total = carries
        offset = b.add(b.mul(row, b.const(N)), lanes)
        totals = running(b, b.load(a["X"], offset))
        there = b.compare("lt", lanes, b.load(a["L"], row))
        b.store(a["T"], offset, totals, there)
        taken = b.select(there, b.unary(Code.EXP, last if before else totals), zero)
        return [totals, b.add(total, b.sum(taken, 0))]

    _, total = b.loop((b.const(0), a["rows"], b.const(1)), [b.whole(zero, (N,)), zero], trip)
    b.store(a["Y"], b.const(0), total)
    return kernel


def test_a_select_of_the_trip_that_stored_leaves_out_what_it_did_not_store() -> None:
    assert "T" in use_saved(of_trips(before=False)).read


def test_a_select_of_a_later_trip_does_not() -> None:
    # It is the same operation under the same mask, but the mask of another trip.
    assert "T" not in use_saved(of_trips(before=True)).read
