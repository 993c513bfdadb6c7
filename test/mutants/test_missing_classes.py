"""Classes of mutants that are made later join the record of a pair, which keeps what was judged before."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from kernel_agent.gate.mutants.records import MutationReport, Outcome

BENCH = Path(__file__).resolve().parents[2] / "bench" / "mutants.py"


def test_only_what_a_record_lacks_is_judged_and_the_rest_is_kept(judge) -> None:
    # Judging all classes of a pair again would take ten times as long, and a line without the old ones would lose them.
    spec = importlib.util.spec_from_file_location("bench_of_mutants", BENCH)
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    truths = judge.truths("squares")
    path, nothing = Path(truths.spec.facts.path), MutationReport(pair="squares", results=())
    every = [mutant.mutator.name for mutant in bench.lacking(path, nothing, 1)]
    first = bench.completed(truths, nothing, bench.lacking(path, nothing, 1)[:2], 600.0, time.time())
    later = bench.lacking(path, first, 1)
    assert [mutant.mutator.name for mutant in later] == every[2:]
    both = bench.completed(truths, first, later[:2], 600.0, time.time())
    assert sorted(result.mutator for result in both.results) == sorted(every[:4])
    assert both.results[:2] == first.results
    assert both.seconds > first.seconds
    assert not both.of(Outcome.SURVIVED)
