"""Pairs that can be written are compared at sizes of real work, and nowhere else."""

from pathlib import Path

import pytest

from kernel_agent.compiler.comparison import REAL_BYTES, compared, cost, has_real_sizes
from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.derived import Draft
from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layernorm(sandbox: Sandbox) -> KernelSpec:
    return describe(read_file(ROOT / "datasets/kernel_pairs/norm_row/layernorm_row.py"), sandbox)


@pytest.fixture(scope="module")
def written(layernorm: KernelSpec, sandbox: Sandbox) -> list[Draft]:
    return drafts(layernorm, sandbox)[0]


def test_atomic_additions_of_a_whole_weight_cost_more_than_partial_sums(
    layernorm: KernelSpec, written: list[Draft], sandbox: Sandbox
):
    # 8,192 rows of 4,096: in `plain` every row adds to all of dW, in `rows` each program stores one row of sums.
    assert has_real_sizes(layernorm)
    order, costs = compared(layernorm, written, sandbox)
    assert [draft.schedules for draft in order] == [one.schedules for one in costs]
    rows, plain = costs[0], costs[-1]
    assert (rows.schedules, plain.schedules) == (("rows",), ("plain",))
    assert rows.atomics == 0 < plain.atomics
    assert rows.microseconds is not None
    assert plain.microseconds is not None
    assert rows.microseconds < plain.microseconds
    assert rows.bytes > REAL_BYTES
    assert plain.why.endswith("x")


def test_small_sizes_leave_the_order_as_it_is(layernorm: KernelSpec, written: list[Draft], sandbox: Sandbox):
    # One row of sums for each of a handful of rows is more traffic than atomic additions: true there, and irrelevant.
    facts = layernorm.facts.model_copy(update={"bench": (ShapeEntry(dims={"M": 8, "N": 64, "dtype": "float32"}),)})
    order, costs = compared(layernorm.model_copy(update={"facts": facts}), written, sandbox)
    assert [draft.schedule for draft in order] == [draft.schedule for draft in written]
    assert all(one.bytes < REAL_BYTES for one in costs)


def test_where_the_first_size_cannot_be_counted_a_smaller_one_is(
    layernorm: KernelSpec, written: list[Draft], sandbox: Sandbox
):
    # Attention over 16,384 keys takes minutes to count: a table of dashes said nothing about its schedules.
    too_large = ShapeEntry(dims={"M": 1 << 20, "N": 1 << 20, "dtype": "float32"})
    smaller = ShapeEntry(dims={"M": 4096, "N": 4096, "dtype": "float32"})
    facts = layernorm.facts.model_copy(update={"bench": (too_large, smaller)})
    _, costs = compared(layernorm.model_copy(update={"facts": facts}), written, sandbox)
    assert {one.label for one in costs} == {smaller.label}
    assert all(one.microseconds is not None for one in costs)


def test_a_backward_that_cannot_be_counted_has_a_reason(layernorm: KernelSpec, written: list[Draft], sandbox: Sandbox):
    missing = cost(layernorm, written[0], ShapeEntry(dims={"M": 8, "dtype": "float32"}), sandbox)
    assert missing.microseconds is None
    assert missing.why
