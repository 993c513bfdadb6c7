"""All cases of one shape: truth in one child, then the candidate in another, then the comparison in the parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from kernel_agent.gate import words
from kernel_agent.gate.answer import Answer, Stage
from kernel_agent.gate.candidate import CandidateText
from kernel_agent.gate.cases import Case, ShapePlan
from kernel_agent.gate.judge import Judged, Problem, judge_backward, judge_failure, judge_forward
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import CaseResult, Status
from kernel_agent.oracle import Cotangents, ForwardTruth, GradientTruth, Point, Truths, make_cotangents
from kernel_agent.oracle.cotangents import rms
from kernel_agent.oracle.wire import pack
from kernel_agent.sandbox import Ending, Job, Limits, Message, Report, Sandbox

_STATUS_OF_ENDING = {
    Ending.TIMED_OUT: Status.TIMED_OUT,
    Ending.OUT_OF_MEMORY: Status.OUT_OF_MEMORY,
    Ending.TOO_MANY_PROCESSES: Status.TOO_MANY_PROCESSES,
}
_WHERE = {Stage.IMPORT: "importing the file", Stage.FORWARD: "forward", Stage.BACKWARD: "backward"}


@dataclass(frozen=True)
class Question:
    """One case with everything that is needed to ask and to judge it."""

    case: Case
    forward: ForwardTruth
    cotangents: Cotangents
    truth: GradientTruth


@dataclass(frozen=True)
class Outcome:
    """One case with its result."""

    case: Case
    result: CaseResult
    problem: Problem | None


@dataclass(frozen=True)
class ShapeRun:
    """The outcomes at one shape, in the order of the plan."""

    outcomes: tuple[Outcome, ...]
    extra_saved_bytes: int
    """As the candidate child reports it, at the seed that saved most."""


def run_shape(truths: Truths, sandbox: Sandbox, shape: ShapePlan, text: CandidateText, options: GateOptions) -> ShapeRun:
    """Ask the candidate all cases of one shape and judge its answers."""
    questions = _questions(truths, shape)
    job = _job(shape, questions, text, options.limits)
    report = sandbox.run(job)
    script = _Script(report, questions)
    outcomes, stopped = [], False
    for number, question in enumerate(questions):
        if stopped:
            break
        judged = _judge(script, question, number, text, truths, options)
        stopped = script.ended(number)
        outcomes.append(_outcome(question.case, judged))
    return ShapeRun(tuple(outcomes), script.extra_saved_bytes)


def _questions(truths: Truths, shape: ShapePlan) -> list[Question]:
    questions: list[Question] = []
    for point in dict.fromkeys(case.point.model_dump_json() for case in shape.cases):
        cases = [case for case in shape.cases if case.point.model_dump_json() == point]
        forward = truths.forward(cases[0].point)
        sets = [make_cotangents(case.kind, forward.forms, case.point.seed) for case in cases]
        found = truths.gradients(forward, sets)
        questions += [Question(c, forward, s, t) for c, s, t in zip(cases, sets, found, strict=True)]
    return questions


def _job(shape: ShapePlan, questions: list[Question], text: CandidateText, limits: Limits) -> Job:
    tensors: dict[str, Tensor] = {}
    points = _points(questions)
    packed: list[dict[str, Any]] = []
    for i, (_, forward) in enumerate(points):
        packed.append({"args": pack(forward.args, tensors, f"p{i}.a"), "kwargs": pack(forward.kwargs, tensors, f"p{i}.k")})
    cases = []
    for i, question in enumerate(questions):
        tensors |= {f"c{i}.{j}": c for j, c in enumerate(question.cotangents) if c is not None}
        cases.append(
            {
                "point": [point for point, _ in points].index(question.case.point),
                "cotangents": [None if c is None else f"c{i}.{j}" for j, c in enumerate(question.cotangents)],
                "needs": question.case.needs,
            }
        )
    payload = {"source": text.shown, "points": packed, "cases": cases}
    label = f"candidate at {shape.entry.label}"
    return Job("kernel_agent.gate.child:answered", payload, tensors, limits, label)


def _points(questions: list[Question]) -> list[tuple[Point, ForwardTruth]]:
    """The distinct points with their forwards, in order."""
    found: list[tuple[Point, ForwardTruth]] = []
    for question in questions:
        if question.case.point not in [point for point, _ in found]:
            found.append((question.case.point, question.forward))
    return found


class _Script:
    """What the child should say and what it said: anything out of turn is not the gate's own child speaking."""

    def __init__(self, report: Report, questions: list[Question]) -> None:
        self.report = report
        self.answers: dict[tuple[Stage, int], tuple[Answer, Message]] = {}
        self.failure: tuple[Answer, Message] | None = None
        self.out_of_turn = ""
        points = [point for point, _ in _points(questions)]
        self.point_of = [points.index(question.case.point) for question in questions]
        expected: list[tuple[Stage, int]] = [(Stage.IMPORT, 0)]
        for number, point in enumerate(self.point_of):
            if (Stage.FORWARD, point) not in expected:
                expected.append((Stage.FORWARD, point))
            expected.append((Stage.BACKWARD, number))
        for position, message in enumerate(report.messages):
            self._hear(message, expected[position] if position < len(expected) else None)

    def _hear(self, message: Message, expected: tuple[Stage, int] | None) -> None:
        if self.out_of_turn:
            return
        try:
            answer = Answer.model_validate(message.record)
        except ValidationError:
            self.out_of_turn = "a message that the gate's child does not send"
            return
        if expected is None or self.failure is not None or (answer.stage, answer.number) != expected:
            self.out_of_turn = f"a message out of turn ({answer.stage.value} {answer.number})"
        elif answer.failure is not None:
            self.failure = (answer, message)
        else:
            self.answers[expected] = (answer, message)

    @property
    def extra_saved_bytes(self) -> int:
        """See `ShapeRun`."""
        return max((a.extra_saved_bytes for a, _ in self.answers.values()), default=0)

    def ended(self, number: int) -> bool:
        """Whether nothing was answered from this case on."""
        return bool(self.out_of_turn) or (Stage.BACKWARD, number) not in self.answers


def _judge(
    script: _Script, question: Question, number: int, text: CandidateText, truths: Truths, options: GateOptions
) -> Judged:
    if script.out_of_turn:
        return Judged(Problem(Status.CRASHED, f"the candidate wrote to the result channel: {script.out_of_turn}"))
    spec = truths.spec
    forward = script.answers.get((Stage.FORWARD, script.point_of[number]))
    backward = script.answers.get((Stage.BACKWARD, number))
    problem = None
    if forward is not None:
        problem = judge_forward(forward[0], forward[1].tensors, question.forward, spec, text.meta, text.source)
    if backward is None:
        return Judged(problem or _unanswered(script, text, options.limits))
    judged = judge_backward(
        backward[0],
        backward[1].tensors,
        question.truth,
        question.forward,
        tuple(rms(c) for c in question.cotangents),
        question.case.needs,
        spec,
        text.meta,
        text.source,
    )
    last = number == len(script.point_of) - 1
    if last and judged.problem is None and problem is None and not script.report.finished:
        problem = _unanswered(script, text, options.limits)
    return Judged(problem or judged.problem, judged.scores)


def _unanswered(script: _Script, text: CandidateText, limits: Limits) -> Problem:
    """Why a case has no answer: an exception of the candidate's, or an ending of its process."""
    if script.failure is not None:
        answer, _ = script.failure
        if answer.failure is not None:
            return judge_failure(answer.failure, text.source, _WHERE[answer.stage])
    report = script.report
    status = _STATUS_OF_ENDING.get(report.ending, Status.CRASHED)
    said = {
        Ending.TIMED_OUT: f"the candidate does not finish within {limits.wall_s:.0f} s at this shape",
        Ending.OUT_OF_MEMORY: f"the candidate needs more than {limits.memory_bytes >> 20} MiB at this shape",
        Ending.EXITED: f"the candidate ends its own process with status {report.exit_code}",
        Ending.FINISHED: "the candidate's process finished without answering every case",
    }.get(report.ending, report.message)
    error = f"{report.error.type}: {words.first_paragraph(report.error.message)}" if report.error else ""
    return Problem(status, said, details="\n".join(part for part in (error, report.stderr_tail[-2000:].strip()) if part))


def _outcome(case: Case, judged: Judged) -> Outcome:
    problem = judged.problem
    result = CaseResult(
        case=case.name,
        required=case.required,
        status=Status.GREEN if problem is None else problem.status,
        grads=judged.scores,
        message="" if problem is None else problem.message,
    )
    return Outcome(case, result, problem)
