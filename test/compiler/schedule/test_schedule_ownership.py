"""An atomic addition becomes a store where, and only where, no element is added to twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import triton
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 8


def stores_of(kernel: Kernel) -> list[Code]:
    return [op.code for op in kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)]


def facts_of(found: Ownership) -> list[str]:
    return [fact.expression for fact in found.facts]


def own(kernel: Kernel, rank: int = 1, *calls: dict[str, object]) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(rank, Calls(calls)))


def test_blocks_of_a_vector_are_stored_in_the_input_s_element_and_need_no_facts() -> None:
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", at, n))

    found = own(made("X:*bf16 dX:*f32 n", build, BLOCK=BLOCK))
    assert stores_of(found.kernel) == [Code.STORE]
    assert found.kernel.argument("dX").element == "*bf16"
    assert facts_of(found) == []


def windows(step: int, masked: bool = False) -> Kernel:
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        at = b.add(b.mul(b.program_id(0), b.const(step)), b.arange(0, BLOCK, "BLOCK"))
        add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", at, n) if masked else None)

    return made("X:*f32 dX:*f32 n", build, BLOCK=BLOCK)


@pytest.mark.parametrize("masked", [False, True])
def test_windows_that_overlap_stay_atomic(masked: bool) -> None:
    # A test for the mere occurrence of the program's number and the lane in the address would accept these.
    found = own(windows(BLOCK // 2, masked))
    assert stores_of(found.kernel) == [Code.ATOMIC_ADD]
    assert found.remarks == ("dX stays atomic: its addresses may overlap, or are read from memory",)


def test_windows_of_a_runtime_step_depend_on_that_step() -> None:
    def build(b: Builder, x: Value, dx: Value, step: Value) -> None:
        add_to(b, dx, b.add(b.mul(b.program_id(0), step), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))

    assert facts_of(own(made("X:*f32 dX:*f32 step", build))) == ["step >= BLOCK"]


def row_kernel(b: Builder, x: Value, dx: Value, stride: Value, n: Value) -> None:
    cols = b.arange(0, BLOCK, "BLOCK")
    add_to(b, dx, b.add(b.mul(b.program_id(0), stride), cols), b.const(1.0, "f32"), b.compare("lt", cols, n))


def test_rows_under_a_mask_need_a_stride_of_at_least_the_masked_width() -> None:
    assert facts_of(own(made("X:*f32 dX:*f32 stride N", row_kernel))) == ["stride >= N"]


def test_rows_that_overlap_in_a_call_that_was_seen_stay_atomic() -> None:
    # The fact alone would be printed, and raise at every call like the second one.
    kernel = made("X:*f32 dX:*f32 stride N", row_kernel)
    apart, overlapping = {"stride": 8, "N": 8}, {"stride": 4, "N": 8}
    assert facts_of(own(kernel, 1, apart)) == ["stride >= N"]
    found = own(kernel, 1, apart, overlapping)
    assert stores_of(found.kernel) == [Code.ATOMIC_ADD]
    assert facts_of(found) == []


def test_facts_that_a_call_cannot_be_asked_are_kept() -> None:
    # A plan may name what only the backward has; that is no reason to give up a store.
    assert facts_of(own(made("X:*f32 dX:*f32 stride N", row_kernel), 1, {"N": 8})) == ["stride >= N"]


def test_programs_of_an_axis_that_the_kernel_does_not_read_are_ruled_out_by_a_fact() -> None:
    assert "grid1 == 1" in facts_of(own(made("X:*f32 dX:*f32 stride N", row_kernel), rank=2))


def test_programs_that_add_to_the_same_row_stay_atomic_and_are_named() -> None:
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        cols = b.arange(0, BLOCK, "BLOCK")
        value = b.cast(b.program_id(0), "f32")
        add_to(b, dx, cols, value, b.compare("lt", cols, n))

    found = own(made("X:*f32 dX:*f32 N", build))
    assert stores_of(found.kernel) == [Code.ATOMIC_ADD]
    assert found.remarks == ("dX stays atomic: all programs along axis 0 add to the same elements",)


def test_a_loop_over_the_tiles_of_a_row_gives_the_row_its_masked_width() -> None:
    def build(b: Builder, x: Value, dx: Value, stride: Value, n: Value) -> None:
        row, lane = b.program_id(0), b.arange(0, BLOCK, "BLOCK")

        def body(off: Value, carries: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, lane)
            at = b.add(b.mul(row, stride), cols)
            add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [], body)

    assert facts_of(own(made("X:*f32 dX:*f32 stride N", build))) == ["stride >= N"]


def test_parts_of_rows_are_as_long_as_a_constexpr_that_must_not_be_negative() -> None:
    # Parts of a negative length would lie one on the other before their row, and the bound by N would say nothing.
    def build(b: Builder, x: Value, dx: Value, stride: Value, n: Value) -> None:
        part = b.const(4 * BLOCK, "i32", "PART")
        first = b.mul(b.program_id(1), part)
        end = b.elementwise(Code.MIN, (b.add(first, part), n))

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
            at = b.add(b.mul(b.program_id(0), stride), cols)
            add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", cols, end))
            return []

        b.loop((first, end, b.const(BLOCK, "i32", "BLOCK")), [], body)

    kernel = made("X:*f32 dX:*f32 stride N", build, BLOCK=BLOCK)
    # The last part is shorter.
    cut: dict[str, object] = {"PART": 32, "BLOCK": 8, "grid0": 3, "grid1": 2, "stride": 40, "N": 40, "triton": triton}
    found = own(kernel, 2, cut)
    assert stores_of(found.kernel) == [Code.STORE]
    assert facts_of(found) == ["PART >= 0", "stride >= N"]
    assert stores_of(own(kernel, 2, cut, {**cut, "PART": -1, "stride": -9, "N": -9}).kernel) == [Code.ATOMIC_ADD]


def test_whole_tiles_of_parts_of_rows_lie_apart_where_they_fill_their_part() -> None:
    # The mask knows the end of the row only: tiles of a part that they do not divide reach into the next one.
    def build(b: Builder, x: Value, dx: Value, stride: Value, n: Value) -> None:
        part = b.const(4 * BLOCK, "i32", "PART")
        first = b.mul(b.program_id(1), part)

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
            at = b.add(b.mul(b.program_id(0), stride), cols)
            add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        end = b.elementwise(Code.MIN, (b.add(first, part), n))
        b.loop((first, end, b.const(BLOCK, "i32", "BLOCK")), [], body)

    kernel = made("X:*f32 dX:*f32 stride N", build, BLOCK=BLOCK)
    divided: dict[str, object] = {
        "PART": 32,
        "BLOCK": 8,
        "grid0": 3,
        "grid1": 2,
        "stride": 40,
        "N": 40,
        "triton": triton,
    }
    found = own(kernel, 2, divided)
    assert stores_of(found.kernel) == [Code.STORE]
    assert "PART >= BLOCK * triton.cdiv(PART, BLOCK)" in " and ".join(facts_of(found))
    assert stores_of(own(kernel, 2, divided, {**divided, "PART": 12, "grid1": 4}).kernel) == [Code.ATOMIC_ADD]


def test_rows_that_programs_take_in_turn_are_one_index() -> None:
    def build(b: Builder, x: Value, dx: Value, stride: Value, rows: Value) -> None:
        def body(row: Value, carries: Sequence[Value]) -> Sequence[Value]:
            add_to(b, dx, b.add(b.mul(row, stride), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))
            return []

        b.loop((b.program_id(0), rows, b.num_programs(0)), [], body)

    assert facts_of(own(made("X:*f32 dX:*f32 stride rows", build))) == ["stride >= BLOCK"]


def test_trips_that_do_not_move_the_address_are_no_stores() -> None:
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")

        def body(trip: Value, carries: Sequence[Value]) -> Sequence[Value]:
            add_to(b, dx, at, b.cast(trip, "f32"))
            return []

        b.loop((b.const(0), n, b.const(1)), [], body)

    found = own(made("X:*f32 dX:*f32 n", build))
    assert stores_of(found.kernel) == [Code.ATOMIC_ADD]
    assert found.alone == {"dX"}


def tiles(b: Builder, x: Value, dx: Value, m: Value, n: Value, sm: Value, sn: Value) -> None:
    rows = block_of(b, b.program_id(0), BLOCK, "BM")
    cols = block_of(b, b.program_id(1), 16, "BN")
    mask = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
    add_to(b, dx, matrix(b, rows, sm, cols, sn), b.const(1.0, "f32"), mask)


def test_tiles_of_a_matrix_allow_either_order_of_its_strides() -> None:
    (fact,) = facts_of(own(made("X:*f32 dX:*f32 M N sm sn", tiles), rank=2))
    rights = [(64, 7, 7, 1), (64, 7, 1, 64), (64, 7, 9, 1)]
    wrongs = [(64, 7, 6, 1), (64, 7, 1, 63), (64, 7, 0, 1), (64, 7, 1, 1), (64, 7, 7, 0), (64, 7, -7, 1)]
    for m, n, sm, sn in rights:
        assert eval(fact, {"M": m, "N": n, "sm": sm, "sn": sn}), (m, n, sm, sn)
    for m, n, sm, sn in wrongs:
        assert not eval(fact, {"M": m, "N": n, "sm": sm, "sn": sn}), (m, n, sm, sn)


def test_a_batch_and_a_head_in_one_program_number_are_two_indices() -> None:
    def build(b: Builder, x: Value, dx: Value, h: Value, sb: Value, sh: Value) -> None:
        pid = b.program_id(0)
        batch, head = (b.elementwise(code, (pid, h)) for code in (Code.FLOORDIV, Code.REM))
        at = b.add(b.add(b.mul(batch, sb), b.mul(head, sh)), b.arange(0, BLOCK, "BLOCK"))
        add_to(b, dx, at, b.const(1.0, "f32"))

    (*_, fact) = facts_of(own(made("X:*f32 dX:*f32 H sb sh", build)))
    here = {"H": 3, "BLOCK": 8, "grid0": 12}
    import triton

    assert eval(fact, {**here, "triton": triton, "sb": 24, "sh": 8})
    assert eval(fact, {**here, "triton": triton, "sb": 8, "sh": 32})
    assert not eval(fact, {**here, "triton": triton, "sb": 16, "sh": 8})


def test_a_remainder_alone_does_not_tell_the_program() -> None:
    def build(b: Builder, x: Value, dx: Value, h: Value, sh: Value) -> None:
        head = b.elementwise(Code.REM, (b.program_id(0), h))
        add_to(b, dx, b.add(b.mul(head, sh), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))

    assert stores_of(own(made("X:*f32 dX:*f32 H sh", build)).kernel) == [Code.ATOMIC_ADD]


@pytest.mark.parametrize("used", [3, 4])
def test_lanes_that_turn_around_are_told_apart_where_no_more_are_used_than_they_turn_over(used: int) -> None:
    # Lanes 0 and 3 of (lane + 1) % 3 are the same element: with four used, a store would lose one of two gradients.
    def build(b: Builder, x: Value, dx: Value) -> None:
        lane = b.arange(0, 4)
        turned = b.elementwise(Code.REM, (b.add(lane, b.const(1)), b.const(3)))
        at = b.add(b.mul(b.program_id(0), b.const(3)), turned)
        add_to(b, dx, at, b.cast(lane, "f32"), b.compare("lt", lane, b.const(used)))

    found = own(made("X:*f32 dX:*f32", build))
    assert stores_of(found.kernel) == [Code.STORE if used == 3 else Code.ATOMIC_ADD]
    assert found.empty_if == ({"dX": "X.numel() == 3 * grid0"} if used == 3 else {})


def test_addresses_that_are_read_from_memory_stay_atomic() -> None:
    def build(b: Builder, x: Value, dx: Value, index: Value) -> None:
        row = b.load(index, b.program_id(0))
        add_to(b, dx, b.add(b.mul(row, b.const(BLOCK)), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))

    assert stores_of(own(made("X:*f32 dX:*f32 index:*i32", build)).kernel) == [Code.ATOMIC_ADD]


def test_lanes_that_a_store_would_broadcast_over_stay_atomic() -> None:
    def build(b: Builder, x: Value, dx: Value) -> None:
        at = b.expand(block_of(b, b.program_id(0), BLOCK, "BLOCK"), 0)
        value = b.cast(b.expand(b.arange(0, 4), 1), "f32")
        add_to(b, dx, b.whole(at, (4, BLOCK)), value)

    found = own(made("X:*f32 dX:*f32", build))
    assert found.remarks == ("dX stays atomic: all lanes of a tile add to the same elements",)


def halves(same: bool, masked: bool = True) -> Kernel:
    def build(b: Builder, x: Value, dx: Value, stride: Value, half: Value) -> None:
        cols = b.arange(0, BLOCK, "BLOCK")
        mask = b.compare("lt", cols, half) if masked else None
        at = b.add(b.mul(b.program_id(0), stride), cols)
        add_to(b, dx, at, b.const(1.0, "f32"), mask)
        add_to(b, dx, at if same else b.add(at, half), b.const(2.0, "f32"), mask)

    return made("X:*f32 dX:*f32 stride half", build)


def test_two_halves_of_a_row_are_disjoint() -> None:
    found = own(halves(same=False))
    assert stores_of(found.kernel) == [Code.STORE, Code.STORE]
    assert facts_of(found) == ["stride >= 2 * half"]


def test_two_halves_whose_lanes_go_beyond_the_half_need_it_to_be_as_wide() -> None:
    assert any("half >= BLOCK" in fact for fact in facts_of(own(halves(same=False, masked=False))))


def test_two_additions_to_one_address_become_one_of_the_sum() -> None:
    kernel = halves(same=True)
    assert stores_of(own(kernel).kernel) == [Code.ATOMIC_ADD] * 2
    found = own(merged(kernel))
    assert stores_of(found.kernel) == [Code.STORE]
    (store,) = (op for op in found.kernel.ops if op.code is Code.STORE)
    assert store.stored.producer is not None
    assert store.stored.producer.code is Code.ADD


def test_an_early_return_bounds_the_programs() -> None:
    def build(b: Builder, x: Value, dx: Value, rows: Value, stride: Value) -> None:
        from kernel_agent.compiler.ssa.value import Op

        pid = b.program_id(0)
        b.add_op(Op(Code.LEAVE_IF, (b.compare("ge", pid, rows),), ()))
        at = b.add(pid, b.mul(b.expand(b.arange(0, BLOCK, "BLOCK"), 1), stride))
        add_to(b, dx, at, b.const(1.0, "f32"))

    facts = facts_of(own(made("X:*f32 dX:*f32 rows stride", build)))
    assert any(fact in ("stride >= rows", "stride >= grid0") for fact in facts), facts
