"""Attention's backward: a kernel for keys and values, one for queries, and little to do in their loops."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import schedule_forwards
import torch
from schedule_plans import Made, agree, atomics, from_source, plans_of, run

from kernel_agent.compiler.schedule.hold import operands_held
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk

D, BM, BN = 16, 32, 16
POINTERS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr"), "*fp32")
BOTH = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@functools.cache
def attention(causal: bool, last_first: bool = False) -> Made:
    types = {**POINTERS, "n": "i32", "m": "i32", "scale": "fp32"}
    kernel = from_source(schedule_forwards.attention, types, D=D, BM=BM, BN=BN, CAUSAL=causal, LAST_FIRST=last_first)
    return plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2, spare=True)


def inputs(causal: bool, n: int, m: int) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
    """What a launch is given, the cotangent of its output, and the gradients."""
    torch.manual_seed(0)
    names = ("q_ptr", "k_ptr", "v_ptr")
    q, k, v = leaves = [torch.randn(2, rows, D, dtype=torch.float64, requires_grad=True) for rows in (n, m, m)]
    scores = 0.25 * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), float("-inf"))
    o, do = scores.softmax(-1) @ v, torch.randn(2, n, D, dtype=torch.float64)
    gradients = torch.autograd.grad(o, leaves, do)
    given = dict(zip(names, (leaf.detach() for leaf in leaves), strict=True))
    given |= {"o_ptr": o.detach(), "lse_ptr": scores.logsumexp(-1).detach(), "n": n, "m": m, "scale": 0.25}
    return given, do, dict(zip(names, gradients, strict=True))


@BOTH
@pytest.mark.parametrize(("n", "m"), [(64, 64), (40, 72), (33, 33)])
def test_keys_and_values_have_a_kernel_that_adds_to_nothing(causal: bool, n: int, m: int) -> None:
    # Neither extent is a multiple of a tile, so that every mask that was left out would show.
    plan = attention(causal)["split"]
    assert atomics(plan) == []
    given, do, expected = inputs(causal, n, m)
    found, counts = run(plan, given, {"o_ptr": do}, (-(-n // BM), 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    assert all(counts[-1].owned(name) for name in ("dk", "dv"))


def loops_of(kernel: Kernel) -> list[list[Op]]:
    """The operations of each loop of a kernel."""
    return [list(walk(op.blocks[0])) for op in kernel.ops if op.code is Code.FOR]


def choices(kernel: Kernel) -> list[int]:
    """Of each loop."""
    return [sum(op.code is Code.SELECT for op in ops) for ops in loops_of(kernel)]


def is_loaded(value: Value) -> bool:
    """Whether a tile comes from memory, in one of two ways perhaps."""
    op = value.producer
    if op is not None and op.code is Code.IF:
        return all(is_loaded(block.yields[op.results.index(value)]) for block in op.blocks)
    return op is not None and op.code in (Code.LOAD, Code.LOAD_BLOCK)


@BOTH
def test_no_computed_tile_is_turned(causal: bool) -> None:
    for step in attention(causal)["split"].steps:
        turned = [op.operands[0] for op in step.kernel.ops if op.code is Code.TRANS]
        assert turned
        assert all(map(is_loaded, turned)), step.kernel.name


@BOTH
def test_scores_are_computed_as_the_products_behind_them_want_them(causal: bool) -> None:
    # Rows of keys where keys own the sum: tiles of the scores are left operands as they are.
    keys = attention(causal)["split"].steps[-1].kernel
    for ops in loops_of(keys):
        shapes = [op.result.shape for op in ops if op.code is Code.DOT]
        assert sorted(shapes) == sorted([(BN, BM), (BN, BM), (BN, D), (BN, D)])


@BOTH
def test_only_trips_on_the_diagonal_choose(causal: bool) -> None:
    # Keys beyond the last one are rows of their own, and rows beyond the last have infinity for their sum.
    queries, keys = (step.kernel for step in attention(causal)["split"].steps)
    assert choices(keys) == ([1, 0] if causal else [0])
    assert choices(queries) == [0, 1]


@BOTH
@pytest.mark.parametrize(("n", "m"), [(96, 128), (16, 80), (1, 1)])
def test_trips_that_choose_and_those_that_do_not_meet(causal: bool, n: int, m: int) -> None:
    # Diagonals within a tile, at its edge and before the first key.
    given, do, expected = inputs(causal, n, m)
    found, _ = run(attention(causal)["split"], given, {"o_ptr": do}, (-(-n // BM), 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)


@BOTH
def test_sums_of_rows_are_computed_once(causal: bool) -> None:
    # By the kernel of the queries, which stores them: an owner of keys would sum each row for every block of keys.
    plan = attention(causal)["split"]
    queries, keys = (step.kernel for step in plan.steps)
    assert [sum(op.code is Code.SUM for op in kernel.ops) for kernel in (queries, keys)] == [1, 0]
    assert "o_ptr" not in {value.name for value in keys.arguments}


@BOTH
def test_products_of_queries_begin_with_what_would_be_subtracted_and_those_of_keys_do_not(causal: bool) -> None:
    # Delta is one number for each row of queries. An owner of keys has one for nearly every element of a tile, and
    # would copy them in every trip: on a GPU, its kernel took a fifth longer.
    def differences(kernel: Kernel) -> list[int]:
        taken = [[op.operands[0].producer for op in ops if op.code is Code.SUB] for ops in loops_of(kernel)]
        return [sum(made is not None and made.code is Code.DOT for made in some) for some in taken]

    queries, keys = (step.kernel for step in attention(causal)["split"].steps)
    assert differences(queries) == [0, 0]
    assert differences(keys) == ([1, 1] if causal else [1])


@BOTH
def test_left_operands_of_queries_stay_in_registers_and_those_of_keys_do_not(causal: bool) -> None:
    # Two sums leave no room: with its operands held, the kernel of keys and values took longer on a GPU.
    types = {**dict.fromkeys(POINTERS, "*fp16"), "lse_ptr": "*fp32", "n": "i32", "m": "i32", "scale": "fp32"}
    kernel = from_source(schedule_forwards.attention, types, D=D, BM=BM, BN=BN, CAUSAL=causal, LAST_FIRST=False)
    plan = plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2, spare=True)["split"]
    queries, keys = (step.kernel for step in plan.steps)
    # Of short rows only the first product's operand is, and none of rows that fill the registers.
    assert [[operands_held(one, width) for width in (64, 128, 256)] for one in (queries, keys)] == [
        [1, 2, 0],
        [0, 0, 0],
    ]
    for ops in loops_of(queries):
        lefts = [op.operands[0] for op in ops if op.code is Code.DOT]
        assert sum(left.producer is not None and left.producer.code is Code.IF for left in lefts) == 2
    given, do, expected = inputs(causal, 40, 72)
    found, _ = run(plan, given, {"o_ptr": do}, (2, 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=1e-2)


@BOTH
def test_every_plan_of_attention_agrees(causal: bool) -> None:
    given, do, _ = inputs(causal, 40, 40)
    found = {name: plan for name, plan in attention(causal).items() if name != "owned"}
    agree(found, given, {"o_ptr": do}, (2, 2))


@BOTH
def test_rows_that_are_numbered_from_the_last_one_are_no_obstacle(causal: bool) -> None:
    # The kernel of the queries keeps their order: the longest rows of a causal mask start first.
    plan = attention(causal, last_first=True)["split"]
    assert atomics(plan) == []
    queries = plan.steps[0].kernel
    assert any(op.code is Code.NUM_PROGRAMS for op in queries.ops)
    given, do, expected = inputs(causal, 40, 72)
    found, _ = run(plan, given, {"o_ptr": do}, (2, 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [64, 40, 8])
def test_whole_tiles_and_the_rest_have_one_owner_of_their_keys(n: int) -> None:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*fp32")
    kernel = from_source(schedule_forwards.whole_tiles_and_rest, {**pointers, "n": "i32"}, D=D, BM=BM, BN=BN)
    found = plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 1)
    assert atomics(found["split"]) == []
    torch.manual_seed(0)
    given: dict[str, Any] = {name: torch.randn(n, D, dtype=torch.float64) for name in ("q_ptr", "k_ptr", "v_ptr")}
    agree(found, {**given, "n": n}, {"o_ptr": torch.randn(n, D, dtype=torch.float64)}, (-(-n // BM),), BN=BN, BM=BM)
