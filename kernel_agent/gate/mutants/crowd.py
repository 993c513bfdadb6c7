"""Many mutants before a suite, in few processes: what each answers where it is not the honest backward, judged here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kernel_agent.errors import InputError
from kernel_agent.gate.answer import Answer
from kernel_agent.gate.batch import candidate_job, ended_problem
from kernel_agent.gate.candidate import CandidateText
from kernel_agent.gate.judge import Problem, judge_backward, judge_failure
from kernel_agent.gate.mutants.sources import Mutant
from kernel_agent.gate.questions import Question
from kernel_agent.gate.verdict import Status
from kernel_agent.ir.mutations import Mutation
from kernel_agent.oracle.cotangents import rms
from kernel_agent.oracle.side_by_side import side_by_side
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Ending, Limits, Message, Report, Sandbox

ENTRY = "kernel_agent.gate.mutants.crowd_child:judged"
MOST = 4
"""Processes that share the mutants at once: each runs the honest backward, too."""
FEWEST = 4
"""Mutants of a process, for it to be worth its start."""


@dataclass(frozen=True)
class Heard:
    """What a mutant answered to one case."""

    question: Question
    answer: Answer
    tensors: dict[str, Tensor]
    alike: bool
    """Its gradients are the honest ones; the answer is sent for what else it says."""


@dataclass
class Asked:
    """One mutant on its way through a suite."""

    mutant: Mutant | Mutation
    start: int = 0
    """Case to begin with."""
    whole: bool = False
    """Whether every answer is wanted, not the first that is not the honest one."""
    heard: list[Heard] = field(default_factory=list)
    done: bool = False
    ended: Problem | None = None
    """How the process ended that ran it, where it did not answer."""
    seconds: float = 0.0

    @property
    def form(self) -> dict[str, Any]:
        """What the child is told."""
        form: dict[str, Any] = {"start": self.start, "whole": self.whole}
        if isinstance(self.mutant, Mutation):
            return {**form, "mutation": self.mutant.model_dump(mode="json")}
        return {**form, "source": split_sections(self.mutant.source).above_check}


@dataclass(frozen=True)
class Way:
    """How a crowd is run."""

    limits: Limits
    deadline: float = float("inf")
    """On `time.monotonic`: what is not answered by then is not asked."""
    faithful: bool = False
    """Whether arithmetic rounds as the kernels declare."""
    count: int = -1
    """Mutants of each class to make on IR; 0: all, -1: none."""
    part: int = 0
    """Of those, which are this crowd's: every one of so many `parts`, from that on."""
    parts: int = 1


@dataclass
class Run:
    """What a crowd said."""

    asked: list[Asked]
    """Those that were given, then those that were made on IR."""
    honest: list[Heard] = field(default_factory=list)
    grids: list[tuple[tuple[str, int, int, int], ...]] = field(default_factory=list)
    """Of the honest backward's launches, per case: kernel and programs along each axis."""


def run_crowds(
    questions: Sequence[Question],
    scales: list[list[float]],
    honest: CandidateText,
    asked: Sequence[Asked],
    sandbox: Sandbox,
    way: Way,
    on_done: Callable[[Asked, Run], None] = lambda _asked, _run: None,
) -> Run:
    """As `run_crowd`, in as many processes at once as there are processors and mutants for.

    `on_done` is called by one thread at a time, and what it is given has the mutants of all.
    """
    whole, one_by_one = Run(list(asked)), threading.Lock()
    parts = processes(len(asked), way.count)

    def crowd(part: int, left: threading.Event) -> Run:
        mine = asked[part::parts]
        known = len(mine)

        def done(one: Asked, run: Run) -> None:
            nonlocal known
            with one_by_one:
                whole.asked += run.asked[known:]
                known = len(run.asked)
                whole.honest, whole.grids = run.honest, run.grids
                on_done(one, whole)

        share = replace(way, part=part, parts=parts)
        return run_crowd(questions, scales, honest, mine, sandbox, share, done, cancelled=left)

    side_by_side(crowd, range(parts))
    return whole


def processes(mutants: int, count: int) -> int:
    """How many at once for so many mutants, and `count` of each class made on IR."""
    enough = MOST if count >= 0 else max(1, mutants // FEWEST)
    return min(MOST, enough, len(os.sched_getaffinity(0)))


def run_crowd(
    questions: Sequence[Question],
    scales: list[list[float]],
    honest: CandidateText,
    asked: Sequence[Asked],
    sandbox: Sandbox,
    way: Way,
    on_done: Callable[[Asked, Run], None] = lambda _asked, _run: None,
    *,
    cancelled: threading.Event | None = None,
) -> Run:
    """Ask all of them; `on_done` is told of each as soon as it is through, and not of those there was no time for.

    A mutant that takes its process with it is answered with how that ended, and the others get another one. Setting
    `cancelled` ends it. Raises `InputError` where the honest backward has no answer.
    """
    run = Run(list(asked))
    told = 0

    def hear(message: Message) -> None:
        nonlocal told
        record = message.record
        if "honest" in record:
            question = questions[record["honest"]]
            run.honest.append(Heard(question, Answer.model_validate(record["answer"]), message.tensors, True))
            run.grids.append(tuple((str(n), int(x), int(y), int(z)) for n, x, y, z in record["grids"]))
        elif "mutations" in record:
            run.asked += [Asked(Mutation.model_validate(form)) for form in record["mutations"]]
        else:
            one = run.asked[told + int(record["mutant"])]
            one.seconds = record["seconds"]
            if record["case"] is not None:
                answer = Answer.model_validate(record["answer"])
                one.heard.append(Heard(questions[record["case"]], answer, message.tensors, record["alike"]))
            else:
                one.done = True
                on_done(one, run)

    first = True
    while first or not all(one.done for one in run.asked):
        left = way.deadline - time.monotonic()
        if left <= 0:
            break
        waiting = [k for k, one in enumerate(run.asked) if not one.done]
        told = waiting[0] if waiting else 0
        count = way.count if first else -1
        run.honest, run.grids = [], []
        extra = {
            "scales": scales,
            "faithful": way.faithful,
            "count": count,
            "part": way.part,
            "parts": way.parts,
            "rounds": way.faithful,
            "mutants": [one.form for one in run.asked[told:]],
        }
        limits = replace(way.limits, wall_s=min(way.limits.wall_s, left))
        job = candidate_job(list(questions), honest, limits, ENTRY, extra)
        report = sandbox.run(job, on_message=hear, cancelled=cancelled)
        first = False
        if cancelled is not None and cancelled.is_set():
            break
        for heard in run.honest:
            if heard.answer.failure is not None:
                raise _no_answer(heard.answer.failure.message)
        if report.finished:
            break
        if len(run.honest) < len(questions):
            if time.monotonic() >= way.deadline:
                break
            raise _no_answer(_said(report, limits))
        if report.ending is Ending.TIMED_OUT:
            break
        culprit = next((one for one in run.asked if not one.done), None)
        if culprit is None:
            break
        culprit.done, culprit.ended = True, ended_problem(report, limits)
        on_done(culprit, run)
    return run


def _no_answer(why: str) -> InputError:
    remedy = "Only the backward of a pair that `kernel-agent check` accepts has mutants."
    return InputError(f"the honest backward has no answer: {why}", remedy=remedy)


def _said(report: Report, limits: Limits) -> str:
    problem = ended_problem(report, limits)
    return " ".join(part for part in (problem.message, problem.details) if part)


def judge_answer(heard: Heard, spec: KernelSpec, text: CandidateText) -> Problem | None:
    """What the gate says of one answer to a case whose truth is known."""
    answer, question = heard.answer, heard.question
    if answer.failure is not None:
        problem = judge_failure(answer.failure, text.source, "backward")
        return replace(problem, status=Status.TIMED_OUT) if answer.failure.type == "TooSlow" else problem
    return judge_backward(
        answer,
        heard.tensors,
        question.truth,
        question.forward,
        tuple(rms(c) for c in question.cotangents),
        question.case.needs,
        spec,
        text.meta,
        question.stub_ops,
        text.source,
        extreme=question.case.point.extreme,
    ).problem
