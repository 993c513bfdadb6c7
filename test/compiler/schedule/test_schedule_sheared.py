"""Gradients of what a walk over diagonals reads: cells are told apart, and counted, by their columns."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import Made, agree, atomics, from_source, plans_of

from kernel_agent.compiler.plan import BackwardPlan

PROGRAMS, BLOCK = 2, 8


@triton.jit
def _diagonals(X, Y, N, M, BLOCK: tl.constexpr, KIND: tl.constexpr):
    matrix = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    steps = N + M - 2 if KIND == "short" else N + M - 1
    for step in range(steps):
        j = step - i
        if KIND == "steep":
            j = step - 2 * i
        if KIND == "from the end":
            j = M - 1 - step + i
        inside = (i < N) & (j < M)
        if KIND != "open":
            inside &= j >= 0
        if KIND == "holes":
            inside &= (j + i) % 3 != 1
        width = M - 1 if KIND == "narrow" else M
        x = tl.load(X + (matrix * N + i) * width + j, mask=inside, other=0.0)
        total += x * x
    tl.store(Y + matrix * BLOCK + i, total)


def _plans(kind: str) -> Made:
    kernel = from_source(_diagonals, {"X": "*fp32", "Y": "*fp32", "N": "i32", "M": "i32"}, BLOCK=BLOCK, KIND=kind)
    return plans_of(kernel, "X", "Y", 1)


def _starts_empty(plan: BackwardPlan, n: int, m: int) -> bool:
    (buffer,) = plan.buffers
    return bool(buffer.empty_if) and eval(
        buffer.empty_if, {"X": torch.zeros(PROGRAMS, n, m), "N": n, "M": m, "grid0": 2}
    )


@pytest.mark.parametrize("kind", ["", "short", "steep", "from the end", "holes"])
@pytest.mark.parametrize(("n", "m"), [(5, 3), (2, 7), (1, 4), (8, 1)])
def test_each_cell_of_a_diagonal_is_stored_once(kind: str, n: int, m: int) -> None:
    # A cell that two steps store to would lose the first of them; one that none reaches, where a walk ends early or
    # leaves some out, would be NaN if memory started empty.
    made = _plans(kind)
    assert atomics(made["owned"]) == []
    given = {"X": torch.randn(PROGRAMS, n, m, dtype=torch.float64), "N": n, "M": m}
    agree(made, given, {"Y": torch.randn(PROGRAMS, BLOCK, dtype=torch.float64)}, (PROGRAMS,))


def test_a_walk_over_all_diagonals_needs_no_zeros_and_one_that_ends_early_does() -> None:
    for kind in ("", "from the end"):
        assert _starts_empty(_plans(kind)["owned"], 5, 3)
    for kind in ("short", "steep", "holes"):
        assert not _starts_empty(_plans(kind)["owned"], 5, 3)


def test_cells_in_front_of_the_first_column_are_added_to_atomically() -> None:
    # They are cells of the row before.
    assert "owned" not in _plans("open")


def test_cells_behind_the_last_column_are_stored_only_where_none_meet() -> None:
    # In a narrower table they are cells of the next row: what is asked of a call must not hold of this one.
    facts = _plans("narrow")["owned"].facts
    assert not all(eval(fact.expression, {"N": 5, "M": 3}) for fact in facts)
