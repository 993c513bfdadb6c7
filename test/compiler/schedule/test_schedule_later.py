"""Sums that meet what others store are kept, and added by a launch of their own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import agree, atomics, named_source, plans_of

from kernel_agent.compiler.schedule.schedules import atomics as left
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
