"""Writes to columns of a row that are their own are stores; writes whose columns may meet are not."""

from __future__ import annotations

import pytest
from schedule_kernels import add_to, made

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

HEAD, TAIL = 12, 16
"""Lanes of tiles; a power of two or not is all the same here."""
ALL = {"n": 3, "D": 11, "grid0": 2, "HEAD": HEAD, "TAIL": TAIL}
"""A launch that is seen: rows of 11 columns, of which 3 are turned and 8 passed on."""


def head_and_tail(b: Builder, begin: str, end: str, n: Value, D: Value) -> tuple[Value, Value, Value, Value]:
    """Places and masks of a tile of the first n columns of each program's row, and of a wider one from `begin` on."""
    row = b.mul(b.program_id(0), D)
    cols, more = b.arange(0, HEAD, "HEAD"), b.arange(0, TAIL, "TAIL")
    starts = {"n": n, "n - 1": b.sub(n, b.const(1)), "2 n": b.mul(n, b.const(2))}
    ends = {"D": D, "D + 1": b.add(D, b.const(1))}
    tail = b.add(starts[begin], more)
    return b.add(row, cols), b.compare("lt", cols, n), b.add(row, tail), b.compare("lt", tail, ends[end])


def gradients(begin: str = "n", end: str = "D") -> Kernel:
    def build(b: Builder, x: Value, dx: Value, n: Value, D: Value) -> None:
        head, first, tail, second = head_and_tail(b, begin, end, n, D)
        add_to(b, dx, head, b.load(x, head, first, b.const(0.0, "f32")), first)
        add_to(b, dx, tail, b.load(x, tail, second, b.const(0.0, "f32")), second)

    return made("X:*f32 dX:*f32 n D", build, HEAD=HEAD, TAIL=TAIL)


def additions(kernel: Kernel, **numbers: int) -> int:
    found = owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls(({**ALL, **numbers},))))
    return sum(op.code is Code.ATOMIC_ADD for op in found.kernel.ops)


def test_a_head_and_a_tail_of_other_sizes_are_stored() -> None:
    found = owned(gradients(), {"X": "dX"}, Launch.like_forward(1, Calls((ALL,))))
    assert [op.code for op in found.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE, Code.STORE]
    # Without it, a head longer than the row would be stored over the next row.
    assert "D >= n" in [fact.expression for fact in found.facts]


def test_a_gap_between_head_and_tail_does_no_harm() -> None:
    assert additions(gradients("2 n")) == 0


def test_a_tail_that_begins_in_the_head_stays_atomic() -> None:
    assert additions(gradients("n - 1")) == 2


def test_a_tail_that_reaches_into_the_next_row_stays_atomic() -> None:
    assert additions(gradients(end="D + 1")) == 2


def test_a_head_longer_than_the_row_of_a_seen_launch_stays_atomic() -> None:
    assert additions(gradients(), n=12) == 2


def test_a_head_that_ends_with_its_tile_is_apart_from_a_tail_behind_that() -> None:
    # The masks alone say that both go up to the end of the row.
    def build(b: Builder, x: Value, dx: Value, D: Value) -> None:
        row = b.mul(b.program_id(0), D)
        head = b.arange(0, HEAD, "HEAD")
        tail = b.add(b.const(HEAD, "i32", "HEAD"), b.arange(0, TAIL, "TAIL"))
        for cols in (head, tail):
            mask = b.compare("lt", cols, D)
            add_to(b, dx, b.add(row, cols), b.load(x, b.add(row, cols), mask, b.const(0.0, "f32")), mask)

    kernel = made("X:*f32 dX:*f32 D", build, HEAD=HEAD, TAIL=TAIL)
    assert additions(kernel, D=20) == 0
    # Shorter rows than a head have no tail: nothing must be asked of them.
    found = owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls(({**ALL, "D": 20},))))
    assert [fact.expression for fact in found.facts] == []


@pytest.mark.parametrize(("begin", "consumed"), [("n", ()), ("n - 1", ("dY",))])
def test_the_cotangent_of_a_head_and_a_tail_is_taken_away_only_where_they_may_meet(
    begin: str, consumed: tuple[str, ...]
) -> None:
    # Taken away, it is cloned, read and zeroed; not taken away where stores meet, both would get it.
    def build(b: Builder, x: Value, y: Value, n: Value, D: Value) -> None:
        head, first, tail, second = head_and_tail(b, begin, "D", n, D)
        b.store(y, head, b.load(x, head, first, b.const(0.0, "f32")), first)
        b.store(y, tail, b.load(x, tail, second, b.const(0.0, "f32")), second)

    kernel = made("X:*f32 Y:*f32 n D", build, HEAD=HEAD, TAIL=TAIL)
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}), calls=Calls((ALL,)))
    assert adjoint.consumed == consumed
