"""Mutants before the exact tier: cheap cases first, and for what stays green the question whether it is a mistake.

A mutant that is green on the whole suite is run on a wider one, of other seeds and more odd sizes, beside the honest
backward. Only where all gradients of both agree is it called equivalent: a mistake that the suite happens not to reach
is a survivor, and a hole in the suite.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.gate import batch
from kernel_agent.gate.batch import Question, ask, run_batch
from kernel_agent.gate.candidate import read_candidate
from kernel_agent.gate.cases import make_plan
from kernel_agent.gate.check import check
from kernel_agent.gate.mutants.gradients import gradient_mutants
from kernel_agent.gate.mutants.records import MutantResult, MutationReport, Outcome
from kernel_agent.gate.mutants.same import difference
from kernel_agent.gate.mutants.sources import Mutant, sample, source_mutants
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.verdict import Status
from kernel_agent.oracle import Truths

OnMutant = Callable[[MutantResult, int, int], None]
"""Called after each mutant with its result, how many are done, and how many there are."""

_NOTHING_COMPUTED = frozenset(
    {
        *(Status.NO_CODE, Status.BAD_FORMAT, Status.COMPILE_ERROR, Status.UNSUPPORTED_OP, Status.NO_TRITON_LAUNCH),
        *(Status.TORCH_FALLBACK, Status.UNEXPLAINED),
    }
)
"""What a mutant is refused for whether or not it is right: that proves nothing of the cases."""
_WALL_SECONDS = 60.0


@dataclass(frozen=True)
class _Red:
    status: Status
    case: str
    message: str


class MutantJudge:
    """Judges the mutants of one pair whose honest backward is green. Truths are computed once for all of them."""

    def __init__(self, truths: Truths, options: GateOptions = STANDARD, *, honest: str | None = None) -> None:
        """`honest`: the pair file whose mutants are judged; None where `truths` are of a pair file, and it is meant."""
        self.truths = truths
        self.spec = truths.spec
        self.honest = truths.spec.facts.source if honest is None else honest
        self.options = replace(options, limits=replace(options.limits, wall_s=_WALL_SECONDS))
        self._answers: dict[str, list[batch.Outcome]] = {}
        """The honest backward's, by the first case and how many there are."""

    @cached_property
    def suite(self) -> list[list[Question]]:
        """The cases of the gate: the first one alone, the others of its shape, all others."""
        first, *others = self._questions(self.options)
        rest = [question for questions in others for question in questions]
        return [part for part in (first[:1], first[1:], rest) if part]

    @cached_property
    def wider(self) -> list[Question]:
        """Cases that no verdict is made with: other seeds and, where there are any, further odd sizes."""
        seeds = tuple(seed + 100 for seed in self.options.seeds)
        options = replace(self.options, seeds=seeds, odd_sizes=3 * self.options.odd_sizes)
        return [question for questions in self._questions(options) for question in questions]

    def judged(self, mutant: Mutant) -> MutantResult:
        """What becomes of one mutant."""
        start = time.perf_counter()
        outcome, red, differs = self._outcome(mutant)
        survived = outcome is Outcome.SURVIVED
        return MutantResult(
            mutator=mutant.mutator.name,
            mutant=mutant.words,
            line=mutant.line,
            outcome=outcome,
            status=red.status if red else Status.GREEN,
            case=red.case if red else differs,
            message=red.message if red else "",
            diff=_diff(self.honest, mutant.source) if survived else "",
            seconds=time.perf_counter() - start,
        )

    def _outcome(self, mutant: Mutant) -> tuple[Outcome, _Red | None, str | None]:
        rounds = mutant.mutator.rounds
        for number, questions in enumerate(self.suite[: 2 if rounds else None]):
            run = self._run(mutant.source, questions)
            if isinstance(run, _Red):
                invalid = run.status in _NOTHING_COMPUTED or (number == 0 and run.status is Status.CRASHED)
                return (Outcome.INVALID if invalid else Outcome.KILLED), run, None
            differs = self._difference(run, questions)
            if differs is not None:
                return self._last_word(mutant, differs)
        if rounds:
            return Outcome.ROUNDING, None, None
        run = self._run(mutant.source, self.wider)
        if isinstance(run, _Red):
            return Outcome.SURVIVED, None, f"{run.case}, which the suite does not hold"
        differs = self._difference(run, self.wider)
        if differs is not None:
            return self._last_word(mutant, f"{differs}, which the suite does not hold")
        return Outcome.EQUIVALENT, None, None

    def _last_word(self, mutant: Mutant, differs: str) -> tuple[Outcome, _Red | None, str | None]:
        """The whole gate on a mutant that gives other gradients than the honest backward and is green so far."""
        verdict = check(self.spec, mutant.source, self.truths.sandbox, self.options, truths=self.truths, diagnose=False)
        if verdict.green:
            return Outcome.SURVIVED, None, differs
        return Outcome.KILLED, _Red(verdict.status, verdict.case or "", verdict.message), None

    def _questions(self, options: GateOptions) -> list[list[Question]]:
        text = read_candidate(self.spec, self.honest)
        plan = make_plan(self.truths, options, accepts_needs=text.accepts_needs)
        return [questions for questions in ask(self.truths, plan.shapes).questions if questions]

    def _run(self, source: str, questions: list[Question]) -> list[batch.Outcome] | _Red:
        """The answers to all questions, or the first that is red."""
        try:
            text = read_candidate(self.spec, source)
        except InputError as error:
            return _Red(Status.BAD_FORMAT, "", error.message)
        if text.problem is not None:
            return _Red(text.problem.status, "", text.problem.message)
        run = run_batch(questions, self.spec, self.truths.sandbox, text, self.options)
        for outcome in run.outcomes:
            if outcome.problem is not None:
                return _Red(outcome.problem.status, outcome.case.name, outcome.problem.message)
        return list(run.outcomes)

    def _difference(self, run: Sequence[batch.Outcome], questions: list[Question]) -> str | None:
        """The first case in which a green mutant's gradients are not the honest ones."""
        for mutant, honest in zip(run, self._honest(questions), strict=True):
            name = difference(mutant, honest)
            if name is not None:
                return f"{honest.case.name}, gradient of {name}"
        return None

    def _honest(self, questions: list[Question]) -> list[batch.Outcome]:
        key = questions[0].case.name + str(len(questions))
        if key not in self._answers:
            run = self._run(self.honest, questions)
            if isinstance(run, _Red):
                remedy = "Only the backward of a pair that `kernel-agent check` accepts has mutants."
                raise InputError(f"the honest backward is red at {run.case}: {run.message}", remedy=remedy)
            self._answers[key] = run
        return self._answers[key]


def mutation_report(
    truths: Truths, *, count: int = 0, options: GateOptions = STANDARD, on_mutant: OnMutant | None = None
) -> MutationReport:
    """Judge the mutants of a pair that is green: at most `count` of each class made on source, all for 0.

    Raises `InputError` where the honest backward is red.
    """
    start = time.perf_counter()
    judge = MutantJudge(truths, options)
    mutants = sample(source_mutants(judge.honest), count)
    results = list(gradient_mutants([question for part in judge.suite for question in part]))
    planned = len(results) + len(mutants)
    for done, mutant in enumerate(mutants, len(results) + 1):
        results.append(judge.judged(mutant))
        if on_mutant is not None:
            on_mutant(results[-1], done, planned)
    return MutationReport(
        pair=Path(truths.spec.facts.path).stem, results=tuple(results), seconds=time.perf_counter() - start
    )


def _diff(honest: str, mutant: str) -> str:
    rows = difflib.unified_diff(honest.splitlines(), mutant.splitlines(), "honest", "mutant", lineterm="", n=1)
    return "\n".join(rows)
