"""Products of matrices whose kernels number their tiles in ways of their own."""

from __future__ import annotations

from collections.abc import Sequence

import product_forwards
import pytest
import torch
import triton
from schedule_kernels import add_to, made
from schedule_plans import agree, atomics, from_source, plans_of, run

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.schedule.spread import spread
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

POINTERS = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*fp32")
SIZES = dict.fromkeys(("M", "N", "K"), "i32")
STRIDES = dict.fromkeys([f"stride_{name}" for name in ("am", "ak", "bk", "bn", "cm", "cn")], "i32")
TILES = {"BM": 16, "BN": 32, "BK": 16}


def grouped(*, within: bool) -> Kernel:
    return from_source(
        product_forwards.product_grouped, {**POINTERS, **SIZES, **STRIDES}, **TILES, GROUP=2, WITHIN=within
    )


def matrices(m: int, n: int, k: int) -> tuple[dict[str, object], torch.Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
    given = {"a_ptr": a, "b_ptr": b, "M": m, "N": n, "K": k}
    strides = zip(STRIDES, (k, 1, n, 1, n, 1), strict=True)
    return {**given, **dict(strides)}, torch.randn(m, n, dtype=torch.float64)


def check(kernel: Kernel, m: int, n: int, k: int, programs: int = 0) -> None:
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 1)
    assert list(found)[:1] == ["split"]
    assert atomics(found["split"]) == []
    given, dc = matrices(m, n, k)
    given = {name: value for name, value in given.items() if name in {v.name for v in kernel.arguments}}
    programs = programs or -(-m // 16) * -(-n // 32)
    agree({"plain": found["plain"], "split": found["split"]}, given, {"c_ptr": dc}, (programs,))
    gradients, counts = run(found["split"], given, {"c_ptr": dc}, (programs,))
    torch.testing.assert_close(gradients["a_ptr"], dc @ given["b_ptr"].T)
    assert all(one.covered(name) and one.owned(name) for one, name in zip(counts, ("da", "db"), strict=True))


def test_groups_of_rows_and_wrapped_indices_leave_no_atomics() -> None:
    # Five rows of tiles in groups of two: the last group is smaller. No extent is a multiple of its tile.
    check(grouped(within=True), 70, 50, 40)


def test_groups_counted_without_cutting_off_the_group_first_do_so_too() -> None:
    check(grouped(within=False), 70, 50, 40)


def test_tiles_in_rows_are_two_axes() -> None:
    check(from_source(product_forwards.product_in_rows, {**POINTERS, **SIZES}, **TILES), 40, 50, 40)


def test_tiles_that_few_programs_take_turns_at_are_the_grid_of_owners() -> None:
    # As many owners as the forward has programs, two, would leave the other tiles out; and a loop over tiles that
    # stays a loop adds to both gradients atomically.
    kernel = from_source(product_forwards.product_persistent, {**POINTERS, **SIZES}, **TILES)
    check(kernel, 70, 50, 40, programs=2)


def test_a_loop_that_carries_something_from_tile_to_tile_is_no_grid() -> None:
    def summed(b: Builder, x: Value, d: Value, n: Value) -> None:
        def body(row: Value, carries: Sequence[Value]) -> Sequence[Value]:
            total = b.add(carries[0], b.load(x, row))
            add_to(b, d, row, total)
            return [total]

        b.loop((b.program_id(0), n, b.num_programs(0)), [b.const(0.0, "f32")], body)

    kernel = made("X:*f32 dX:*f32 N", summed)
    assert spread(kernel, Launch.like_forward(1))[0] is kernel


def test_a_grid_of_other_size_than_the_groups_fill_is_refused_by_a_fact() -> None:
    found = plans_of(grouped(within=True), "a_ptr b_ptr", "c_ptr", 1)
    (fact,) = [fact.expression for fact in found["split"].facts if "grid0" in fact.expression]
    given = {**matrices(70, 50, 40)[0], "triton": triton}
    assert eval(fact, {**given, "grid0": 10})
    assert not eval(fact, {**given, "grid0": 9})


def test_a_bias_does_not_make_partial_sums_of_rows_the_best_plan() -> None:
    # Rows of programs could keep sums of the bias's gradient, but would add to those of the matrices.
    types = {**POINTERS, "bias_ptr": "*fp32", **SIZES}
    kernel = from_source(product_forwards.product_and_bias, types, **TILES)
    found = plans_of(kernel, "a_ptr b_ptr bias_ptr", "c_ptr", 2)
    assert next(iter(found)) == "split"
    assert atomics(found["split"]) == []
    given, dc = matrices(40, 50, 40)
    given = {name: given[name] for name in ("a_ptr", "b_ptr", "M", "N", "K")}
    given["bias_ptr"] = torch.randn(50, dtype=torch.float64)
    agree(found, given, {"c_ptr": dc}, (3, 2))


def test_the_derivative_of_an_activation_is_computed_once_per_tile() -> None:
    # Without it each owner would do the forward's product again, for every tile that it visits: that is refused.
    kernel = from_source(product_forwards.product_and_tanh, {**POINTERS, **SIZES}, **TILES)
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 2)
    assert atomics(found["split"]) == []
    once, *owners = (step.kernel for step in found["split"].steps)
    assert any(op.code is Code.EXP for op in once.ops)
    assert len(owners) == 2
    assert not any(op.code is Code.EXP for owner in owners for op in owner.ops)
    given, dc = matrices(40, 50, 40)
    given = {name: given[name] for name in ("a_ptr", "b_ptr", "M", "N", "K")}
    agree(found, given, {"c_ptr": dc}, (3, 2))


SCALED = {**dict.fromkeys(("x_ptr", "s_ptr", "w_ptr", "y_ptr"), "*fp32"), **SIZES}


def test_a_sum_of_what_the_owner_of_a_tile_has_takes_no_product_of_its_own() -> None:
    # The gradient of a column's scale is a sum over rows and outputs: as an owner's alone it was a third product.
    kernel = from_source(product_forwards.scaled_product, SCALED, BM=16, BN=32, BK=16, BY_TILE=False)
    found = plans_of(kernel, "x_ptr s_ptr w_ptr", "y_ptr", 2)
    assert atomics(found["split"]) == []
    products = [sum(op.code is Code.DOT for op in step.kernel.ops) for step in found["split"].steps]
    assert products == [1, 1]
    torch.manual_seed(0)
    x, s, w, dy = (torch.randn(shape, dtype=torch.float64) for shape in ((40, 36), (36,), (36, 50), (40, 50)))
    given = {"x_ptr": x, "s_ptr": s, "w_ptr": w, "M": 40, "N": 50, "K": 36}
    agree(found, given, {"y_ptr": dy}, (3, 2))
    gradients, _ = run(found["split"], given, {"y_ptr": dy}, (3, 2))
    torch.testing.assert_close(gradients["s_ptr"], (dy @ w.T * x).sum(0))


def test_a_sum_as_large_as_the_tiles_it_is_made_of_has_an_owner() -> None:
    # A row of partial sums for every program would be as much memory as what the product reads.
    kernel = from_source(product_forwards.scaled_product, SCALED, BM=16, BN=32, BK=16, BY_TILE=True)
    found = plans_of(kernel, "x_ptr s_ptr w_ptr", "y_ptr", 2)
    assert len(found["split"].steps) == 3
    torch.manual_seed(0)
    x, s, w, dy = (torch.randn(shape, dtype=torch.float64) for shape in ((40, 36), (16, 36), (36, 50), (40, 50)))
    agree(found, {"x_ptr": x, "s_ptr": s, "w_ptr": w, "M": 40, "N": 50, "K": 36}, {"y_ptr": dy}, (3, 2))


def test_programs_of_one_product_write_nothing_to_the_gradient_of_another() -> None:
    # A mask bounds columns from above alone: of programs whose columns are those of V, W's are below zero, and the
    # zeros that they had summed for it were added in front of the tensor.
    types = {**dict.fromkeys(("x_ptr", "v_ptr", "w_ptr", "y_ptr", "z_ptr"), "*fp32"), **SIZES}
    kernel = from_source(product_forwards.two_products, types, **TILES)
    torch.manual_seed(0)
    x, v, w = (torch.randn(shape, dtype=torch.float64) for shape in ((20, 18), (18, 40), (18, 40)))
    given = {"x_ptr": x, "v_ptr": v, "w_ptr": w, "M": 20, "N": 40, "K": 18}
    adjoint = differentiate(kernel, read=frozenset(["x_ptr", "v_ptr", "w_ptr"]), written=frozenset(["y_ptr", "z_ptr"]))
    calls = Calls(({**given, "grid0": 4, "grid1": 2, "triton": triton},))
    found = {plan.schedule: plan for plan in plans(kernel, adjoint, 2, calls=calls)}
    assert next(iter(found)) == "split"
    agree(found, given, {name: torch.randn(20, 40, dtype=torch.float64) for name in ("y_ptr", "z_ptr")}, (4, 2))


def test_clamped_indices_leave_no_atomics() -> None:
    # Lanes beyond the last row add zeros to it, as those of a remainder do to the first ones.
    kernel = from_source(product_forwards.clamped_product, {**POINTERS, **SIZES}, **TILES)
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 2)
    assert atomics(found["split"]) == []
    given, dc = matrices(40, 50, 40)
    agree(found, {name: given[name] for name in ("a_ptr", "b_ptr", "M", "N", "K")}, {"c_ptr": dc}, (3, 2))


def test_clamped_rows_that_are_stored_as_well_stay_atomic() -> None:
    # Their cotangents are no zeros: under a mask the last row would lose them.
    types = {"a_ptr": "*fp32", "c_ptr": "*fp32", "M": "i32", "N": "i32"}
    found = plans_of(from_source(product_forwards.clamped_rows, types, BM=16, BN=16), "a_ptr", "c_ptr", 1)
    assert all(atomics(plan) == ["da"] for plan in found.values())
    given = {"a_ptr": torch.randn(20, 10, dtype=torch.float64), "M": 20, "N": 10}
    agree(found, given, {"c_ptr": torch.randn(32, 10, dtype=torch.float64)}, (2,))


@pytest.mark.parametrize("masked", [True, False])
def test_parts_of_a_clamped_row_are_those_of_the_row_itself(masked: bool) -> None:
    # min(row, M - 1) is taken apart into a batch and a row; without a mask the last row has many cotangents.
    types = dict.fromkeys(("a_ptr", "c_ptr"), "*fp32") | dict.fromkeys(("M", "N", "T", "stride_b", "stride_t"), "i32")
    kernel = from_source(product_forwards.clamped_parts, types, BM=16, BN=16, MASKED=masked)
    found = plans_of(kernel, "a_ptr", "c_ptr", 1)
    assert all((atomics(plan) == []) is masked for name, plan in found.items() if name != "plain")
    given = {"a_ptr": torch.randn(4, 5, 10, dtype=torch.float64), "M": 20, "N": 10, "T": 5}
    dc = torch.randn(32, 10, dtype=torch.float64)
    agree(found, {**given, "stride_b": 50, "stride_t": 10}, {"c_ptr": dc}, (2,))


def test_a_product_whose_programs_each_have_a_slice_of_the_summed_axis_leaves_no_atomics() -> None:
    # Where slices start depends on the program, and so does where they end: the last one is shorter.
    kernel = from_source(product_forwards.sliced_product, {**POINTERS, **SIZES, "EACH": "i32"}, **TILES)
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 2)
    assert atomics(found["split"]) == []
    given, _ = matrices(40, 50, 90)
    given = {**{name: given[name] for name in ("a_ptr", "b_ptr", "M", "N", "K")}, "EACH": 32}
    agree(found, given, {"c_ptr": torch.randn(3, 40, 50, dtype=torch.float64)}, (3, 2, 3))
    scope = {**given, "triton": triton, "grid2": 3, "BK": 16}
    told = [fact.expression for fact in found["split"].facts if "EACH" in fact.expression]
    assert not all(eval(text, {**scope, "EACH": 24}) for text in told)
    assert not all(eval(text, {**scope, "EACH": -16}) for text in told)


def test_slices_that_are_no_whole_number_of_tiles_leave_no_atomics() -> None:
    # Tiles of 16 from 0 on meet two slices of 24 each; counted from where its slice starts, a tile has one owner. The
    # last slice is shorter: an owner that went on to the end of a whole one would store beyond the axis.
    kernel = from_source(product_forwards.sliced_product, {**POINTERS, **SIZES, "EACH": "i32"}, **TILES)
    given, _ = matrices(40, 50, 90)
    given = {**{name: given[name] for name in ("a_ptr", "b_ptr", "M", "N", "K")}, "EACH": 24}
    names = {**given, **TILES, "triton": triton, "grid0": 3, "grid1": 2, "grid2": 4}
    adjoint = differentiate(kernel, read=frozenset(("a_ptr", "b_ptr")), written=frozenset(("c_ptr",)))
    found = {plan.schedule: plan for plan in plans(kernel, adjoint, 3, calls=Calls((names,)))}
    assert atomics(found["split"]) == []
    agree(
        {name: found[name] for name in ("plain", "split")},
        given,
        {"c_ptr": torch.randn(4, 40, 50, dtype=torch.float64)},
        (3, 2, 4),
    )


def test_rows_that_each_program_has_a_slice_of_are_stored_where_they_are() -> None:
    # A kernel of their own, whose programs ask of every slice whether a row is in it, would read dY again.
    numbers = dict.fromkeys(("M", "N", "EACH"), "i32")
    types = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*fp32") | numbers
    kernel = from_source(product_forwards.scaled_slices, types, BM=16, BN=32)
    found = plans_of(kernel, "x_ptr w_ptr", "y_ptr", 2)
    assert all("dx" not in step.kernel.name for plan in found.values() for step in plan.steps)
    assert "dx" in {op.base.name for op in found["owned"].steps[0].kernel.ops if op.code is Code.STORE}
    x, w, dy = (torch.randn(shape, dtype=torch.float64) for shape in ((90, 50), (50,), (90, 50)))
    agree(found, {"x_ptr": x, "w_ptr": w, "M": 90, "N": 50, "EACH": 32}, {"y_ptr": dy}, (2, 3))


def test_a_small_sum_is_made_where_a_large_one_is_made_of_the_same() -> None:
    # The bias of a word has the programs of the word's row of weights: rows of partial sums, one for each block of
    # inputs, were as much memory as the weights.
    types = {**dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "*fp32"), "M": "i32", "N": "i32"}
    kernel = from_source(product_forwards.biased_exponents, types, D=16, BM=16, BN=16)
    found = plans_of(kernel, "x_ptr w_ptr bias_ptr", "y_ptr", 1)
    assert atomics(found["split"]) == []
    assert not found["split"].totals
    x, w, bias = (torch.randn(shape, dtype=torch.float64) * 0.3 for shape in ((40, 16), (50, 16), (50,)))
    given = {"x_ptr": x, "w_ptr": w, "bias_ptr": bias, "M": 40, "N": 50}
    agree(found, given, {"y_ptr": torch.randn(40, dtype=torch.float64)}, (3,))


def of_sequences(*, alike: bool) -> tuple[Kernel, dict[str, object], torch.Tensor]:
    """Products of sequences of 21, 0 and 9 rows with 20 and 40 columns, in two tiles each; with a cotangent."""
    signature = {**POINTERS, "bounds_ptr": "*i32", "K": "i32", "N": "i32"}
    kernel = from_source(product_forwards.products_of_sequences, signature, BR=16, BK=16, BN=32, ALIKE=alike)
    torch.manual_seed(0)
    a, b = torch.randn(30, 20, dtype=torch.float64), torch.randn(30, 40, dtype=torch.float64)
    given = {"a_ptr": a, "b_ptr": b, "bounds_ptr": torch.tensor([0, 21, 21, 30]), "K": 20, "N": 40}
    return kernel, given, torch.randn(3, 20, 40, dtype=torch.float64)


def test_owners_go_through_the_rows_of_a_sequence_where_its_programs_all_do() -> None:
    # No axis of a grid has as many trips as each sequence has tiles of rows: an owner that took the first alone, or
    # those of another sequence, would leave rows without their gradients.
    kernel, given, dc = of_sequences(alike=True)
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 2)
    assert atomics(found["split"]) == []
    agree({"plain": found["plain"], "split": found["split"]}, given, {"c_ptr": dc}, (6, 2))
    gradients, counts = run(found["split"], given, {"c_ptr": dc}, (6, 2))
    torch.testing.assert_close(gradients["a_ptr"][:21], given["b_ptr"][:21] @ dc[0].T)
    assert all(one.covered(name) and one.owned(name) for one, name in zip(counts, ("da", "db"), strict=True))


def test_rows_that_some_of_the_programs_leave_out_have_owners_of_counted_trips_alone() -> None:
    # An owner with one number of trips would add what programs that ended before never computed: only one that goes
    # through a list of the trips that there are is right.
    kernel, given, dc = of_sequences(alike=False)
    found = plans_of(kernel, "a_ptr b_ptr", "c_ptr", 2)
    split = found.pop("split")
    (listing,) = split.listings
    assert listing.counting is not None
    assert len(atomics(split)) == 1  # of da, whose rows no trip picks
    agree(found, given, {"c_ptr": dc}, (6, 2))
