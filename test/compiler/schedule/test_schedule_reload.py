"""Long rows are loaded again behind their sums, if a constexpr says so."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.reload import crowding, reloaded, streaming
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

ARGUMENTS = "X:*f32 W:*f32 dX:*f32 rows N"


def scaled_by_its_sum(b: Builder, x: Value, w: Value, dx: Value, rows: Value, n: Value) -> None:
    """dx = x * w * (the sum of x * w), row by row."""
    cols = b.arange(0, 8, "BLOCK", name="cols")
    mask, zero = b.compare("lt", cols, n), b.const(0.0, "f32")

    def body(row: Value, _: list[Value]) -> list[Value]:
        at = b.add(b.mul(row, n), cols)
        product = b.mul(b.load(x, at, mask, zero), b.load(w, cols, mask, zero))
        b.store(dx, at, b.mul(product, b.sum(product, 0)), mask)
        return []

    b.loop((b.const(0), rows, b.const(1)), [], body, index_name="row", certain=True, num_stages="STAGES")


def kernel() -> Kernel:
    return made(ARGUMENTS, scaled_by_its_sum, BLOCK=8, STAGES=1)


def gradient(made_kernel: Kernel) -> torch.Tensor:
    torch.manual_seed(0)
    x, w = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    dx = torch.full_like(x, torch.nan)
    evaluate(made_kernel, (1,), {"X": x, "W": w, "dX": dx, "rows": 5, "N": 7}, open_lanes=float("nan"))
    return dx


def test_rows_that_are_loaded_again_give_the_same_gradient() -> None:
    again = reloaded(kernel(), "STAGES", "RELOAD")
    assert again is not None
    verify(again)
    # The constexpr is true here: what is loaded again is what is stored.
    torch.testing.assert_close(gradient(again), gradient(kernel()))


def test_what_is_read_behind_the_sums_is_computed_from_new_loads() -> None:
    again = reloaded(kernel(), "STAGES", "RELOAD")
    assert again is not None
    text = triton_source(again).text
    assert "        sum_product = tl.sum(product, axis=0)\n        if RELOAD:\n" in text
    branch = text.split("if RELOAD:\n")[1]
    assert branch.lstrip().startswith("x_1 = tl.load(X + x_offs, mask=col_mask, other=0.0, eviction_policy=")
    assert "            product = x_1 * w\n" in branch


def test_the_choice_stays_open_in_later_passes() -> None:
    # A constant that is folded, or loads that are shared, would leave one side of the branch, or none.
    again = reloaded(kernel(), "STAGES", "RELOAD")
    assert again is not None
    later = prune(again)
    loads = [op.base.name for op in later.ops if op.code is Code.LOAD]
    assert sorted(loads) == ["W", "X", "X"]
    assert [op.code for op in later.ops].count(Code.IF) == 1


def test_the_weights_that_all_rows_share_are_not_loaded_again() -> None:
    assert crowding(kernel(), "STAGES") == ()
    again = reloaded(kernel(), "STAGES", "RELOAD")
    assert again is not None
    (branch,) = [op for op in again.ops if op.code is Code.IF]
    assert [op.base.name for op in branch.blocks[0].ops if op.code is Code.LOAD] == ["X"]


@pytest.mark.parametrize("kept", ["nothing", "a running sum"])
def test_loops_that_keep_no_loads_for_later_stay_as_they_are(kept: str) -> None:
    def build(b: Builder, x: Value, w: Value, dx: Value, rows: Value, n: Value) -> None:
        cols = b.arange(0, 8, "BLOCK", name="cols")

        def body(row: Value, _: list[Value]) -> list[Value]:
            at = b.add(b.mul(row, n), cols)
            value = b.load(x, at)
            if kept == "nothing":
                b.store(dx, at, b.mul(b.load(w, at), b.sum(value, 0)))
            else:  # which is dear to have again
                running = b.reduce(Code.SUM, b.expand(value, 0), 0)
                running = b.pure(Code.CUMSUM, (running,), "f32", (8,), {"axis": 0, "reverse": False})
                b.store(dx, at, b.mul(running, b.sum(running, 0)))
            return []

        b.loop((b.const(0), rows, b.const(1)), [], body, index_name="row", certain=True, num_stages="STAGES")

    assert reloaded(made(ARGUMENTS, build, BLOCK=8, STAGES=1), "STAGES", "RELOAD") is None


def test_all_rows_are_on_their_way_before_the_first_sum() -> None:
    # A load behind a sum starts when all warps have met for it: the time of two trips to memory instead of one.
    def build(b: Builder, x: Value, w: Value, dx: Value, rows: Value, n: Value) -> None:
        cols = b.arange(0, 8, "BLOCK", name="cols")

        def body(row: Value, _: list[Value]) -> list[Value]:
            at = b.add(b.mul(row, n), cols)
            one = b.cast(b.load(x, at), "f32")
            length = b.sum(b.mul(one, one), 0)
            other = b.cast(b.load(w, at), "f32")
            b.store(dx, at, b.mul(one, b.mul(length, b.sum(b.mul(one, other), 0))))
            return []

        b.loop((b.const(0), rows, b.const(1)), [], body, index_name="row", certain=True, num_stages="STAGES")

    again = reloaded(made("X:*bf16 W:*bf16 dX:*f32 rows N", build, BLOCK=8, STAGES=1), "STAGES", "RELOAD")
    assert again is not None
    text = triton_source(again).text
    assert text.index("tl.load(W") < text.index("tl.sum(")


def summed_by_columns(b: Builder, x: Value, w: Value, dx: Value, rows: Value, n: Value) -> None:
    """As `scaled_by_its_sum`; and behind dx, the sums of x and of x * w over the rows."""
    cols = b.arange(0, 8, "BLOCK", name="cols")
    mask, zero = b.compare("lt", cols, n), b.const(0.0, "f32")

    def body(row: Value, sums: list[Value]) -> list[Value]:
        at = b.add(b.mul(row, n), cols)
        one = b.load(x, at, mask, zero)
        product = b.mul(one, b.load(w, cols, mask, zero))
        b.store(dx, at, b.mul(product, b.sum(product, 0)), mask)
        return [b.add(sums[0], one), b.add(sums[1], product)]

    none = b.whole(zero, (8,))
    bounds = (b.const(0), rows, b.const(1))
    found = b.loop(bounds, [none, none], body, index_name="row", certain=True, num_stages="STAGES")
    for place, total in enumerate(found):
        b.store(dx, b.add(b.mul(b.add(rows, b.const(place)), n), cols), total, mask)


def test_weights_beside_two_sums_over_the_rows_are_loaded_for_each_half() -> None:
    # Three rows held from the first row to the last leave no room for the one that is worked on: it was spilled.
    plain = made(ARGUMENTS, summed_by_columns, BLOCK=8, STAGES=1)
    assert crowding(plain, "STAGES") == ("W",)
    again = reloaded(plain, "STAGES", "RELOAD", "FETCH")
    assert again is not None
    verify(again)
    text = triton_source(prune(again)).text
    first, second = (text.split(f"if {name}:\n")[1].split("else:")[0] for name in ("FETCH", "RELOAD"))
    # Two loads of one address that nothing tells apart Triton makes one of, which is held as before.
    assert "tl.load(W + cols, mask=col_mask, other=0.0)" in first
    assert 'tl.load(W + cols, mask=col_mask, other=0.0, eviction_policy="evict_last")' in second


def test_weights_that_are_loaded_again_give_the_same_gradient() -> None:
    plain = made(ARGUMENTS, summed_by_columns, BLOCK=8, STAGES=1)
    again = reloaded(plain, "STAGES", "RELOAD", "FETCH")
    assert again is not None
    torch.manual_seed(0)
    x, w = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    found = []
    for one in (again, plain):
        dx = torch.full((7, 7), torch.nan, dtype=torch.float64)
        evaluate(one, (1,), {"X": x, "W": w, "dX": dx, "rows": 5, "N": 7}, open_lanes=float("nan"))
        found.append(dx)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][5:], torch.stack([x.sum(0), (x * w).sum(0)]))


def test_weights_that_fly_ahead_with_few_rows_stay_in_registers_where_rows_are_loaded_again() -> None:
    # One product and no sums beside it: where shared memory has no room for the weights, registers have.
    assert streaming(kernel(), "STAGES") == ("W",)
    again = reloaded(kernel(), "STAGES", "RELOAD", "FETCH")
    assert again is not None
    verify(again)
    torch.testing.assert_close(gradient(again), gradient(kernel()))
    fetched, reloads = (op for op in again.ops if op.code is Code.IF)
    assert [op.base.name for op in fetched.blocks[0].ops if op.code is Code.LOAD] == ["W"]
    assert [op.base.name for op in reloads.blocks[0].ops if op.code is Code.LOAD] == ["X"]


@pytest.mark.parametrize(("sums", "expected"), [(1, ("W",)), (2, ())])
def test_only_beside_one_sum_do_two_rows_fly_ahead_with_the_weights(sums: int, expected: tuple[str, ...]) -> None:
    # The registers hold four: two rows in work, what they are multiplied by, and a sum.
    def build(b: Builder, x: Value, w: Value, dx: Value, rows: Value, n: Value) -> None:
        cols = b.arange(0, 8, "BLOCK", name="cols")
        wide = b.load(w, cols)

        def body(row: Value, carries: list[Value]) -> list[Value]:
            at = b.add(b.mul(row, n), cols)
            one, other = b.load(x, at), b.load(x, b.add(at, rows))
            product = b.mul(one, wide)
            b.store(dx, at, b.mul(b.mul(product, other), b.sum(product, 0)))
            return [b.add(carry, term) for carry, term in zip(carries, (one, product), strict=False)]

        bounds, none = (b.const(0), rows, b.const(1)), b.whole(b.const(0.0, "f32"), (8,))
        found = b.loop(bounds, [none] * sums, body, index_name="row", certain=True, num_stages="STAGES")
        for place, total in enumerate(found):
            b.store(dx, b.add(b.const(place), cols), total)

    assert streaming(made("X:*f32 W:*f32 dX:*f32 rows N", build, BLOCK=8, STAGES=1), "STAGES") == expected
