"""A batch of cases: the candidate answers them in a child, and the parent compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from kernel_agent.gate import words
from kernel_agent.gate.answer import Answer, Stage
from kernel_agent.gate.candidate import CandidateText
from kernel_agent.gate.cases import Case
from kernel_agent.gate.judge import Judged, Problem, judge_backward, judge_failure, judge_forward
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.order import order_problem
from kernel_agent.gate.questions import Put, Question
from kernel_agent.gate.verdict import CaseResult, Status
from kernel_agent.oracle import CotangentKind, ForwardTruth
from kernel_agent.oracle.cotangents import rms
from kernel_agent.oracle.wire import pack
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Ending, Job, Limits, Message, Report, Sandbox

_STATUS_OF_ENDING = {
    Ending.TIMED_OUT: Status.TIMED_OUT,
    Ending.OUT_OF_MEMORY: Status.OUT_OF_MEMORY,
    Ending.TOO_MANY_PROCESSES: Status.TOO_MANY_PROCESSES,
}
_WHERE = {Stage.IMPORT: "importing the file", Stage.FORWARD: "forward", Stage.BACKWARD: "backward"}


@dataclass(frozen=True)
class Outcome:
    """One case with its result."""

    question: Question
    result: CaseResult
    problem: Problem | None
    given: dict[str, Tensor] = field(default_factory=dict)
    """The candidate's gradients by name, as it sent them: those that are tensors."""

    @property
    def case(self) -> Case:
        """The case itself."""
        return self.question.case

    def without_tensors(self) -> Outcome:
        """The same for where only the result matters: gradients of every case take memory."""
        return replace(self, given={})


@dataclass(frozen=True)
class BatchRun:
    """The outcomes of one batch, in the order of the plan; it ends with the first case that has no answer."""

    outcomes: tuple[Outcome, ...]
    extra_saved_bytes: int
    """As the child reports it, at the seed that saved most."""
    script: Script
    """All that the child said."""


def run_batch(
    questions: list[Question], spec: KernelSpec, sandbox: Sandbox, text: CandidateText, options: GateOptions
) -> BatchRun:
    """Ask the candidate a batch of cases in one fresh process and judge its answers."""
    return judged_batch(sandbox.run(candidate_job(questions, text, options.limits)), questions, spec, text, options)


def judged_batch(
    report: Report, questions: list[Question], spec: KernelSpec, text: CandidateText, options: GateOptions
) -> BatchRun:
    """Judge what a process answered to a batch of cases."""
    script = Script(report, questions)
    outcomes: list[Outcome] = []
    forwards: dict[int, Problem | None] = {}
    for number, question in enumerate(questions):
        point = script.point_of[number]
        if point not in forwards:
            forwards[point] = _forward_problem(script, question, point, text, spec)
        judged = _judge(script, question, number, forwards[point], text, spec, options)
        outcomes.append(_outcome(question, judged, script.given(number, spec.grads)))
        if script.ended(number):
            break
    return BatchRun(tuple(outcomes), script.extra_saved_bytes, script)


def candidate_job(
    questions: Sequence[Put],
    text: CandidateText,
    limits: Limits,
    entry: str = "kernel_agent.gate.child:answered",
    extra: dict[str, Any] | None = None,
    lowered: Mapping[str, str] | None = None,
    asked: int = 0,
) -> Job:
    """A job that runs a candidate on the questions; `extra` is added to the payload.

    `lowered` is what `Truths` has lowered: what a candidate shares with the user's forward needs no lowering again.
    So many configurations of autotuned kernels were `asked` before, in other processes: these go on with the next.
    """
    tensors: dict[str, Tensor] = {}
    points, point_of = _points(questions)
    packed: list[dict[str, Any]] = []
    for i, forward in enumerate(points):
        packed.append(
            {"args": pack(forward.args, tensors, f"p{i}.a"), "kwargs": pack(forward.kwargs, tensors, f"p{i}.k")}
        )
    cases, turn = [], turns(questions, asked)
    for i, question in enumerate(questions):
        tensors |= {f"c{i}.{j}": c for j, c in enumerate(question.cotangents) if c is not None}
        cases.append(
            {
                "point": point_of[i],
                "cotangents": [None if c is None else f"c{i}.{j}" for j, c in enumerate(question.cotangents)],
                "needs": question.case.needs,
                "turn": turn[i],
            }
        )
    own = {"source": text.shown, "users_lines": text.users_lines, "lowered": dict(lowered or {})}
    payload = {**own, "points": packed, "cases": cases, **(extra or {})}
    # The label is what the process is called, which the candidate can read: it tells neither case nor seed.
    return Job(entry, payload, tensors, limits, "candidate", own_files=("candidate.py",))


def turns(questions: Sequence[Put], begin: int = 0) -> list[int]:
    """Which configurations of autotuned kernels each question is asked with, numbered from `begin` on.

    What is asked again has those of the first time, and so has the same cotangent at a tiny scale: what these two do
    differs by nothing but values.
    """
    numbers: dict[Any, int] = {}
    found: list[int] = []
    for place, question in enumerate(questions):
        case = question.case
        usual = case.again or case.kind is CotangentKind.TINY
        point = case.point.model_dump_json()
        key = (point, CotangentKind.RANDOM, None) if usual else (point, case.kind, case.needs)
        known = key if usual or key not in numbers else (*key, place)
        found.append(numbers.setdefault(known, begin + len(numbers)))
    return found


def _points(questions: Sequence[Put]) -> tuple[list[ForwardTruth], list[int]]:
    """The forwards at the distinct points, in order, and for each question the place of its own."""
    keys = [question.case.point.model_dump_json() for question in questions]
    forwards = {key: question.forward for key, question in reversed([*zip(keys, questions, strict=True)])}
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [forwards[key] for key in places], [places[key] for key in keys]


class Script:
    """What the child should say and what it said: anything out of turn is not the gate's own child speaking."""

    def __init__(self, report: Report, questions: list[Question]) -> None:
        self.report = report
        self.questions = questions
        self.answers: dict[tuple[Stage, int], tuple[Answer, Message]] = {}
        self.failure: tuple[Answer, Message] | None = None
        self.out_of_turn = ""
        _, self.point_of = _points(questions)
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

    def program(self, stage: Stage, number: int) -> str:
        """What the child wrote down of a point's forward, or of a case's backward."""
        return self.answers[stage, number][0].program

    @property
    def replaced(self) -> tuple[str, ...]:
        """Attributes of other modules that the candidate has replaced."""
        return tuple(sorted({name for answer, _ in self.answers.values() for name in answer.replaced}))

    @property
    def changed(self) -> tuple[str, ...]:
        """States of its process that the candidate has changed."""
        return tuple(sorted({name for answer, _ in self.answers.values() for name in answer.changed}))

    @property
    def lowered(self) -> dict[str, str]:
        """IR as the candidate's process has lowered it: for nobody but another process of that candidate."""
        return {content: text for answer, _ in self.answers.values() for content, text in answer.lowered.items()}

    @property
    def extra_saved_bytes(self) -> int:
        """See `BatchRun`."""
        return max((a.extra_saved_bytes for a, _ in self.answers.values()), default=0)

    @property
    def of_backwards(self) -> tuple[Answer, ...]:
        """What the child said of its calls of `backward`."""
        return tuple(answer for (stage, _), (answer, _) in self.answers.items() if stage is Stage.BACKWARD)

    def given(self, number: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The gradients that a case was answered with, where there is one for each name."""
        answer, message = self.answers.get((Stage.BACKWARD, number), (None, None))
        if answer is None or message is None or len(answer.returned) != len(names):
            return {}
        return {name: message.tensors[str(i)] for i, name in enumerate(names) if str(i) in message.tensors}

    def ended(self, number: int) -> bool:
        """Whether nothing was answered from this case on."""
        return bool(self.out_of_turn) or (Stage.BACKWARD, number) not in self.answers


def _forward_problem(
    script: Script, question: Question, point: int, text: CandidateText, spec: KernelSpec
) -> Problem | None:
    """What is wrong with the forward at the point of some questions; nothing where it has no answer."""
    if script.out_of_turn or (Stage.FORWARD, point) not in script.answers:
        return None
    answer, message = script.answers[Stage.FORWARD, point]
    about = (spec, text.meta, question.stub_ops, text.source)
    extreme = question.case.point.extreme
    return judge_forward(answer, message.tensors, question.forward, *about, extreme=extreme)


def _judge(
    script: Script,
    question: Question,
    number: int,
    problem: Problem | None,
    text: CandidateText,
    spec: KernelSpec,
    options: GateOptions,
) -> Judged:
    """`problem` is that of the forward."""
    if script.out_of_turn:
        return Judged(Problem(Status.CRASHED, f"the candidate wrote to the result channel: {script.out_of_turn}"))
    backward = script.answers.get((Stage.BACKWARD, number))
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
        question.stub_ops,
        text.source,
        extreme=question.case.point.extreme,
    )
    if options.deterministic and judged.problem is None:
        judged = replace(judged, problem=order_problem(backward[0], text.source))
    last = number == len(script.point_of) - 1
    if last and judged.problem is None and problem is None and not script.report.finished:
        problem = _unanswered(script, text, options.limits)
    return Judged(problem or judged.problem, judged.scores)


def _unanswered(script: Script, text: CandidateText, limits: Limits) -> Problem:
    """Why a case has no answer: an exception of the candidate's, or an ending of its process."""
    if script.failure is not None:
        answer, _ = script.failure
        if answer.failure is not None:
            return judge_failure(answer.failure, text.source, _WHERE[answer.stage])
    return ended_problem(script.report, limits)


def ended_problem(report: Report, limits: Limits) -> Problem:
    """The ending of a candidate's process, when it ended before it had answered everything."""
    status = _STATUS_OF_ENDING.get(report.ending, Status.CRASHED)
    said = {
        Ending.TIMED_OUT: f"the candidate does not finish within {limits.wall_s:.0f} s here",
        Ending.OUT_OF_MEMORY: f"the candidate needs more than {limits.memory_bytes >> 20} MiB here",
        Ending.EXITED: f"the candidate ends its own process with status {report.exit_code}",
        Ending.FINISHED: "the candidate's process finished without answering every case",
    }.get(report.ending, report.message)
    error = f"{report.error.type}: {words.first_paragraph(report.error.message)}" if report.error else ""
    return Problem(
        status, said, details="\n".join(part for part in (error, report.stderr_tail[-2000:].strip()) if part)
    )


def _outcome(question: Question, judged: Judged, given: dict[str, Tensor]) -> Outcome:
    case, problem = question.case, judged.problem
    result = CaseResult(
        case=case.name,
        required=case.required,
        status=Status.GREEN if problem is None else problem.status,
        grads=judged.scores,
        message="" if problem is None else problem.message,
        values=case.point.values,
    )
    return Outcome(question, result, problem, given)
