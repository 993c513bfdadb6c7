"""Mutants within a run: those of gradients as soon as there is a truth, those of a proven backward for some seconds.

`check --mutants` judges them all. A run takes one of each class after the other until its time is over, and says how
many it did not come to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from kernel_agent.gate.cases import make_plan
from kernel_agent.gate.mutants.gradients import gradient_mutants
from kernel_agent.gate.mutants.judge import MutantJudge, OnMutant
from kernel_agent.gate.mutants.records import MutantResult, MutationReport
from kernel_agent.gate.mutants.sources import Mutant, source_mutants
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.questions import ask
from kernel_agent.oracle import Truths

_FEW = 3
"""Cases that settle most mutants: a random cotangent and a strided one, and another seed."""


def gradient_report(truths: Truths, options: GateOptions = STANDARD) -> MutationReport:
    """Hold wrong gradients to the rule, made of the truth of every case: no backward is needed and no process started.

    Truths that are not known yet are computed; `check` then finds them known. Raises as `check` does.
    """
    start = time.perf_counter()
    plan = make_plan(truths, options, accepts_needs=False)
    questions = [question for shape in ask(truths, plan.shapes).questions for question in shape]
    return _report(truths, list(gradient_mutants(questions)) if questions else [], 0, start)


def backward_report(
    truths: Truths,
    pair_source: str,
    seconds: float,
    options: GateOptions = STANDARD,
    on_mutant: OnMutant | None = None,
) -> MutationReport:
    """Judge mutants of the backward of a pair file that is green, for as long as `seconds` allow.

    Those made on source come first, before a few cases, then what these leave open and one of each class made on IR
    before all of them. Raises `InputError` where the honest backward is red.
    """
    start = time.perf_counter()
    judge = MutantJudge(truths, options, pair_source)
    judge.deadline = time.monotonic() + seconds
    mutants = one_of_each(source_mutants(pair_source))
    results: list[MutantResult] = []

    def on_result(result: MutantResult, planned: int = 0) -> None:
        results.append(result)
        if on_mutant is not None:
            on_mutant(result, len(results), max(planned, len(mutants)))

    left = judge.killed_early(mutants, _FEW, on_result)
    unreached = len(mutants) - len(results) - len(left)
    judge.judged_all(left, 1, on_result)
    return _report(truths, results, unreached + judge.unjudged, start)


def one_of_each(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The first mutant of every class, then the second ones, and so on; in each row those last that only round."""
    ordered = sorted(mutants, key=lambda mutant: mutant.mutator.rounds)
    names = dict.fromkeys(mutant.mutator.name for mutant in ordered)
    classes = [[mutant for mutant in ordered if mutant.mutator.name == name] for name in names]
    return [mutant for row in zip_longest(*classes) for mutant in row if mutant is not None]


def _report(truths: Truths, results: Sequence[MutantResult], unjudged: int, start: float) -> MutationReport:
    seconds = time.perf_counter() - start
    pair = Path(truths.spec.facts.path).stem
    return MutationReport(pair=pair, results=tuple(results), unjudged=unjudged, seconds=seconds)
