"""Mutants of gradients: what a wrong backward could return, made of the truth: no source and no child."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.gate.mutants.records import Kind, MutantResult, Outcome
from kernel_agent.gate.mutants.same import same, scale_of
from kernel_agent.gate.questions import Question
from kernel_agent.gate.rule import compare
from kernel_agent.gate.verdict import Status


@dataclass(frozen=True)
class GradientMutator:
    """One way in which a gradient is wrong."""

    name: str
    change: Callable[[Tensor], Tensor]
    """From the exact gradient (any shape, float64) to one of the same shape."""


def _without_last(t: Tensor) -> Tensor:
    changed = t.clone()
    changed.flatten()[-1:] = 0.0
    return changed


def _without_last_row(t: Tensor) -> Tensor:
    changed = t.clone()
    if t.ndim:
        changed[-1:] = 0.0
    return changed


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().view(t.shape) if t.ndim > 1 else t.clone()


GRADIENT_MUTATORS = (
    GradientMutator("gradient is zero", torch.zeros_like),
    GradientMutator("gradient has the wrong sign", torch.neg),
    GradientMutator("gradient is doubled", lambda t: 2.0 * t),
    GradientMutator("gradient is off by one part in ten thousand", lambda t: 1.0001 * t),
    GradientMutator("gradient is rounded to bfloat16", lambda t: t.to(torch.bfloat16).to(t.dtype)),
    GradientMutator("gradient is shifted by one element", lambda t: t.flatten().roll(1).view(t.shape)),
    GradientMutator("gradient is transposed", _transposed),
    GradientMutator("gradient is the same in all rows", lambda t: t[:1].expand(t.shape) if t.ndim else t.clone()),
    GradientMutator("last element of a gradient is zero", _without_last),
    GradientMutator("last row of a gradient is zero", _without_last_row),
)


def gradient_mutants(questions: Sequence[Question]) -> Iterator[MutantResult]:
    """Every mutant of every gradient, held to the rule of the exact tier on all cases of a suite.

    Gradients of equal shape are exchanged as well.
    """
    names = [name for name, grad in questions[0].truth.grads.items() if grad is not None]
    for name in names:
        for mutator in GRADIENT_MUTATORS:
            changed = [_changed(question, name, mutator.change) for question in questions]
            yield _judged(name, mutator.name, questions, changed)
        for other in names[names.index(name) + 1 :]:
            pairs = [(question.truth.grads[name], question.truth.grads[other]) for question in questions]
            if all(a is not None and b is not None and a.shape == b.shape for a, b in pairs):
                yield _judged(name, f"gradient is that of another input ({other})", questions, [b for _, b in pairs])


def _changed(question: Question, name: str, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    truth = question.truth.grads[name]
    return None if truth is None else change(truth.to(torch.float64))


def _judged(name: str, what: str, questions: Sequence[Question], changed: Sequence[Tensor | None]) -> MutantResult:
    mutator = what.partition(" (")[0]
    differs = None
    for question, given in zip(questions, changed, strict=True):
        truth = question.truth.grads[name]
        needs = question.case.needs
        if truth is None or given is None or (needs is not None and not needs[list(question.truth.grads).index(name)]):
            continue
        scale = scale_of(question, name)
        seen = compare(given, truth, scale)
        if not seen.passed:
            return MutantResult(
                kind=Kind.GRADIENT,
                mutator=mutator,
                mutant=f"{name}: {what}",
                outcome=Outcome.KILLED,
                status=Status.WRONG_GRADIENT,
                case=question.case.name,
            )
        if differs is None and not same(given, truth, scale):
            differs = question.case.name
    outcome = Outcome.EQUIVALENT if differs is None else Outcome.SURVIVED
    reason = f"the gradient itself in {len(questions)} cases" if differs is None else ""
    return MutantResult(
        kind=Kind.GRADIENT,
        mutator=mutator,
        mutant=f"{name}: {what}",
        outcome=outcome,
        status=Status.GREEN,
        case=differs,
        reason=reason,
    )
