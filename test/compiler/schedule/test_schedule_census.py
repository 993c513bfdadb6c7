"""Rows that only memory tells apart are stored once they are counted, and raise where one is counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from schedule_kernels import add_to, block_of, made, matrix
from torch import Tensor

from kernel_agent.compiler.plan import Census
from kernel_agent.compiler.schedule import census as counts_of_rows
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.memory import Evaluation
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.lines import HELPERS

ROWS, WIDTH, BLOCK = 24, 20, 8
X = torch.zeros(ROWS, WIDTH)
ARGUMENTS = "X:*f32 dX:*f32 Index:*i32 rows width"


def gathered(*, masked: bool = True, group: int = 1, shift: int = 0) -> Kernel:
    """Each program adds to BLOCK rows that an index names, tile after tile of their columns. `masked`: no column is
    that of the next row; `group`: so many programs have the same rows; `shift`: columns left out before the first."""

    def build(b: Builder, x: Value, dx: Value, index: Value, rows: Value, width: Value) -> None:
        block = b.elementwise(Code.FLOORDIV, (b.program_id(0), b.const(group))) if group > 1 else b.program_id(0)
        place = block_of(b, block, BLOCK, "BLOCK")
        there = b.compare("lt", place, rows)
        chosen = b.load(index, place, there, b.const(0))

        def body(start: Value, _: list[Value]) -> list[Value]:
            cols = b.add(b.add(start, b.arange(0, BLOCK, "BLOCK")), b.const(shift))
            mask = b.expand(there, 1)
            if masked:
                mask = b.logical_and(mask, b.expand(b.compare("lt", cols, width), 0))
            add_to(b, dx, matrix(b, chosen, width, cols, b.const(1)), b.const(1.0, "f32"), mask)
            return []

        b.loop((b.const(0), width, b.const(BLOCK, "i32", "BLOCK")), [], body)

    return made(ARGUMENTS, build, BLOCK=BLOCK)


def call(index: Tensor, grid: int = 3) -> dict[str, object]:
    return {
        "triton": triton,
        "X": X,
        "BLOCK": BLOCK,
        "Index": index.int(),
        "rows": len(index),
        "width": WIDTH,
        "grid0": grid,
    }


def own(kernel: Kernel, *calls: dict[str, object]) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls(calls)))


def is_stored(found: Ownership) -> bool:
    return [op.code for op in found.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]


def counted(census: Census, index: Tensor) -> Tensor:
    """How often rows would be stored to."""
    counts = torch.zeros(ROWS, dtype=torch.int32)
    given = {**call(index), "row_size": WIDTH, "num_rows": ROWS, census.counts.name: counts}
    evaluate(census.step.kernel, (3,), {value.name: given[value.name] for value in census.step.kernel.arguments})
    return counts


def test_rows_that_an_index_names_once_are_stored_behind_a_census() -> None:
    found = own(gathered(), call(torch.randperm(ROWS)))
    assert is_stored(found)
    (census,) = found.censuses
    assert (census.gradient, census.width) == ("dX", "width")


def test_a_census_counts_every_row_as_often_as_it_is_named_though_its_columns_take_several_trips() -> None:
    (census,) = own(gathered(), call(torch.randperm(ROWS))).censuses
    index = torch.randint(0, ROWS, (ROWS,))
    assert torch.equal(counted(census, index), torch.bincount(index, minlength=ROWS).int())


def test_a_row_that_is_counted_twice_raises_and_those_not_counted_are_left() -> None:
    # Were this not asked, the later store of two would be the gradient.
    scope: dict[str, object] = {}
    exec("\n".join(HELPERS.values()), scope)
    rows_left = scope["rows_left"]
    assert callable(rows_left)
    assert rows_left(torch.tensor([1, 0, 1], dtype=torch.int32)).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="share rows"):
        rows_left(torch.tensor([1, 0, 2], dtype=torch.int32))


def test_rows_that_a_call_names_twice_stay_atomic() -> None:
    twice = torch.randperm(ROWS)
    twice[0] = twice[1]
    assert not is_stored(own(gathered(), call(torch.randperm(ROWS)), call(twice)))


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="no call was seen"),
        pytest.param((call(torch.tensor([3, 17])),), id="two of many rows differ by chance"),
        pytest.param((call(torch.full((ROWS,), ROWS)),), id="rows beyond the last are not counted"),
    ],
)
def test_rows_stay_atomic_where_calls_do_not_show_that_they_differ_on_purpose(calls: tuple[dict[str, object]]) -> None:
    # A lookup whose few indices happen to differ in every entry of SWEEP would raise in earnest.
    assert not is_stored(own(gathered(), *calls))


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(gathered(masked=False), id="the last tile of columns is the next row's"),
        pytest.param(gathered(shift=3), id="columns do not start with the row's first"),
        pytest.param(gathered(group=2), id="two programs have the same rows"),
    ],
)
def test_rows_whose_places_are_not_proved_stay_atomic(kernel: Kernel) -> None:
    # In each case a count of rows says nothing of single elements, or of launches with more programs.
    assert not is_stored(own(kernel, call(torch.randperm(ROWS))))


def test_rows_stay_atomic_where_later_calls_may_repeat_what_these_do_not() -> None:
    # A library call trains on with whatever index comes next.
    calls = Calls((call(torch.randperm(ROWS)),), typical=False)
    assert not is_stored(owned(gathered(), {"X": "dX"}, Launch.like_forward(1, calls)))


def test_a_row_is_counted_where_any_of_its_columns_takes_part() -> None:
    # The mask of columns says nothing of rows: with it in the census, rows of no columns would not be counted.
    (census,) = own(gathered(), call(torch.randperm(ROWS))).censuses
    assert "dX" not in {value.name for value in census.step.kernel.arguments}
    assert counted(census, torch.arange(ROWS)).tolist() == [1] * ROWS


def test_rows_are_counted_with_the_constexprs_of_the_call_whatever_the_kernel_was_lowered_for() -> None:
    # In steps of the 16 columns that the kernel was lowered for, rows of the call's 20 would seem to have two indices.
    def build(b: Builder, x: Value, dx: Value, index: Value, rows: Value, width: Value) -> None:
        place = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        there = b.compare("lt", place, rows)
        chosen = b.load(index, place, there, b.const(0))
        at = matrix(b, chosen, b.const(16, "i32", "COLS"), b.arange(0, 16, "COLS"), b.const(1))
        add_to(b, dx, at, b.const(1.0, "f32"), b.expand(there, 1))

    given = {**call(torch.randperm(ROWS)), "COLS": WIDTH}
    assert is_stored(own(made(ARGUMENTS, build, BLOCK=BLOCK, COLS=16), given))


def test_rows_that_a_sum_over_lanes_names_are_counted_with_the_constexprs_of_the_call() -> None:
    # Experts of tiles are found by sums: a kernel with one was counted as lowered, in steps of 16 columns.
    def build(b: Builder, x: Value, dx: Value, index: Value, rows: Value, width: Value) -> None:
        place = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        there = b.compare("lt", place, rows)
        first = b.expand(b.compare("eq", b.arange(0, 4), b.const(0)), 0)
        shown = b.select(first, b.expand(b.load(index, place, there, b.const(0)), 1), b.const(0))
        at = matrix(b, b.sum(shown, 1), b.const(16, "i32", "COLS"), b.arange(0, 16, "COLS"), b.const(1))
        add_to(b, dx, at, b.const(1.0, "f32"), b.expand(there, 1))

    given = {**call(torch.randperm(ROWS)), "COLS": WIDTH}
    assert is_stored(own(made(ARGUMENTS, build, BLOCK=BLOCK, COLS=16), given))


def elements() -> Kernel:
    """Each lane adds to one element of a row of its own or, with `share`, of several; an index names its column."""

    def build(b: Builder, x: Value, dx: Value, index: Value, rows: Value, width: Value, share: Value) -> None:
        place = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        there = b.compare("lt", place, rows)
        chosen = b.load(index, place, there, b.const(0))
        row = b.elementwise(Code.FLOORDIV, (place, share))
        add_to(b, dx, b.add(b.mul(row, width), b.mul(chosen, b.const(1, symbol="STEP"))), b.const(1.0, "f32"), there)

    return made(f"{ARGUMENTS} share", build, BLOCK=BLOCK)


@pytest.mark.parametrize(("share", "stored"), [(1, True), (2, False)])
def test_elements_are_told_by_the_rows_that_have_one_each(share: int, stored: bool) -> None:
    # Counted one by one, elements take a number each: four times the bytes of a gradient in 16 bits or less.
    found = own(elements(), {**call(torch.randint(0, WIDTH, (ROWS,))), "share": share})
    assert is_stored(found) == stored
    assert [(one.width, one.whole) for one in found.censuses] == [("width", "")] * stored


def test_rows_of_equal_kernels_are_counted_once_for_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every schedule and every way to cut a kernel asks again, and a count runs all programs of all calls.
    ran: list[str] = []

    def counting(kernel: Kernel, *given: Any) -> Evaluation:
        ran.append(kernel.name)
        return evaluate(kernel, *given)

    monkeypatch.setattr(counts_of_rows, "evaluate", counting)
    seen = Calls((call(torch.randperm(ROWS)),))
    for _ in range(3):
        assert is_stored(owned(gathered(), {"X": "dX"}, Launch.like_forward(1, seen)))
    assert len(ran) == 1
    own(gathered(), call(torch.randperm(ROWS)))
    assert len(ran) == 2


def test_the_kernel_that_counts_has_the_gradient_in_its_name_once() -> None:
    # The owner of dX is `_fwd_backward_dX`: its count was `_fwd_backward_dX_dX_stores`.
    kernel = gathered()
    owner = Kernel("fwd_backward_dX", kernel.arguments, kernel.body, dict(kernel.extents), dict(kernel.constants))
    (census,) = own(owner, call(torch.arange(ROWS))).censuses
    assert census.step.kernel.name == "fwd_backward_dX_stores"
