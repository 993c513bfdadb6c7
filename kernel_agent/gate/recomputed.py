"""What a candidate's process says for the candidate is not believed: its record is carried out again without its code.

A green answer comes from a process that ran the candidate, which may have patched everything in it. So the steps it
wrote down (torch functions, launches with arguments and grid) go to other processes, which have the user's forward and
the candidate's kernels and nothing else of the candidate. The gradients, launches, torch functions and findings that
are judged are theirs. What was red is red without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import ValidationError

from kernel_agent.gate.ahead import Ahead
from kernel_agent.gate.answer import Answer, Stage
from kernel_agent.gate.batch import BatchRun, Outcome, Script, candidate_job, judged_batch
from kernel_agent.gate.candidate import CandidateText, default_pair
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.kernels_alone import kernels_alone
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.questions import Question
from kernel_agent.gate.surroundings import asks_where
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import listed, quoted
from kernel_agent.oracle import Truths
from kernel_agent.sandbox import Ending, Message, Report

ENTRY = "kernel_agent.gate.replay_child:replayed"
_AGAIN = "carried out again from its record, without the candidate's code: "
_EMPTY = (
    "Memory of an earlier call holds nothing where a call is carried out again: make it in the call, "
    "or write all of it there before it is read."
)
_OF_WORKSPACES = '"kind":"workspace"'
"""Stands in the text of a record that uses such memory, and nowhere in what such a text quotes."""


class Recomputation:
    """All cases of green batches again, in processes that hold no code of the candidate.

    Each works off a part of a batch, beside the candidate's process that answers what comes after it.
    """

    def __init__(self, truths: Truths, ahead: Ahead, text: CandidateText, options: GateOptions) -> None:
        self._spec = truths.spec
        self._lowered = dict(truths.lowered)
        """With what the processes of parts have lowered so far: they hold no code of the candidate either."""
        self._ahead = ahead
        self._text = text
        self._options = options
        self._kernels = kernels_alone(text.source, default_pair(truths.spec))
        self._parts: list[_Part] = []

    def listener(self, questions: list[Question]) -> Callable[[Message], None]:
        """To be told of each message of a batch's process: begins with a part as soon as it is answered."""
        heard: list[Message] = []
        waiting = parts(questions)[:-1]

        def hear(message: Message) -> None:
            heard.append(message)
            if waiting and len(heard) == _messages(questions[: waiting[0].stop]):
                script = Script(Report(Ending.FINISHED, "", tuple(heard)), questions)
                if not any(script.ended(number) for number in waiting[0]):
                    self._begin(script, waiting.pop(0))

        return hear

    def go_on(self, run: BatchRun) -> None:
        """Begin with what is left of a green batch."""
        questions = run.script.questions
        for part in parts(questions):
            if not any(begun.questions[0] is questions[part.start] for begun in self._parts):
                self._begin(run.script, part)

    def _begin(self, script: Script, part: range) -> None:
        questions = script.questions[part.start : part.stop]
        points = list(dict.fromkeys(script.point_of[number] for number in part))
        backwards = [script.program(Stage.BACKWARD, number) for number in part]
        extra = {
            "source": self._kernels.text,
            "trusted_lines": self._kernels.trusted_lines,
            "forwards": [script.program(Stage.FORWARD, point) for point in points],
            "backwards": backwards,
            "parameters": [one.name for one in self._spec.inputs],
            "cotangents": [question.case.kind.value for question in questions],
            "again": [question.case.again for question in questions],
        }
        job = candidate_job(questions, self._text, self._options.limits, ENTRY, extra, self._lowered)
        empty = tuple(_OF_WORKSPACES in program for program in backwards)
        self._parts.append(_Part(questions, empty, self._ahead.begin(job, self._learn)))

    def _learn(self, message: Message) -> None:
        if message.record.get("lowered"):
            with suppress(ValidationError):  # the process is judged by what it says, not here
                self._lowered = {**Answer.model_validate(message.record).lowered, **self._lowered}

    def found(self, runs: Sequence[BatchRun]) -> tuple[BatchRun, ...]:
        """What the processes found, in the order of the questions; `runs` are the candidate's own.

        It ends with the first part that has a question without an answer.
        """
        asks = _asking(self._text)  # while the last parts still run
        found: list[BatchRun] = []
        for part in self._parts:
            again = judged_batch(part.report(), part.questions, self._spec, self._text, self._options)
            outcomes = tuple(map(_named, again.outcomes, part.empty))
            found.append(replace(again, outcomes=outcomes))
            if len(again.outcomes) < len(part.questions):
                break
        right = all(outcome.problem is None for run in found for outcome in run.outcomes)
        besides = (_tampering(runs) or asks) if right else None
        if besides is not None:
            *others, last = found[-1].outcomes
            found[-1] = replace(found[-1], outcomes=(*others, _refused(last, besides)))
        return tuple(found)


@dataclass(frozen=True)
class _Part:
    """Some questions that are carried out again."""

    questions: list[Question]
    empty: tuple[bool, ...]
    """Of each: whether its call uses memory of earlier ones, which holds nothing here."""
    report: Callable[[], Report]
    """Waits for what their process said."""


def _messages(questions: Sequence[Question]) -> int:
    """How many a candidate's process sends to answer them: of its import, of each point, of each case."""
    return 1 + len({_point(question) for question in questions}) + len(questions)


def _point(question: Question) -> str:
    return question.case.point.model_dump_json()


def parts(questions: Sequence[Question]) -> list[range]:
    """The questions in three parts, fewer where two would share a point.

    The first is half of them, carried out while the candidate's process answers the rest; what is left when that ends
    is a quarter.
    """
    places = [_point(question) for question in questions]
    cuts = [0]
    for wanted in ((len(places) + 1) // 2, (3 * len(places) + 3) // 4):
        apart = (
            cut for cut in range(max(wanted, cuts[-1] + 1), len(places)) if set(places[:cut]).isdisjoint(places[cut:])
        )
        cuts += [cut for cut in (next(apart, 0),) if cut]
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(places)], strict=True)]


def _tampering(runs: Sequence[BatchRun]) -> Problem | None:
    """What a right backward has done besides that would last where it is used."""
    names = sorted({name for run in runs for name in run.script.replaced})
    if names:
        remedy = "Call what other modules hold and leave it there: the file runs in programs that use it, too."
        return Problem(Status.TAMPERED, f"the file replaces {listed(names)}", details=remedy)
    states = sorted({name for run in runs for name in run.script.changed})
    if states:
        remedy = "Put back what a call changes, or change nothing: the file runs in programs that go on with it."
        return Problem(Status.TAMPERED, f"the file leaves {listed(states)} changed", details=remedy)
    left = max(run.script.report.left_behind for run in runs)
    if left:
        remedy = "A backward ends with what it starts."
        return Problem(Status.TAMPERED, f"the candidate leaves processes behind: {left}", details=remedy)
    return None


def _asking(text: CandidateText) -> Problem | None:
    """What a right backward asks of its surroundings: where these are others it may be another one."""
    asked = asks_where(text.shown, text.users_lines)
    if asked is None:
        return None
    message = f"what backward does hangs on where it runs: it asks for {asked.what}{quoted(text.source, asked.line)}"
    remedy = "Compute from what backward is given alone: what it does where another program calls it was not judged."
    return Problem(Status.UNEXPLAINED, message, asked.line, details=remedy)


def _named(outcome: Outcome, empty: bool) -> Outcome:
    """A red outcome says that it is not what the candidate's process answered, and if memory was `empty` for it."""
    problem = outcome.problem
    if problem is None:
        return outcome
    details = "\n".join(part for part in (problem.details, _EMPTY) if part) if empty else problem.details
    return _refused(outcome, replace(problem, message=_AGAIN + problem.message, details=details))


def _refused(outcome: Outcome, problem: Problem) -> Outcome:
    result = outcome.result.model_copy(update={"status": problem.status, "message": problem.message})
    return replace(outcome, problem=problem, result=result)
