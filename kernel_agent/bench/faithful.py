"""The rule of the native tier without a GPU: kernels in faithful arithmetic, which rounds as their types declare.

Here mutants die that only round: an accumulator in float16, summands cut to bfloat16. Exact arithmetic does not see
them. A case counts only where the honest backward is within the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernel_agent.bench.honest import HonestError
from kernel_agent.bench.native_rule import compare_native, honest_bits
from kernel_agent.bench.native_truth import NativeGradient
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.candidate import read_candidate
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.mutants.crowd import Asked, Heard, Run, Way, run_crowd
from kernel_agent.gate.mutants.judge import Fate, Rounded
from kernel_agent.gate.mutants.records import Outcome
from kernel_agent.gate.mutants.suite import Suites
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.questions import Question
from kernel_agent.gate.verdict import Status
from kernel_agent.oracle import CotangentKind, Truths
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.wire import pack

_CASES = 5
"""Shapes that are run: the cheapest, the largest, and between them one of every dtype."""
_WALL_SECONDS = 1800.0


@dataclass(frozen=True)
class FaithfulCase:
    """One case, and what gradients that round are held against."""

    question: Question
    grads: dict[int, NativeGradient]
    """By position in what `backward` returns."""
    bits: int
    """Of the coarsest honest arithmetic."""

    def judge(self, tensors: dict[str, Tensor]) -> tuple[float, str]:
        """Worst error over the allowed one, and the gradient that it is of."""
        worst, which = 0.0, ""
        for place, grad in self.grads.items():
            given = tensors.get(str(place))
            if given is None or given.shape != grad.truth.shape:
                continue
            ratio = compare_native(given, grad.truth, grad.honest, grad.scale, grad.dtype, self.bits).ratio
            if ratio > worst:
                worst, which = ratio, grad.name
        return worst, which


class FaithfulTier:
    """Judges the backward of one pair, and mutants of it, in faithful arithmetic."""

    def __init__(self, truths: Truths, options: GateOptions = STANDARD, honest: str | None = None) -> None:
        """`honest`: the pair file; None where `truths` are of one, and it is meant."""
        self.truths = truths
        self.honest = truths.spec.facts.source if honest is None else honest
        self.spec = truths.spec
        self.options = options

    @cached_property
    def cases(self) -> list[FaithfulCase]:
        """Cases under random cotangents: swept shapes, and those with several tiles."""
        return self._with_honest_errors(self._chosen())

    def judge(
        self,
        asked: Sequence[Asked],
        count: int,
        deadline: float,
        on_fate: Callable[[Asked, Fate], None],
    ) -> Rounded:
        """See `RoundingTier.judge`; the notes say at which cases the honest backward is itself outside of the rule."""
        try:
            cases = self.cases
        except KernelAgentError as error:
            for one in asked:
                on_fate(one, Fate(Outcome.ROUNDING, reason=f"not run in faithful arithmetic: {error.message}"))
            return Rounded(notes=(f"faithful arithmetic: {error.message}",))
        sound: dict[int, FaithfulCase] = {}
        notes: list[str] = []

        def heard_honest(run: Run) -> None:
            for case, heard in zip(cases, run.honest, strict=True):
                ratio, grad = case.judge(heard.tensors)
                if ratio <= 1.0:
                    sound[id(case.question)] = case
                else:
                    where = f"{case.question.case.name}: the gradient of {grad} is {ratio:.2f} times what is allowed"
                    notes.append(f"the honest backward in faithful arithmetic at {where}")

        def done(one: Asked, run: Run) -> None:
            if not sound and not notes:
                heard_honest(run)
            on_fate(one, _fate(one, sound))

        questions = [case.question for case in cases]
        limits = replace(self.options.limits, wall_s=_WALL_SECONDS)
        way = Way(limits, deadline, faithful=True, count=count)
        whole = [Asked(one.mutant, whole=True) for one in asked]
        text = read_candidate(self.spec, self.honest)
        try:
            run = run_crowd(questions, [[] for _ in questions], text, whole, self.truths.sandbox, way, done)
        except KernelAgentError as error:
            for one in asked:
                on_fate(one, Fate(Outcome.ROUNDING, reason=f"not run in faithful arithmetic: {error.message}"))
            return Rounded(notes=(f"faithful arithmetic: {error.message}",))
        if not sound and not notes and len(run.honest) == len(cases):
            heard_honest(run)
        return Rounded(len(run.asked) - len(whole), tuple(notes))

    def _chosen(self) -> list[Question]:
        """One case of a shape: the cheapest, one of every dtype, then the largest."""
        suite = Suites(self.truths, self.options, self.honest).gate
        shapes: dict[str, Question] = {}
        for question in suite:
            case = question.case
            if case.kind is CotangentKind.RANDOM and case.needs is None:
                shapes.setdefault(case.point.entry.label, question)
        everything = list(shapes.values())
        first = [q for q in everything if q.case.required][:1]
        largest = sorted(everything, key=lambda q: -q.forward.elements)
        chosen: dict[int, Question] = {id(q): q for q in first}
        seen: set[str] = set()
        for question in largest:
            dtypes = str([form.dtype for form in question.forward.forms if form is not None])
            if dtypes not in seen or len(chosen) < _CASES:
                seen.add(dtypes)
                chosen[id(question)] = question
        return list(chosen.values())[:_CASES]

    def _with_honest_errors(self, questions: list[Question]) -> list[FaithfulCase]:
        tensors: dict[str, Tensor] = {}
        forms: list[dict[str, Any]] = []
        for number, question in enumerate(questions):
            keys = [None if c is None else f"c{number}.{place}" for place, c in enumerate(question.cotangents)]
            tensors |= {key: c for key, c in zip(keys, question.cotangents, strict=True) if key and c is not None}
            forms.append(
                {
                    "args": pack(list(question.forward.args), tensors, f"a{number}"),
                    "kwargs": pack(dict(question.forward.kwargs), tensors, f"k{number}"),
                    "cotangents": keys,
                    "seed": question.case.point.seed,
                }
            )
        payload = {"spec": self.spec.model_dump(mode="json"), "cases": forms}
        entry = "faithful_child:prepared"
        messages = run_truth(self.truths.sandbox, entry, self.spec.facts, payload, tensors, room="bench")
        found = []
        for question, message in zip(questions, messages, strict=True):
            record = message.record
            by_name = {
                form["name"]: NativeGradient(
                    form["name"],
                    message.tensors[f"truth.{form['name']}"],
                    getattr(torch, form["dtype"]),
                    form["scale"],
                    HonestError.sent(form["name"], form, message.tensors),
                )
                for form in record["grads"]
            }
            bits = honest_bits((grad.dtype for grad in by_name.values()), record["dot_bits"])
            grads = {place: by_name[name] for place, name in enumerate(self.spec.grads) if name in by_name}
            found.append(FaithfulCase(question, grads, bits))
        return found


def _fate(one: Asked, sound: dict[int, FaithfulCase]) -> Fate:
    """Killed by the rule, equal to the bit, or within the rule."""
    if one.ended is not None:
        return Fate(Outcome.KILLED, one.ended)
    worst, equal, compared = 0.0, True, 0
    for heard in one.heard:
        case = sound.get(id(heard.question))
        if case is None:
            continue
        if heard.answer.failure is not None:
            failed = Problem(Status.CRASHED, heard.answer.failure.message)
            return Fate(Outcome.INVALID, failed, heard.question.case.name)
        compared += 1
        ratio, grad = case.judge(heard.tensors)
        if ratio > 1.0:
            message = f"the gradient of `{grad}` is {ratio:.1f} times as far off as honest arithmetic may be"
            problem = Problem(Status.PRECISION_DOWNGRADE, message, grad=grad, ratio=ratio)
            return Fate(Outcome.KILLED, problem, heard.question.case.name)
        worst, equal = max(worst, ratio), equal and _equal(heard)
    if not compared:
        return Fate(Outcome.ROUNDING, reason="no case to judge rounding by")
    if equal:
        return Fate(
            Outcome.EQUIVALENT, reason=f"the same bits in faithful arithmetic in {compared} cases", cases=compared
        )
    reason = f"at most {worst:.2f} of the error that the rule of the native tier allows, in {compared} cases"
    return Fate(Outcome.ROUNDING, reason=reason, cases=compared)


def _equal(heard: Heard) -> bool:
    return all(
        torch.equal(tensor.nan_to_num(), heard.tensors[key.removeprefix("honest.")].nan_to_num())
        for key, tensor in heard.tensors.items()
        if key.startswith("honest.") and key.removeprefix("honest.") in heard.tensors
    )
