"""A record of the full suite that speaks of each pair's very text, and some backwards at their smallest shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair_turns import FULL_WEEKS, PAIRS, QUICK, QUICK_WEEKS, has_turn

from kernel_agent.collection.proof import RULES, judge
from kernel_agent.collection.verdicts import Standing, VerdictBook
from kernel_agent.sandbox import Sandbox

every_pair = pytest.mark.parametrize("path", PAIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")


@every_pair
def test_recorded_verdict_is_green_and_speaks_of_this_text(path: Path):
    # The full suite runs here only for pairs without a record: a record of another text would hide a red pair.
    book = VerdictBook.beside(path)
    assert book is not None
    standing, verdict = book.standing(path, RULES)
    command = f"kernel-agent dataset check datasets/kernel_pairs/{path.parent.name}/{path.name}"
    assert standing is not Standing.STALE, f"{standing.value}; run and commit: {command}"
    if verdict is not None:
        assert verdict.green, f"{verdict.status.value} {verdict.message} {'; '.join(verdict.problems)}"


@pytest.mark.parametrize("path", QUICK, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_backward_is_exact_and_clean_at_the_smallest_shape(path: Path, pair_sandbox: Sandbox):
    # A random and a strided cotangent: sums over the wrong axis and ignored strides show in every pair, every time.
    verdict = judge(path, pair_sandbox, quick=True)
    assert verdict.green, f"{verdict.status.value}: {verdict.message}"
    assert verdict.right == 2


@pytest.mark.parametrize("weeks", [QUICK_WEEKS, FULL_WEEKS])
def test_every_pair_has_its_turn_once_in_so_many_weeks(weeks: int):
    # A pair that never came up would be judged by nobody after its record, whatever changes in the gate.
    turns = [sum(has_turn(path, weeks, week) for week in range(7, 7 + weeks)) for path in PAIRS]
    assert turns == [1] * len(PAIRS)
