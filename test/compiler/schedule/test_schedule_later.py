"""Sums that meet what others store are kept, and added by a launch of their own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import agree, atomics, named_source, plans_of, run

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import atomics as left
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

ROWS, LENGTH, EACH, BLOCK = 3, 192, 64, 32
CHUNKS = 3
PIVOT, APART, SOME, BRANCH = range(4)
"""What a chunk's moments are about: the first element of its row, one of its own, the first for some chunks only."""


@triton.jit
def moments(X, Y, L, each, WHAT: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if WHAT == 0:
        pivot = tl.load(X + row * L)
    elif WHAT == 1:
        pivot = tl.load(X + row * L + chunk)
    elif WHAT == 2:
        pivot = tl.load(X + row * L, mask=chunk < 2, other=0.0)
    else:
        pivot = 0.0
        if chunk < 2:
            pivot = tl.load(X + row * L)
    last = tl.minimum((chunk + 1) * each, L)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(FROM * chunk * each, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        away = tl.where(at < last, tl.load(X + row * L + at, mask=at < last, other=0.0) - pivot, 0.0)
        total += away * away * away
    tl.store(Y + row * tl.num_programs(1) + chunk, tl.sum(total, 0))


@triton.jit
def scaled(X, W, Y, S, D, stride, BLOCK: tl.constexpr):
    sample, d = tl.program_id(1), tl.arange(0, BLOCK)
    at = (sample * S + tl.program_id(0)) * D + d
    w = tl.load(W + sample * stride + d, mask=d < D, other=0.0)
    x = tl.load(X + at, mask=d < D, other=0.0)
    tl.store(Y + at, x * w, mask=d < D)


def kernel(what: int = PIVOT, start: int = 1) -> Kernel:
    types = {"X": "*fp32", "Y": "*fp32", "L": "i32", "each": "i32"}
    return named_source(moments, types, WHAT=what, FROM=start, BLOCK=BLOCK)


def test_what_programs_add_to_a_stored_element_is_added_behind() -> None:
    # Had the sums gone to the row as they come, in one launch, a later store of the first tile would have lost them.
    made = plans_of(kernel(), "X", "Y", 2)
    assert atomics(made["owned"]) == []
    first, second = made["owned"].steps
    assert second.grid == ("grid0", "1")
    x = torch.randn(ROWS, LENGTH, dtype=torch.float64)
    given = {"X": x, "L": LENGTH, "each": EACH}
    agree(made, given, {"Y": torch.randn(ROWS, CHUNKS, dtype=torch.float64)}, (ROWS, CHUNKS), BLOCK=BLOCK)
    assert [op.base.name for op in first.kernel.ops if op.code is Code.STORE] == ["dX", "dX_sums"]


@pytest.mark.parametrize(
    ("what", "start"),
    [
        pytest.param(APART, 1, id="each program has an element of its own, that another's tile has"),
        pytest.param(SOME, 1, id="some of the programs add nothing"),
        pytest.param(BRANCH, 1, id="some of the programs do not get there"),
        pytest.param(PIVOT, 0, id="tiles have several programs"),
    ],
)
def test_sums_stay_atomic_where_what_is_left_or_they_have_several_owners(what: int, start: int) -> None:
    # One program for all sums of a row would add what the masked ones kept, or miss what meets.
    made = plans_of(kernel(what, start), "X", "Y", 2)
    assert all(left(plan) for plan in made.values())
    given = {"X": torch.randn(ROWS, LENGTH, dtype=torch.float64), "L": LENGTH, "each": EACH}
    agree(made, given, {"Y": torch.randn(ROWS, CHUNKS, dtype=torch.float64)}, (ROWS, CHUNKS), BLOCK=BLOCK)


def test_sums_of_a_slice_that_few_programs_take_turns_at_are_stored_behind() -> None:
    # Rows of a slice's elements would have its gaps; without rows, x was read once more for its weights alone. The
    # gaps of the gradient must stay as they were.
    samples, rows, width, stride = 2, 7, 6, 10
    types = {"X": "*fp32", "W": "*fp32", "Y": "*fp32", **dict.fromkeys(("S", "D", "stride"), "i32")}
    source = named_source(scaled, types, BLOCK=8)
    weights = torch.randn(samples, stride, dtype=torch.float64)[:, :width]
    x = torch.randn(samples, rows, width, dtype=torch.float64)
    given = {"X": x, "W": weights, "S": rows, "D": width, "stride": stride, "Y": x}
    calls = Calls(({**given, "grid0": rows, "grid1": samples, "BLOCK": 8},))
    adjoint = differentiate(source, read=frozenset("XW"), written=frozenset("Y"))
    found = {plan.schedule: plan for plan in plans(source, adjoint, 2, calls=calls)}
    assert left(found["rows"]) == 0
    assert [fact.expression for fact in found["rows"].facts if "contiguous" in fact.expression] == []
    whole = {**given, "W": torch.zeros(samples, stride, dtype=torch.float64)}
    whole["W"][:, :width] = weights
    cotangent = torch.randn(samples, rows, width, dtype=torch.float64)
    gradients, _ = run(found["rows"], whole, {"Y": cotangent}, (rows, samples), BLOCK=8)
    torch.testing.assert_close(gradients["X"], cotangent * weights[:, None])
    torch.testing.assert_close(gradients["W"][:, :width], (cotangent * x).sum(1))
    assert not gradients["W"][:, width:].any()
