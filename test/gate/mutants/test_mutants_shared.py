"""Mutants that several processes share: each is judged once, and by one of them."""

from __future__ import annotations

from collections import Counter

import pytest

from kernel_agent.gate.mutants import crowd
from kernel_agent.gate.mutants.crowd import FEWEST, MOST, processes
from kernel_agent.gate.mutants.judge import MutantJudge
from kernel_agent.gate.mutants.sources import source_mutants


def fates(judge, pair: str, most: int, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[object, ...]]:
    """What becomes of a few mutants of a pair's text and of one of each class made on IR, with so many processes."""
    monkeypatch.setattr(crowd, "MOST", most)
    found = MutantJudge(judge.truths(pair)).judged_all(source_mutants(judge.source(pair))[:6], 1)
    return Counter((one.mutator, one.line, one.outcome, one.status) for one in found)


def test_processes_judge_together_what_one_judges_alone(judge, monkeypatch: pytest.MonkeyPatch):
    # A share that was left out, or taken twice, is a count here: IR mutants are made by every process anew.
    alone = fates(judge, "skip_connection", 1, monkeypatch)
    assert alone.total() > 12
    assert fates(judge, "skip_connection", 2, monkeypatch) == alone


def test_few_mutants_start_one_process_and_many_no_more_than_there_are_processors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crowd.os, "sched_getaffinity", lambda _: set(range(3)))
    assert processes(0, -1) == processes(1, -1) == processes(2 * FEWEST - 1, -1) == 1
    assert processes(2 * FEWEST, -1) == 2
    assert processes(100, -1) == 3
    assert processes(0, 1) == 3, "nobody knows yet how many are made on IR"
    monkeypatch.setattr(crowd.os, "sched_getaffinity", lambda _: set(range(64)))
    assert processes(1000, -1) == MOST
