"""Rows that are both a program's own and those of trips: one owner does both, if both tiles are as large."""

from __future__ import annotations

from typing import Any

import pytest
import schedule_forwards
import torch
import triton
import triton.language as tl
from schedule_plans import Made, agree, atomics, named_source, run

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import plans

D = 16


@triton.jit
def numbers_with_all_numbers(x_ptr, o_ptr, n, BI: tl.constexpr, BJ: tl.constexpr, FLAT: tl.constexpr):
    """o = sum over n numbers of products of each with all. FLAT: a tile of pairs is summed as one long row."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    own = tl.load(x_ptr + i, mask=i < n, other=0.0)
    sums = tl.zeros((BI,), tl.float32)
    for start in range(0, n, BJ):
        j = start + tl.arange(0, BJ)
        others = tl.load(x_ptr + j, mask=j < n, other=0.0)
        product = own[:, None] * others[None, :]
        if FLAT:
            row = tl.reshape(product, (BI * BJ,))
            sums += tl.sum(row * row, 0)
        else:
            sums += tl.sum(product * product, 1)
    tl.store(o_ptr + i, sums, mask=i < n)


def pairs(bi: int, bj: int, n: int, m: int, fixed: frozenset[str] = frozenset(), *, full: bool = False) -> Made:
    """Plans, where one call was seen with these tiles and rows."""
    types = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32", "m": "i32"}
    kernel = named_source(schedule_forwards.rows_with_all_rows, types, D=D, BI=64, BJ=32, FULL=full)
    kernel.fixed = fixed
    seen: dict[str, Any] = {"x_ptr": torch.empty(m, D), "n": n, "m": m, "grid0": -(-n // bi), "triton": triton}
    seen |= {"D": D, "BI": bi, "BJ": bj}
    adjoint = differentiate(kernel, read=frozenset(("x_ptr",)), written=frozenset(("o_ptr",)))
    return {plan.schedule: plan for plan in plans(kernel, adjoint, 1, calls=Calls((seen,)))}


@pytest.mark.parametrize(("n", "m"), [(128, 128), (100, 100), (40, 200), (1, 1)])
def test_an_owner_adds_what_trips_and_its_own_program_add_to_its_rows(n: int, m: int) -> None:
    # Each place alone has an owner: one that left out either would lose what the other adds.
    found = pairs(64, 64, n, m)
    assert atomics(found["split"]) == []
    assert "BI == BJ" in {fact.expression for fact in found["split"].facts}
    torch.manual_seed(0)
    x, do = torch.randn(m, D, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    given = {"x_ptr": x, "n": n, "m": m}
    agree(found, given, {"o_ptr": do}, (-(-n // 64),), BI=64, BJ=64, D=D)
    _, counts = run(found["split"], given, {"o_ptr": do}, (-(-n // 64),), BI=64, BJ=64, D=D)
    assert counts[-1].owned("dx")


def test_owners_behind_the_last_program_do_no_rows_of_a_program() -> None:
    # Of 200 rows the first 64 have a program, which asks no mask: the next owner, if it did the rows of a program all
    # the same, would load cotangents that are not there.
    found = pairs(64, 64, 64, 200, full=True)
    assert atomics(found["split"]) == []
    torch.manual_seed(0)
    x, do = torch.randn(200, D, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    agree(found, {"x_ptr": x, "n": 64, "m": 200}, {"o_ptr": do}, (1,), BI=64, BJ=64, D=D)


def test_tiles_of_two_sizes_stay_two() -> None:
    # An owner of 64 rows would do two trips' rows of 32 as those of one program.
    found = pairs(64, 32, 128, 128)
    assert all("dx" in atomics(plan) for plan in found.values())


def test_a_kernel_that_is_another_one_at_another_size_keeps_both_tiles() -> None:
    # What was lowered for tiles of 32, say with a loop unrolled, is not what runs with 64.
    found = pairs(64, 64, 128, 128, fixed=frozenset(("BJ",)))
    assert all("dx" in atomics(plan) for plan in found.values())


def test_rows_of_programs_beyond_the_last_trip_have_no_owner() -> None:
    # Programs for 100 rows, trips over the first 40: nobody would own the last 36 that programs add to.
    found = pairs(64, 64, 100, 40)
    assert all("dx" in atomics(plan) for plan in found.values())


def of_numbers(*, flat: bool) -> Made:
    """Plans, where one call with tiles of 64 and 100 numbers was seen."""
    types = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32"}
    kernel = named_source(numbers_with_all_numbers, types, BI=64, BJ=32, FLAT=flat)
    seen: dict[str, Any] = {"x_ptr": torch.empty(100), "n": 100, "grid0": 2, "triton": triton, "BI": 64, "BJ": 64}
    adjoint = differentiate(kernel, read=frozenset(("x_ptr",)), written=frozenset(("o_ptr",)))
    return {plan.schedule: plan for plan in plans(kernel, adjoint, 1, calls=Calls((seen,)))}


def test_sums_of_pairs_of_numbers_that_lie_in_one_row_have_an_owner() -> None:
    # The sum of a tile of pairs over one of its axes has an axis of one until it is a row again: taken for another
    # order of its elements, which a tile of another size does not have, both places stayed atomic.
    found = of_numbers(flat=False)
    assert atomics(found["split"]) == []
    torch.manual_seed(0)
    x, do = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    given, cotangents = {"x_ptr": x, "n": 100}, {"o_ptr": do}
    agree(found, given, cotangents, (2,), BI=64, BJ=64, FLAT=False)
    _, (counts,) = run(found["split"], given, cotangents, (2,), BI=64, BJ=64, FLAT=False)
    assert counts.owned("dx")


def test_tiles_whose_elements_lie_in_other_rows_stay_two() -> None:
    # All pairs of a tile in one row are as many as both tiles have together: of that nothing is known by one name.
    assert all("dx" in atomics(plan) for plan in of_numbers(flat=True).values())
