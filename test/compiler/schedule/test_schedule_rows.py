"""Sums over rows: in registers as far as a loop goes, then one partial sum for each of a few programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from schedule_kernels import ROWS, add_to, made, rows_adjoint
from schedule_plans import agree, named_source

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.schedule.rows import persistent, summed_axes
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

GRADIENTS = {"X": "dX", "W": "dW"}


def in_loops(kernel: Kernel) -> list[Code]:
    return [inner.code for op in kernel.ops if op.code is Code.FOR for inner in op.blocks[0].ops]


def gradients(kernel: Kernel, programs: int, **extra: object) -> dict[str, torch.Tensor]:
    """dX (NaN where nothing is stored, unless it is added to) and dW or its rows, of 5 rows of 7 columns."""
    torch.manual_seed(0)
    x, w, dy = torch.randn(5, 7, dtype=torch.float64), torch.randn(7), torch.randn(5, 7, dtype=torch.float64)
    added = {op.base.name for op in kernel.ops if op.code is Code.ATOMIC_ADD}
    dx = torch.zeros_like(x) if "dX" in added else torch.full_like(x, torch.nan)
    given = {"X": x, "W": w.double(), "dY": dy, "dX": dx, "stride": 7, "N": 7, **extra}
    if "dW_rows" not in given:
        given["dW"] = torch.zeros(7, dtype=torch.float64)
    evaluate(kernel, (programs,), given, open_lanes=float("nan"))
    return {name: given[name] for name in ("dX", "dW", "dW_rows") if name in given}


def test_the_axis_that_rows_lie_along_is_found() -> None:
    kernel = made(ROWS, rows_adjoint, BLOCK=8)
    assert summed_axes(kernel, GRADIENTS, Launch.like_forward(1)) == [0]
    assert summed_axes(kernel, {"X": "dX"}, Launch.like_forward(1)) == []


@pytest.mark.parametrize(("rows", "cols"), [(64, 2), (2, 64)])
def test_of_two_axes_that_sums_lie_along_the_longer_one_is_summed_in_registers(rows: int, cols: int) -> None:
    # Sums along the other axis are stored for each program of this one: the short axis left as many rows as it is long.
    def outer(b: Builder, x: Value, da: Value, db: Value) -> None:
        m = b.add(b.mul(b.program_id(0), b.const(8, "i32", "BLOCK")), b.arange(0, 8, "BLOCK"))
        n = b.add(b.mul(b.program_id(1), b.const(8, "i32", "BLOCK")), b.arange(0, 8, "BLOCK"))
        add_to(b, da, m, b.load(x, n))
        add_to(b, db, n, b.load(x, m))

    launch = Launch.like_forward(2, Calls(({"grid0": rows, "grid1": cols},)))
    kernel = made("X:*f32 dA:*f32 dB:*f32", outer)
    assert summed_axes(kernel, {"A": "dA", "B": "dB"}, launch)[0] == (0 if rows > cols else 1)


def test_a_longer_axis_whose_rival_is_added_to_in_a_loop_is_not_preferred() -> None:
    # Registers hold no sums along the other axis: they would stay atomic, and owners of them be passed over.
    def walked(b: Builder, x: Value, da: Value, db: Value, n: Value) -> None:
        m = b.add(b.mul(b.program_id(0), b.const(8, "i32", "BLOCK")), b.arange(0, 8, "BLOCK"))

        def body(col: Value, carries: Sequence[Value]) -> Sequence[Value]:
            add_to(b, db, b.add(b.mul(b.program_id(1), n), col), b.load(x, col))
            return []

        add_to(b, da, m, b.load(x, m))
        b.loop((b.const(0), n, b.const(1)), [], body)

    launch = Launch.like_forward(2, Calls(({"grid0": 2, "grid1": 64},)))
    assert summed_axes(made("X:*f32 dA:*f32 dB:*f32 N", walked), {"A": "dA", "B": "dB"}, launch)[0] == 0


@triton.jit
def shifted(X, S, W, Y, N, BLOCK: tl.constexpr):
    n, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0)
    y = (x - tl.load(S + row)) * tl.load(W + n, mask=n < N, other=0.0)
    tl.store(Y + row * N + n, y, mask=n < N)


def test_turns_are_taken_along_the_axis_that_leaves_no_large_sums_beside() -> None:
    # Turns along the longer axis kept one number a row in registers, and left the weights' sums, of as many rows as x
    # has: beside turns along the other one the numbers take small rows.
    types = {**dict.fromkeys(("X", "S", "W", "Y"), "*fp32"), "N": "i32"}
    source = named_source(shifted, types, BLOCK=32)
    x = torch.randn(3, 150, dtype=torch.float64)
    given = {"X": x, "S": torch.randn(3, dtype=torch.float64), "W": torch.randn(150, dtype=torch.float64), "N": 150}
    calls = Calls(({**given, "Y": x, "BLOCK": 32, "grid0": 5, "grid1": 3},))
    adjoint = differentiate(source, read=frozenset("XSW"), written=frozenset("Y"))
    found = {plan.schedule: plan for plan in plans(source, adjoint, 2, calls=calls)}
    (step,) = found["rows"].steps
    assert step.grid[0] == "grid0"
    assert not any(total.wide for total in found["rows"].totals)
    agree(found, given, {"Y": torch.randn(3, 150, dtype=torch.float64)}, (5, 3), BLOCK=32)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_partial_sums_of_few_programs_add_up_to_the_atomic_gradient(programs: int) -> None:
    plain = made(ROWS, rows_adjoint, BLOCK=8)
    truth = gradients(plain, 5)
    found = persistent(plain, GRADIENTS, Launch.like_forward(1), 0)
    final = owned(found.kernel, {"X": "dX"}, found.launch)
    # What no program stores stays NaN, in the gradient and in the rows.
    rows = torch.full((programs, 7), torch.nan, dtype=torch.float64)
    got = gradients(final.kernel, programs, dW_rows=rows, num_rows=5, dW_rows_width=7)
    torch.testing.assert_close(got["dX"], truth["dX"])
    torch.testing.assert_close(got["dW_rows"].sum(0), truth["dW"])
    assert Code.ATOMIC_ADD not in [op.code for op in final.kernel.ops]


def test_a_weight_with_gaps_in_a_call_that_was_seen_has_no_partial_sums() -> None:
    # Rows of `numel` elements hold no gradient of a weight whose addresses go beyond: such a call would be refused.
    plain = made(ROWS, rows_adjoint, BLOCK=8)
    whole, gaps = torch.ones(7), torch.ones(14)[::2]
    persistent(plain, GRADIENTS, Launch.like_forward(1, Calls(({"W": whole},))), 0)
    gapped = persistent(plain, GRADIENTS, Launch.like_forward(1, Calls(({"W": gaps},))), 0)
    assert gapped.partials == {}


def test_weights_are_loaded_once_for_all_rows_of_a_program() -> None:
    final = persistent(made(ROWS, rows_adjoint, BLOCK=8), GRADIENTS, Launch.like_forward(1), 0).kernel
    outside = [op.base.name for op in final.body.ops if op.code is Code.LOAD]
    assert outside == ["W"]


def test_rows_are_covered_as_the_loop_goes_through_them_all() -> None:
    found = persistent(made(ROWS, rows_adjoint, BLOCK=8), GRADIENTS, Launch.like_forward(1), 0)
    final = owned(found.kernel, {"X": "dX"}, found.launch)
    assert final.empty_if["dX"] == "X.numel() == N * grid0 and BLOCK >= N"
    assert found.partials["dW"].empty_if == "W.numel() == N and BLOCK >= N"
    assert found.scalars == {"num_rows": "grid0"}
    processors = "torch.cuda.get_device_properties(X.device).multi_processor_count"
    assert found.count == f"min(grid0, per_sm * {processors})"


def test_programs_that_end_early_are_not_repeated_in_a_loop() -> None:
    def build(b: Builder, *arguments: Value) -> None:
        b.add_op(Op(Code.LEAVE_IF, (b.compare("ge", b.program_id(0), arguments[-1]),), ()))
        rows_adjoint(b, *arguments)

    with pytest.raises(CannotDerive, match="ends early"):
        persistent(made(ROWS, build), GRADIENTS, Launch.like_forward(1), 0)


def test_sums_whose_place_a_loop_moves_do_not_fit_registers() -> None:
    def build(b: Builder, x: Value, w: Value, dw: Value, n: Value) -> None:
        lane, row = b.arange(0, 8, "BLOCK"), b.program_id(0)

        def body(off: Value, carries: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, lane)
            value = b.load(x, b.add(b.mul(row, n), cols), b.compare("lt", cols, n), b.const(0.0, "f32"))
            add_to(b, dw, cols, value, b.compare("lt", cols, n))
            return []

        b.loop((b.const(0), n, b.const(8, "i32", "BLOCK")), [], body)

    with pytest.raises(CannotDerive, match="registers"):
        persistent(made("X:*f32 W:*f32 dW:*f32 N", build), {"W": "dW"}, Launch.like_forward(1), 0)


def test_both_halves_of_a_bias_have_one_row_of_partial_sums() -> None:
    # Two additions to one gradient: a row that held one of them would lose the other.
    def halves(b: Builder, x: Value, w: Value, dw: Value, n: Value) -> None:
        cols = b.arange(0, 8, "BLOCK")
        mask = b.compare("lt", cols, n)
        value = b.load(x, b.add(b.mul(b.program_id(0), n), cols), mask, b.const(0.0, "f32"))
        add_to(b, dw, cols, value, mask)
        add_to(b, dw, b.add(cols, n), b.mul(value, value), mask)

    found = persistent(made("X:*f32 W:*f32 dW:*f32 N", halves, BLOCK=8), {"W": "dW"}, Launch.like_forward(1), 0)
    assert found.partials["dW"].empty_if == "W.numel() == 2 * N and BLOCK >= N"
    x, rows = torch.randn(5, 7, dtype=torch.float64), torch.full((2, 14), torch.nan, dtype=torch.float64)
    given = {"X": x, "W": rows[0], "dW_rows": rows, "N": 7, "num_rows": 5, "dW_rows_width": 14}
    evaluate(found.kernel, (2,), {value.name: given[value.name] for value in found.kernel.arguments})
    torch.testing.assert_close(rows.sum(0), torch.cat((x.sum(0), (x * x).sum(0))))


def summing(masked: bool) -> Kernel:
    """Each program adds the rows below `count` of its own block of columns."""

    def build(b: Builder, x: Value, dw: Value, count: Value) -> None:
        cols = b.add(b.mul(b.program_id(0), b.const(4)), b.arange(0, 4))

        def body(row: Value, carries: Sequence[Value]) -> Sequence[Value]:
            value = b.load(x, b.add(b.mul(row, b.const(8)), cols))
            add_to(b, dw, cols, value, b.compare("lt", b.add(row, cols), count) if masked else None)
            return []

        b.loop((b.const(0), b.const(6), b.const(1)), [], body)

    return made("X:*f32 dW:*f32 count", build)


@pytest.mark.parametrize("masked", [False, True])
def test_a_loop_adds_what_stays_in_place_once_after_it(masked: bool) -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    results = []
    for kernel in (summing(masked), accumulated(summing(masked))):
        dw = torch.zeros(8, dtype=torch.float64)
        counts = evaluate(kernel, (2,), {"X": x, "dW": dw, "count": 6})
        results.append(dw)
        added = counts.added["dW"]
    torch.testing.assert_close(results[1], results[0])
    # Columns 6 and 7 are masked in every trip: adding even zero there could be out of bounds.
    assert added.tolist() == ([1] * 6 + [0] * 2 if masked else [1] * 8)
    assert Code.ATOMIC_ADD not in in_loops(accumulated(summing(masked)))
