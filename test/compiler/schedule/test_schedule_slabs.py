"""Programs that share out columns become one that has all of them, where columns do not meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.schedules import atomics
from kernel_agent.compiler.schedule.slabs import Whole, unslabbed
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

ROWS, TILE, COLUMNS = 4, 8, 12
Build = Callable[[Builder, Value, Value, Value, Value], None]


def scaled(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """Programs (row tile, slab) store X * Row to their tile of Out."""
    rows, cols = block_of(b, b.program_id(0), ROWS, "ROWS"), block_of(b, b.program_id(1), TILE, "TILE")
    at, mask = matrix(b, rows, n, cols, b.const(1)), b.expand(b.compare("lt", cols, n), 0)
    factor = b.expand(b.load(row, rows), 1)
    b.store(out, at, b.mul(b.load(x, at, mask, b.const(0.0, "f32")), factor), mask)


def kernel(build: Build = scaled) -> Kernel:
    return made("X:*f32 Row:*f32 dOut:*f32 N", build, ROWS=ROWS, TILE=TILE)


def calls(asked: int = COLUMNS, programs: int = 2, *, real: bool = True) -> Calls:
    names = {"N": COLUMNS, "TILE": TILE, "ROWS": ROWS, "grid0": 1, "grid1": programs, "triton": triton}
    entries = (Entry({"N": COLUMNS}, {"N": asked}),) if real else ()
    return Calls((names,), entries=entries)


def whole(source: Kernel, asked: int = COLUMNS, programs: int = 2, *, real: bool = True) -> Whole | None:
    return unslabbed(source, Launch.like_forward(2, calls(asked, programs, real=real)))


def test_one_program_with_all_columns_computes_what_its_slabs_did() -> None:
    # A tile that keeps its name would have the forward's size: columns behind the first slab would get nothing.
    found = whole(kernel())
    assert found is not None
    (slab,) = found.slabs
    assert (slab.axis, slab.name, slab.width) == (1, "ALL_TILE", "max(TILE, triton.next_power_of_2(N))")
    assert found.calls.names[0]["ALL_TILE"] == 16
    assert all(op.attributes.get("axis") != 1 for op in found.kernel.ops if op.code is Code.PROGRAM_ID)
    x, row = torch.randn(ROWS, TILE, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    out = torch.full_like(x, torch.nan)
    evaluate(found.kernel, (1, 1), {"X": x, "Row": row, "dOut": out, "N": TILE})
    torch.testing.assert_close(out, x * row[:, None])


def test_a_gradient_that_slabs_share_is_stored_by_one_program() -> None:
    # Every slab has a part in dRow: torch summed them, or they were added atomically.
    wanted = Wanted(kernel(), 2, calls(), frozenset(("X", "Row")), frozenset(("dOut",)))
    plan = planned("rows", wanted)
    assert not plan.totals
    assert not atomics(plan)
    assert plan.steps[0].grid == ("grid0", "1")
    assert "ALL_TILE" in plan.settings
    assert "grid1 * TILE >= N" in [fact.expression for fact in plan.facts]


def test_slabs_that_store_rows_of_partial_sums_stay_programs() -> None:
    # Torch sums few rows: with one program for all slabs, half of a GPU has nothing to do in a recurrence.
    plan = planned("owned", Wanted(kernel(), 2, calls(), frozenset(("X", "Row")), frozenset(("dOut",))))
    assert plan.totals
    assert "ALL_TILE" not in plan.settings


def test_rows_that_are_long_at_work_keep_their_slabs() -> None:
    # The entry was made small to be looked at: a tile of 4096 columns compiles for no GPU.
    assert whole(kernel(), asked=4096) is None
    assert whole(kernel(), real=False) is None


def test_columns_that_no_program_had_keep_the_slabs() -> None:
    # The forward left its last columns alone: the backward would give them gradients.
    assert whole(kernel(), programs=1) is None


def summed_by_slab(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """Every column less the sum of its slab."""
    rows, cols = block_of(b, b.program_id(0), ROWS, "ROWS"), block_of(b, b.program_id(1), TILE, "TILE")
    at, mask = matrix(b, rows, n, cols, b.const(1)), b.expand(b.compare("lt", cols, n), 0)
    value = b.load(x, at, mask, b.const(0.0, "f32"))
    b.store(out, at, b.sub(value, b.expand(b.sum(value, 1), 1)), mask)


def told_by_slab(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """Every column and the number of its slab."""
    rows, slab = block_of(b, b.program_id(0), ROWS, "ROWS"), b.program_id(1)
    cols = block_of(b, slab, TILE, "TILE")
    at, mask = matrix(b, rows, n, cols, b.const(1)), b.expand(b.compare("lt", cols, n), 0)
    b.store(out, at, b.add(b.load(x, at, mask, b.const(0.0, "f32")), b.cast(slab, "f32")), mask)


def told_by_lane(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """Every column and its place in the slab."""
    rows, cols = block_of(b, b.program_id(0), ROWS, "ROWS"), block_of(b, b.program_id(1), TILE, "TILE")
    at, mask = matrix(b, rows, n, cols, b.const(1)), b.expand(b.compare("lt", cols, n), 0)
    place = b.expand(b.cast(b.arange(0, TILE, "TILE"), "f32"), 0)
    b.store(out, at, b.add(b.load(x, at, mask, b.const(0.0, "f32")), place), mask)


def not_masked(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """No mask: a wider tile would leave the row."""
    rows, cols = block_of(b, b.program_id(0), ROWS, "ROWS"), block_of(b, b.program_id(1), TILE, "TILE")
    at = matrix(b, rows, n, cols, b.const(1))
    b.store(out, at, b.load(x, at))


def counted_by_slab(b: Builder, x: Value, row: Value, out: Value, n: Value) -> None:
    """Each slab adds one to its rows, beside what it stores."""
    scaled(b, x, row, out, n)
    rows = block_of(b, b.program_id(0), ROWS, "ROWS")
    add_to(b, out, rows, b.whole(b.const(1.0, "f32"), (ROWS,)))


@pytest.mark.parametrize("build", [summed_by_slab, told_by_slab, told_by_lane, not_masked, counted_by_slab])
def test_what_knows_its_slab_keeps_it(build: Build) -> None:
    # With all columns in one program each of these computes something else, or leaves its memory.
    assert whole(kernel(build)) is None
