"""Mutants before the gate: cheap cases first, and for what stays green the question whether it is a mistake.

All mutants of a pair run in one process beside the honest backward, each until its answer is another one; that answer
is judged by the rule. A mutant that gives the honest answers on the whole suite is run on a wider one, of other seeds,
more odd sizes and sizes with several tiles along every axis. Only where all gradients agree there too is it called
equivalent: a mistake that the suite happens not to reach is a survivor, and a hole in the suite.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from kernel_agent.gate.candidate import CandidateText, read_candidate
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.mutants.crowd import Asked, Heard, Run, Way, judge_answer, run_crowds
from kernel_agent.gate.mutants.gradients import gradient_mutants
from kernel_agent.gate.mutants.records import Kind, MutantResult, MutationReport, Outcome
from kernel_agent.gate.mutants.same import same, scale_of
from kernel_agent.gate.mutants.sources import Mutant, sample, source_mutants
from kernel_agent.gate.mutants.suite import Suites, scales
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.questions import Question
from kernel_agent.gate.verdict import Status
from kernel_agent.ir.mutations import Mutation
from kernel_agent.oracle import TruthError, Truths

OnMutant = Callable[[MutantResult, int, int], None]
"""Called after each mutant with its result, how many are done, and how many there are."""

_NOTHING_COMPUTED = frozenset(
    {
        *(Status.NO_CODE, Status.BAD_FORMAT, Status.COMPILE_ERROR, Status.UNSUPPORTED_OP, Status.NO_TRITON_LAUNCH),
        *(Status.TORCH_FALLBACK, Status.UNEXPLAINED),
    }
)
"""What a mutant is refused for whether or not it is right: that proves nothing of the cases."""
_FINE = 2.0**-19
"""Sixteen ulps of float32: what a formula of a dozen operations loses, and a fifth of what the exact rule allows."""
_WALL_SECONDS = 1800.0
"""Of one process that runs all mutants of a pair; each mutant has a limit of its own."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant, before it is written down."""

    outcome: Outcome
    problem: Problem | None = None
    case: str | None = None
    """The red case, or where a survivor differs."""
    reason: str = ""
    is_fine: bool = False
    """Of a survivor: what it changes is everywhere as small as what a formula loses in float32."""
    cases: int = 0
    """In which it was compared in faithful arithmetic."""


@dataclass(frozen=True)
class Rounded:
    """What a `RoundingTier` has seen beside the fates that it told."""

    made: int = 0
    """Mutants that it made on IR."""
    notes: tuple[str, ...] = ()


class RoundingTier(Protocol):
    """Judges mutants that only round otherwise; see `kernel_agent.bench.faithful`."""

    def judge(
        self,
        asked: Sequence[Asked],
        count: int,
        deadline: float,
        on_fate: Callable[[Asked, Fate], None],
    ) -> Rounded:
        """Tell the fate of each that is given, and of `count` per class that it makes on IR (-1: none)."""


class MutantJudge:
    """Judges the mutants of one pair whose honest backward is green. Truths are computed once for all of them."""

    def __init__(
        self,
        truths: Truths,
        options: GateOptions = STANDARD,
        honest: str | None = None,
        rounding: RoundingTier | None = None,
    ) -> None:
        """`honest`: the pair file whose mutants are judged; None where `truths` are of a pair file, and it is meant."""
        self.truths = truths
        self.spec = truths.spec
        self.honest = truths.spec.facts.source if honest is None else honest
        self.options = options
        self.suites = Suites(truths, options, self.honest)
        self.rounding = rounding
        self.deadline = float("inf")
        self.notes: tuple[str, ...] = ()
        self.unjudged = 0

    @cached_property
    def text(self) -> CandidateText:
        """The honest file as the gate reads it."""
        return read_candidate(self.spec, self.honest)

    def judged(self, mutant: Mutant | Mutation) -> MutantResult:
        """What becomes of one mutant."""
        (result,) = self.judged_all([mutant])
        return result

    def judged_all(
        self,
        mutants: Sequence[Mutant | Mutation],
        count: int = -1,
        on_result: Callable[[MutantResult, int], None] = lambda _result, _planned: None,
    ) -> list[MutantResult]:
        """What becomes of mutants and of `count` of each class made on IR (0: all, -1: none), in any order.

        `on_result` is told of each, with how many there are as far as is known.
        """
        found: list[MutantResult] = []
        planned = len(mutants)

        def told(one: Asked, fate: Fate) -> None:
            found.append(self._result(one, fate))
            on_result(found[-1], max(planned, len(found)))

        green: list[Asked] = []
        other: list[Asked] = []

        def seen(one: Asked, run: Run) -> None:
            nonlocal planned
            planned = max(planned, len(run.asked))
            fate = self._fate(one)
            rounds = isinstance(one.mutant, Mutant) and one.mutant.mutator.rounds
            if fate is None or (rounds and fate.outcome is Outcome.SURVIVED):  # the rounding tier judges how much
                green.append(one)
            elif fate.outcome is Outcome.SURVIVED:
                other.append(one)
            else:
                told(one, fate)

        self._crowd(self.suites.gate, [Asked(mutant) for mutant in mutants], count, seen)
        rounds = [one for one in green if isinstance(one.mutant, Mutant) and one.mutant.mutator.rounds]
        passed: dict[int, Fate] = {}
        for one in other:
            fate = self._to_the_end(one)
            if fate is None:
                green.append(one)
            elif fate.outcome is Outcome.KILLED or self.rounding is None:
                told(one, fate)
            else:  # the exact rule has let it by; the native one may not
                rounds.append(one)
                passed[id(one.mutant)] = fate
        self._wider([one for one in green if one not in rounds], told)

        def rounded_told(one: Asked, fate: Fate) -> None:
            before = passed.get(id(one.mutant))
            if before is None or fate.outcome is Outcome.KILLED:
                told(one, fate)
            elif before.is_fine and fate.cases:
                told(one, replace(fate, outcome=Outcome.ROUNDING, case=before.case))
            else:
                told(one, before)

        if self.rounding is not None and (rounds or count >= 0):  # honest errors take longer than all else
            again = [Asked(one.mutant) for one in rounds]
            rounded = self.rounding.judge(again, count, self.deadline, rounded_told)
            self.notes, planned = rounded.notes, planned + rounded.made
        else:
            for one in rounds:
                told(one, Fate(Outcome.ROUNDING, reason="exact arithmetic does not round"))
        self.unjudged = planned - len(found)
        return found

    def killed_early(
        self, mutants: Sequence[Mutant], cases: int, on_result: Callable[[MutantResult], None]
    ) -> list[Mutant]:
        """Tell the fate of mutants that the first few cases settle, and return those that they leave open.

        The honest backward answers these cases alone, so that the first mutants die at once. A mutant that there was
        no time for is neither told nor returned.
        """
        left: list[Mutant] = []

        def seen(one: Asked, _run: Run) -> None:
            fate = self._fate(one)
            if fate is not None and fate.outcome is not Outcome.SURVIVED:
                on_result(self._result(one, fate))
            elif isinstance(one.mutant, Mutant):
                left.append(one.mutant)

        self._crowd(self.suites.gate[:cases], [Asked(mutant) for mutant in mutants], on_done=seen)
        return left

    def _crowd(
        self,
        questions: Sequence[Question],
        asked: Sequence[Asked],
        count: int = -1,
        on_done: Callable[[Asked, Run], None] = lambda _asked, _run: None,
    ) -> Run:
        limits = replace(self.options.limits, wall_s=_WALL_SECONDS)
        way = Way(limits, self.deadline, count=count)
        known = scales(questions, self.spec)
        return run_crowds(questions, known, self.text, asked, self.truths.sandbox, way, on_done)

    def _wider(self, green: Sequence[Asked], told: Callable[[Asked, Fate], None]) -> None:
        """Tell equivalents from what the suite does not reach."""
        if not green or time.monotonic() >= self.deadline:
            return
        wider = self.suites.wider
        before = {id(one.mutant): one for one in green}

        def seen(one: Asked, run: Run) -> None:
            one.seconds += before[id(one.mutant)].seconds
            found = self._beyond(one)
            if found:
                told(one, Fate(Outcome.SURVIVED, case=f"{found}, which the suite does not hold"))
            else:
                told(one, Fate(Outcome.EQUIVALENT, reason=self._reason(run)))

        self._crowd(wider, [Asked(one.mutant) for one in green], on_done=seen)

    def _beyond(self, one: Asked) -> str:
        """The case of the wider suite at which a mutant is not the honest backward; empty for none.

        Where a gradient is zero by cancellation, only the truth's S tells rounding from a difference.
        """
        if one.ended is not None:
            return one.ended.message
        for heard in one.heard:
            if heard.alike:
                continue
            if heard.answer.failure is None and not heard.answer.findings:
                try:
                    question = self.suites.with_truth(heard.question)
                except TruthError:
                    return heard.question.case.name
                if _is_rounding(replace(heard, question=question)):
                    continue
            return heard.question.case.name
        return ""

    def _reason(self, run: Run) -> str:
        """What an equivalent was compared on."""
        most: dict[str, tuple[int, int, int]] = {}
        for name, *sizes in (launch for case in run.grids for launch in case):
            old = most.get(str(name), (0, 0, 0))
            x, y, z = (max(a, int(b)) for a, b in zip(old, sizes, strict=True))
            most[str(name)] = (x, y, z)
        grids = ", ".join(f"{name} {grid}" for name, grid in most.items())
        cases = len(self.suites.gate) + len(self.suites.wider)
        return f"equal to the honest gradients in {cases} cases at {len(self.suites.shapes)} shapes, grids to {grids}"

    def _fate(self, one: Asked) -> Fate | None:
        """What a mutant's first other answer says; None where all are the honest ones."""
        if one.ended is not None:
            return Fate(Outcome.KILLED, one.ended)
        for heard in one.heard:
            problem = judge_answer(heard, self.spec, self._text(one))
            name = heard.question.case.name
            if problem is not None:
                first = heard.question is self.suites.gate[0]
                invalid = problem.status in _NOTHING_COMPUTED or (first and problem.status is Status.CRASHED)
                return Fate(Outcome.INVALID if invalid else Outcome.KILLED, problem, name)
            if not heard.alike:
                return Fate(Outcome.SURVIVED, case=name)
        return None

    def _to_the_end(self, one: Asked) -> Fate | None:
        """The whole suite for a mutant that answers otherwise and is not red so far; None where no gradient differs."""
        again = Asked(one.mutant, whole=True)
        self._crowd(self.suites.gate, [again])
        if again.ended is not None:
            return Fate(Outcome.KILLED, again.ended)
        differs: str | None = None
        fine = True
        for heard in again.heard:
            problem = judge_answer(heard, self.spec, self._text(one))
            if problem is not None:
                return Fate(Outcome.KILLED, problem, heard.question.case.name)
            if not _is_rounding(heard):
                differs = differs or heard.question.case.name
                fine = fine and _is_fine(heard)
        return None if differs is None else Fate(Outcome.SURVIVED, case=differs, is_fine=fine)

    def _text(self, one: Asked) -> CandidateText:
        if isinstance(one.mutant, Mutation):
            return self.text
        return replace(self.text, source=one.mutant.source)

    def _result(self, one: Asked, fate: Fate) -> MutantResult:
        mutant, problem = one.mutant, fate.problem
        made_on_ir = isinstance(mutant, Mutation)
        words = mutant.words if isinstance(mutant, Mutant) else _words(mutant)
        return MutantResult(
            kind=Kind.IR if made_on_ir else Kind.SOURCE,
            mutator=mutant.mutator if isinstance(mutant, Mutation) else mutant.mutator.name,
            mutant=words,
            line=mutant.line,
            outcome=fate.outcome,
            status=problem.status if problem else Status.GREEN,
            case=fate.case,
            message=problem.message if problem else "",
            reason=fate.reason,
            diff=_diff(self.honest, mutant) if fate.outcome is Outcome.SURVIVED else "",
            seconds=one.seconds,
        )


def mutation_report(
    truths: Truths,
    *,
    count: int = 0,
    options: GateOptions = STANDARD,
    on_mutant: OnMutant | None = None,
    rounding: RoundingTier | None = None,
    seconds: float = float("inf"),
) -> MutationReport:
    """Judge the mutants of a pair that is green: at most `count` of each class made on source and on IR, all for 0.

    `rounding` judges those that only round otherwise; without it they count for nothing. What is not judged after
    `seconds` is left out and counted. Raises `InputError` where the honest backward has no answer.
    """
    start = time.perf_counter()
    judge = MutantJudge(truths, options, rounding=rounding)
    judge.deadline = time.monotonic() + seconds
    mutants = sample(source_mutants(judge.honest), count)
    results = list(gradient_mutants(judge.suites.gate))
    before, most = len(results), [len(mutants)]

    def on_result(result: MutantResult, planned: int) -> None:
        results.append(result)
        most[0] = max(most[0], planned)
        if on_mutant is not None:
            on_mutant(result, len(results), before + most[0])

    judge.judged_all(mutants, count, on_result)
    return MutationReport(
        pair=Path(truths.spec.facts.path).stem,
        results=tuple(results),
        unjudged=judge.unjudged,
        notes=judge.notes,
        seconds=time.perf_counter() - start,
    )


def _is_rounding(heard: Heard) -> bool:
    """Whether an answer differs from the honest one by rounding of float64 alone."""
    question = heard.question
    for place, (name, truth) in enumerate(question.truth.grads.items()):
        given, honest = heard.tensors.get(str(place)), heard.tensors.get(f"honest.{place}")
        if truth is None or (given is None and honest is None):
            continue
        if given is None or honest is None or not same(given, honest, scale_of(question, name)):
            return False
    return True


def _is_fine(heard: Heard) -> bool:
    """Whether no element differs from the honest one by more than `_FINE` of itself and the RMS of its gradient."""
    for place in range(len(heard.question.truth.grads)):
        given, honest = heard.tensors.get(str(place)), heard.tensors.get(f"honest.{place}")
        if given is None or honest is None:
            if given is not honest:
                return False
            continue
        wanted = honest.to(torch.float64)
        size = wanted.abs() + wanted.square().sum().div(max(1, wanted.numel())).sqrt()
        if not bool(((given.to(torch.float64) - wanted).abs() <= _FINE * size).all()):
            return False
    return True


def _words(mutation: Mutation) -> str:
    where = f"line {mutation.line}: " if mutation.line else ""
    return f"{where}{mutation.words} in {mutation.kernel} ({mutation.place}, way {mutation.way})"


def _diff(honest: str, mutant: Mutant | Mutation) -> str:
    if isinstance(mutant, Mutation):
        return mutant.model_dump_json()
    rows = difflib.unified_diff(honest.splitlines(), mutant.source.splitlines(), "honest", "mutant", lineterm="", n=1)
    return "\n".join(rows)
