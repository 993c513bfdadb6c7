"""Elements by quotient and remainder of a loop's index are told apart where the turns are known to be few enough."""

from __future__ import annotations

import pytest
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

CALL = {"turns": 5, "size": 3, "grid0": 2}


def transposed(end: Code, *, size_first: bool = False, further: int = 0, told_start: bool = False) -> Kernel:
    """Each program adds to its matrix of `size` rows and `turns` columns, column by column: `end(turns + further, what
    memory says of it)` columns. `told_start`: from an element on that memory tells."""

    def build(b: Builder, x: Value, dx: Value, lengths: Value, turns: Value, size: Value) -> None:
        pid = b.program_id(0)
        columns = b.elementwise(end, (b.add(turns, b.const(further)), b.load(lengths, pid)))

        def body(index: Value, _: list[Value]) -> list[Value]:
            turn, row = (b.elementwise(code, (index, size)) for code in (Code.FLOORDIV, Code.REM))
            at = b.add(b.mul(b.add(b.mul(pid, size), row), turns), turn)
            add_to(b, dx, at, b.load(x, at))
            return []

        trips = b.mul(size, columns) if size_first else b.mul(columns, size)
        start = b.load(lengths, b.add(pid, b.const(1))) if told_start else b.const(0)
        b.loop((start, trips, b.const(1)), [], body)

    return made("X:*f32 dX:*f32 Lengths:*i32 turns size", build)


def is_stored(kernel: Kernel) -> bool:
    found = owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls((CALL,)))).kernel
    return [op.code for op in found.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]


@pytest.mark.parametrize("size_first", [False, True])
def test_columns_up_to_the_smaller_of_two_numbers_are_stored(size_first: bool) -> None:
    assert is_stored(transposed(Code.MIN, size_first=size_first))


def test_columns_up_to_the_larger_of_two_numbers_stay_atomic() -> None:
    # Where memory says more than there are, the last column is the next row's first, which another trip adds to.
    assert not is_stored(transposed(Code.MAX))


def test_columns_up_to_one_more_than_there_are_stay_atomic() -> None:
    # The smaller of two numbers is no help where neither is the number of columns.
    assert not is_stored(transposed(Code.MIN, further=1))


def test_columns_from_where_memory_says_stay_atomic() -> None:
    # It may say less than 0, and the columns there are the row's before.
    assert not is_stored(transposed(Code.MIN, told_start=True))
