"""Every schedule of a backward gives the gradients of the plain one, with NaN in all that may be left empty."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import block_of, made, matrix
from schedule_plans import agree, atomics, forward, plans_of, run

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value

BLOCK = 8


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def elementwise(b: Builder, x: Value, y: Value, n: Value) -> None:
    at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
    mask = b.compare("lt", at, n)
    b.store(y, at, b.unary(Code.SIN, b.load(x, at, mask)), mask)


def test_an_elementwise_backward_stores_and_needs_no_zeros() -> None:
    found = plans_of(forward("X:*f32 Y:*f32 n", elementwise, BLOCK=BLOCK), "X", "Y", 1)
    assert list(found) == ["owned", "plain"]
    assert atomics(found["owned"]) == []
    x, dy = randn(20), randn(20)
    agree(found, {"X": x, "n": 20}, {"Y": dy}, (3,), BLOCK=BLOCK)
    gradient, (counts,) = run(found["owned"], {"X": x, "n": 20}, {"Y": dy}, (3,), BLOCK=BLOCK)
    torch.testing.assert_close(gradient["X"], dy * x.cos())
    assert counts.owned("dX")
    assert counts.covered("dX")


def test_outputs_whose_contents_nobody_needs_are_no_arguments() -> None:
    found = plans_of(forward("X:*f32 Y:*f32 n", elementwise, BLOCK=BLOCK), "X", "Y", 1)
    assert [value.name for value in found["owned"].steps[0].kernel.arguments] == ["X", "n", "dY", "dX"]


def test_elements_that_the_forward_does_not_read_get_zeros() -> None:
    # Ten elements more than the kernel is told of: an empty buffer would keep NaN there.
    found = plans_of(forward("X:*f32 Y:*f32 n", elementwise, BLOCK=BLOCK), "X", "Y", 1)
    gradient, _ = run(found["owned"], {"X": randn(30), "n": 20}, {"Y": randn(20)}, (3,), BLOCK=BLOCK)
    assert gradient["X"][20:].tolist() == [0.0] * 10


def norm(b: Builder, x: Value, w: Value, y: Value, stride: Value, n: Value) -> None:
    row, cols = b.program_id(0, "row"), b.arange(0, BLOCK, "BLOCK")
    mask, zero = b.compare("lt", cols, n), b.const(0.0, "f32")
    at = b.add(b.mul(row, stride), cols)
    values = b.load(x, at, mask, zero)
    scale = b.unary(Code.RSQRT, b.add(b.sum(b.mul(values, values), 0), b.const(1e-3, "f32")))
    b.store(y, at, b.mul(b.mul(values, scale), b.load(w, cols, mask, zero)), mask)


def test_a_norm_stores_rows_of_its_input_and_partial_sums_of_its_weight() -> None:
    found = plans_of(forward("X:*f32 W:*f32 Y:*f32 stride N", norm, BLOCK=BLOCK), "X W", "Y", 1)
    assert list(found) == ["rows", "owned", "plain"]
    assert atomics(found["rows"]) == []
    assert set(atomics(found["owned"])) == {"dW"}
    given = {"X": randn(5, 7), "W": randn(7), "stride": 7, "N": 7}
    agree(found, given, {"Y": randn(5, 7)}, (5,), BLOCK=BLOCK)


def test_rows_farther_apart_than_they_are_wide_keep_zeros_between_them() -> None:
    found = plans_of(forward("X:*f32 W:*f32 Y:*f32 stride N", norm, BLOCK=BLOCK), "X W", "Y", 1)
    wide = randn(5, 9)
    given = {"X": wide, "W": randn(7), "stride": 9, "N": 7}
    agree(found, given, {"Y": randn(5, 9)}, (5,), BLOCK=BLOCK)


def test_rows_that_lie_on_each_other_are_refused_by_the_facts() -> None:
    found = plans_of(forward("X:*f32 W:*f32 Y:*f32 stride N", norm, BLOCK=BLOCK), "X W", "Y", 1)
    given = {"X": randn(7), "W": randn(7), "stride": 0, "N": 7}
    for schedule in ("rows", "owned"):
        with pytest.raises(AssertionError, match="stride >= N"):
            run(found[schedule], given, {"Y": randn(7)}, (5,), BLOCK=BLOCK)


def test_windows_that_overlap_have_no_other_plan_than_the_plain_one() -> None:
    def windows(b: Builder, x: Value, y: Value) -> None:
        pid, lane = b.program_id(0), b.arange(0, BLOCK, "BLOCK")
        values = b.load(x, b.add(b.mul(pid, b.const(3)), lane))
        b.store(y, pid, b.sum(b.mul(values, values), 0))

    found = plans_of(forward("X:*f32 Y:*f32", windows, BLOCK=BLOCK), "X", "Y", 1)
    assert list(found) == ["plain"]
    # Every schedule that was passed over says why, in the one plan that is left to say it.
    assert found["plain"].remarks == (
        "`rows` is not had: along no axis of the grid all programs add to the same elements",
        "`split` is not had: dX stays atomic: no sum over programs would change that",
        "`owned` is not had: dX stays atomic: its addresses may overlap, or are read from memory",
    )


def test_a_transposed_copy_stores_to_the_addresses_it_read() -> None:
    def transposed(b: Builder, x: Value, y: Value, m: Value, n: Value, sx: Value, sy: Value) -> None:
        rows, cols = block_of(b, b.program_id(0), BLOCK, "BM"), block_of(b, b.program_id(1), 4, "BN")
        inside = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
        values = b.unary(Code.EXP, b.load(x, matrix(b, rows, sx, cols, b.const(1)), inside, b.const(0.0, "f32")))
        at = matrix(b, cols, sy, rows, b.const(1))
        b.store(y, at, b.trans(values, (1, 0)), b.trans(inside, (1, 0)))

    found = plans_of(forward("X:*f32 Y:*f32 M N sx sy", transposed, BM=BLOCK, BN=4), "X", "Y", 2)
    assert atomics(found["owned"]) == []
    given = {"X": randn(10, 6), "M": 10, "N": 6, "sx": 6, "sy": 10}
    agree(found, given, {"Y": randn(6, 10)}, (2, 2), BM=BLOCK, BN=4)


def test_made_kernels_name_their_constants() -> None:
    assert made("n", lambda b, n: None, BLOCK=8).extents == {8: "BLOCK"}


def test_a_small_sum_has_no_kernel_of_its_own_beside_one_that_reads_the_same() -> None:
    # Such a kernel would read X and dY, which that of dX has, once more.
    def slopes(b: Builder, x: Value, w: Value, y: Value, n: Value) -> None:
        row, channel = b.program_id(0), b.program_id(1)
        at = b.add(b.mul(b.add(b.mul(row, b.num_programs(1)), channel), n), b.arange(0, 32, "BLOCK"))
        mask = b.compare("lt", b.arange(0, 32, "BLOCK"), n)
        b.store(y, at, b.mul(b.load(x, at, mask, b.const(0.0, "f32")), b.load(w, channel)), mask)

    found = plans_of(forward("X:*f32 W:*f32 Y:*f32 N", slopes, BLOCK=32), "X W", "Y", 2)
    assert "split" not in found
    assert atomics(found["owned"]) == []
    agree(found, {"X": randn(4, 3, 30), "W": randn(3), "N": 30}, {"Y": randn(4, 3, 30)}, (4, 3), BLOCK=32)


def test_a_small_sum_of_images_has_no_kernel_of_its_own_either() -> None:
    # Channels are a part of the program's number: a kernel of their own would take the grid apart for them.
    def slopes(b: Builder, x: Value, w: Value, y: Value, n: Value, channels: Value) -> None:
        pid = b.program_id(0)
        at = b.add(b.mul(pid, n), b.arange(0, 32, "BLOCK"))
        mask = b.compare("lt", b.arange(0, 32, "BLOCK"), n)
        slope = b.load(w, b.elementwise(Code.REM, (pid, channels)))
        b.store(y, at, b.mul(b.load(x, at, mask, b.const(0.0, "f32")), slope), mask)

    found = plans_of(forward("X:*f32 W:*f32 Y:*f32 N C", slopes, BLOCK=32), "X W", "Y", 1)
    assert "split" not in found
    assert atomics(found["owned"]) == []
    given = {"X": randn(4, 3, 30), "W": randn(3), "N": 30, "C": 3}
    agree(found, given, {"Y": randn(4, 3, 30)}, (12,), BLOCK=32)


def product(b: Builder, *given: Value) -> None:
    """C = A B by tiles, in a grid of two axes."""
    a, w, c, m, n, k, sa, sw, sc = given
    rows, cols = block_of(b, b.program_id(0, "pid_m"), 8, "BM"), block_of(b, b.program_id(1, "pid_n"), 4, "BN")
    zero, lane = b.const(0.0, "f32"), b.arange(0, 16, "BK")

    def body(start: Value, carries: list[Value]) -> list[Value]:
        inner = b.add(start, lane)
        below = b.compare("lt", inner, k)
        left_in = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(below, 0))
        right_in = b.logical_and(b.expand(below, 1), b.expand(b.compare("lt", cols, n), 0))
        left = b.load(a, matrix(b, rows, sa, inner, b.const(1)), left_in, zero)
        right = b.load(w, matrix(b, inner, sw, cols, b.const(1)), right_in, zero)
        return [b.add(carries[0], b.dot(left, right, "ieee"))]

    (total,) = b.loop((b.const(0), k, b.const(16, "i32", "BK")), [b.whole(zero, (8, 4))], body, index_name="start")
    inside = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
    b.store(c, matrix(b, rows, sc, cols, b.const(1)), total, inside)


PRODUCT = "A:*f32 W:*f32 C:*f32 M N K sa sw sc"
TILES = {"BM": 8, "BN": 4, "BK": 16}


def test_the_gradients_of_a_product_get_kernels_of_their_own() -> None:
    found = plans_of(forward(PRODUCT, product, **TILES), "A W", "C", 2)
    assert list(found) == ["split", "plain"]
    assert atomics(found["split"]) == []
    assert [step.kernel.name for step in found["split"].steps] == ["forward_backward_dA", "forward_backward_dW"]
    a, w, dc = randn(10, 20), randn(20, 6), randn(10, 6)
    given = {"A": a, "W": w, "M": 10, "N": 6, "K": 20, "sa": 20, "sw": 6, "sc": 6}
    agree(found, given, {"C": dc}, (2, 2), **TILES)
    gradients, counts = run(found["split"], given, {"C": dc}, (2, 2), **TILES)
    torch.testing.assert_close(gradients["A"], dc @ w.T)
    torch.testing.assert_close(gradients["W"], a.T @ dc)
    assert all(one.owned(name) and one.covered(name) for one, name in zip(counts, ("dA", "dW"), strict=True))


def two_passes(b: Builder, x: Value, y: Value, n: Value, other: Value) -> None:
    """y = x / sum(x ** 2) by rows in tiles: two loops read the row, and both give it a gradient."""
    row, lane, zero = b.program_id(0, "row"), b.arange(0, 8, "BLOCK"), b.const(0.0, "f32")

    def values(off: Value) -> tuple[Value, Value, Value]:
        cols = b.add(off, lane)
        at, mask = b.add(b.mul(row, n), cols), b.compare("lt", cols, n)
        return b.load(x, at, mask, zero), at, mask

    def square(off: Value, carries: list[Value]) -> list[Value]:
        found = values(off)[0]
        return [b.add(carries[0], b.sum(b.mul(found, found), 0))]

    def scale(off: Value, carries: list[Value]) -> list[Value]:
        found, at, mask = values(off)
        b.store(y, at, b.div(found, total), mask)
        return []

    step = b.const(8, "i32", "BLOCK")
    (total,) = b.loop((b.const(0), n, step), [zero], square)
    b.loop((b.const(0), other, step), [], scale)


def test_the_last_of_two_loops_over_a_row_adds_what_both_add() -> None:
    def same_range(b: Builder, x: Value, y: Value, n: Value) -> None:
        two_passes(b, x, y, n, n)

    found = plans_of(forward("X:*f32 Y:*f32 n", same_range, BLOCK=8), "X", "Y", 1)
    assert list(found) == ["owned", "plain"]
    assert atomics(found["plain"]) == ["dX", "dX"]
    assert atomics(found["owned"]) == []
    agree(found, {"X": randn(3, 20), "n": 20}, {"Y": randn(3, 20)}, (3,), BLOCK=8)


def test_loops_over_different_ranges_both_add() -> None:
    # The second loop may leave out what the first one reads: what that adds would be lost.
    found = plans_of(forward("X:*f32 Y:*f32 n other", two_passes, BLOCK=8), "X", "Y", 1)
    assert list(found) == ["owned", "plain"]
    assert atomics(found["owned"]) == []
    agree(found, {"X": randn(3, 20), "n": 20, "other": 8}, {"Y": randn(3, 20)}, (3,), BLOCK=8)


def in_turns(b: Builder, x: Value, bias: Value, y: Value, rows: Value, cols: Value) -> None:
    at, columns = b.arange(0, BLOCK, "BLOCK"), b.arange(0, BLOCK, "BLOCK")
    step = b.mul(b.num_programs(0), b.const(BLOCK, "i32", "BLOCK"))

    def body(start: Value, carries: Sequence[Value]) -> Sequence[Value]:
        row = b.add(start, at)
        place, mask = matrix(b, row, cols, columns, b.const(1)), b.expand(b.compare("lt", row, rows), 1)
        shift = b.expand(b.load(bias, columns), 0)
        b.store(y, place, b.unary(Code.SIN, b.add(b.load(x, place, mask), shift)), mask)
        return []

    b.loop((b.mul(b.program_id(0), b.const(BLOCK, "i32", "BLOCK")), rows, step), [], body)


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_plans_of_rows_that_programs_take_in_turn_do_not_ask_for_one_program(programs: int) -> None:
    # Loops that start at different rows and step by all of them were taken for loops over the same rows, which is so
    # for one program: with two of them the fact raised.
    found = plans_of(forward("X:*f32 B:*f32 Y:*f32 rows cols", in_turns, BLOCK=BLOCK), "X B", "Y", 1)
    given = {"X": randn(44, BLOCK), "B": randn(BLOCK), "rows": 44, "cols": BLOCK}
    agree(found, given, {"Y": randn(44, BLOCK)}, (programs,), BLOCK=BLOCK)


def test_a_backward_that_owns_nothing_still_reads_what_the_forward_stored() -> None:
    # Rows are picked by an index, so that two programs may add to one: `plain`, which computes all sums again, was all.
    def picked(b: Builder, rows: Value, x: Value, s: Value, y: Value, n: Value) -> None:
        at = b.add(b.mul(b.load(rows, b.program_id(0)), n), b.arange(0, BLOCK, "BLOCK"))
        values = b.load(x, at)
        total = b.unary(Code.EXP, b.sum(b.mul(values, values), 0))
        b.store(s, b.program_id(0), total)
        b.store(y, b.add(b.mul(b.program_id(0), n), b.arange(0, BLOCK, "BLOCK")), b.mul(values, total))

    kernel = forward("ROWS:*i32 X:*f32 S:*f32 Y:*f32 n", picked, BLOCK=BLOCK)
    found = plans_of(kernel, "X", "Y", 1, spare=True)
    assert list(found) == ["owned", "plain"]
    assert [plan.saved for plan in found.values()] == [("S",), ()]
    assert set(atomics(found["owned"])) == {"dX"}
    rows, x = torch.tensor([2, 0, 2], dtype=torch.int32), randn(3, BLOCK) / 4
    given = {"ROWS": rows, "X": x, "S": x[rows].square().sum(1).exp(), "n": BLOCK}
    agree(found, given, {"Y": randn(3, BLOCK)}, (3,), BLOCK=BLOCK)
