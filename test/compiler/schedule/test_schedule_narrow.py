"""What only a store reads is loaded where that store takes part, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from schedule_kernels import made

from kernel_agent.compiler.schedule.narrow import narrowed
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

BLOCK = 8
Use = Callable[[Builder, Value, Value, Value], None]


def copied(use: Use) -> Kernel:
    """Loads `long` elements of a cotangent; `use` gets them, their places, and which of these are less than `short`."""

    def build(b: Builder, dy: Value, dx: Value, long: Value, short: Value) -> None:
        at = b.arange(0, BLOCK)
        there, kept = b.compare("lt", at, long), b.compare("lt", at, short)
        use(b, b.load(dy, at, there, b.const(0.0, "f32")), at, b.logical_and(there, kept))

    return made("dY:*f32 dX:*f32 long short", build)


def mask_of(kernel: Kernel, code: Code) -> Value | None:
    (op,) = [op for op in kernel.ops if op.code is code]
    found: Op = op
    return found.mask


def store_to(kernel_value: Callable[[Builder, Value], Value]) -> Use:
    def use(b: Builder, value: Value, at: Value, kept: Value) -> None:
        (dx,) = [one for one in b.kernel.arguments if one.name == "dX"]
        b.store(dx, at, kernel_value(b, value), kept)

    return use


def test_a_cotangent_that_is_stored_as_it_is_is_loaded_where_it_is_stored() -> None:
    found = narrowed(copied(store_to(lambda b, value: value)))
    assert mask_of(found, Code.LOAD) is mask_of(found, Code.STORE)


def test_so_is_one_that_each_lane_changes_by_itself() -> None:
    found = narrowed(copied(store_to(lambda b, value: b.mul(value, b.const(2.0, "f32")))))
    assert mask_of(found, Code.LOAD) is mask_of(found, Code.STORE)


def test_lanes_that_a_sum_counts_are_loaded() -> None:
    # Each stored lane has the sum of all: zeros for those that are not stored would be missing from it.
    kernel = copied(store_to(lambda b, value: b.whole(b.sum(value, 0), (BLOCK,))))
    assert narrowed(kernel) is kernel


def test_a_value_with_another_reader_is_loaded_as_it_was() -> None:
    def use(b: Builder, value: Value, at: Value, kept: Value) -> None:
        store_to(lambda b, value: value)(b, value, at, kept)
        (dx,) = [one for one in b.kernel.arguments if one.name == "dX"]
        b.store(dx, b.add(at, b.const(BLOCK)), value, None)

    kernel = copied(use)
    assert narrowed(kernel) is kernel


def test_a_store_of_fewer_conditions_asks_nothing_of_its_load() -> None:
    def use(b: Builder, value: Value, at: Value, kept: Value) -> None:
        (dx,) = [one for one in b.kernel.arguments if one.name == "dX"]
        b.store(dx, at, value, None)

    kernel = copied(use)
    assert narrowed(kernel) is kernel


def chosen(threshold: Callable[[Builder, Value], Value], *, padding: float = 0.0, beside: bool = False) -> Kernel:
    """Loads a cotangent and sums it where x is above a threshold; `beside`, another sum has it all."""

    def build(b: Builder, x: Value, dy: Value, dx: Value, n: Value) -> None:
        at = b.arange(0, BLOCK)
        there = b.compare("lt", at, n)
        logits = b.load(x, at, there, b.const(0.0, "f32"))
        above = b.compare("gt", logits, threshold(b, logits))
        value = b.load(dy, at, there, b.const(padding, "f32"))
        total = b.sum(b.select(above, value, b.zero(value)), 0)
        b.store(dx, b.const(0), b.add(total, b.sum(value, 0)) if beside else total, None)

    return made("X:*f32 dY:*f32 dX:*f32 n", build)


def searched(b: Builder, x: Value) -> Value:
    """A threshold that a loop halves its way to."""
    trips = (b.const(0), b.const(4), b.const(1))
    (found,) = b.loop(
        trips, [b.const(0.0, "f32")], lambda _, inner: [b.mul(b.add(inner[0], b.sum(x, 0)), b.const(0.5, "f32"))]
    )
    return found


def cotangent_mask(kernel: Kernel) -> Value | None:
    (op,) = [op for op in kernel.ops if op.code is Code.LOAD and op.base.name == "dY"]
    found: Op = op
    return found.mask


def test_what_is_used_above_a_threshold_that_a_loop_found_is_loaded_there() -> None:
    # Few lanes are: of a sparse softmax most of the cotangent is never looked at.
    before = chosen(searched)
    found = narrowed(before)
    mask = cotangent_mask(found)
    assert mask is not None
    assert mask.producer is not None
    assert mask.producer.code is Code.AND
    assert not any(op.code is Code.SELECT for op in found.ops)
    assert any(op.code is Code.SELECT for op in before.ops)


def test_what_is_used_above_a_number_is_loaded_as_it_was() -> None:
    # Half of the lanes of a relu are above zero: a mask for each lane would cost more than it spares.
    kernel = chosen(lambda b, x: b.zero(x))
    assert narrowed(kernel) is kernel


def test_what_another_sum_has_whole_is_loaded_whole() -> None:
    kernel = chosen(searched, beside=True)
    assert narrowed(kernel) is kernel


def test_a_load_of_other_padding_than_zero_keeps_its_mask() -> None:
    # Lanes behind the last one that are above the threshold have the padding in the sum.
    kernel = chosen(searched, padding=1.0)
    assert narrowed(kernel) is kernel
