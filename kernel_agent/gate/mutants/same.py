"""Whether a mutant's gradient is the honest one: much narrower than the rule, so that what the rule lets by is seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_agent.gate.batch import Outcome, Question
from kernel_agent.oracle.cotangents import rms

SAME = 1e-12
"""Norm of the difference over the norm of the honest gradient and what a random cotangent gives; rounding is 1e-15."""


def scale_of(question: Question, name: str) -> float:
    """The S term of a gradient in a case."""
    sizes = tuple(0 if form is None else math.prod(form.shape) for form in question.forward.forms)
    return question.truth.scale(name, tuple(rms(c) for c in question.cotangents), sizes)


def same(given: Tensor, honest: Tensor, scale: float) -> bool:
    """Whether two gradients (equal shapes, NaN and infinities at the same places) are equal to `SAME`."""
    if given.shape != honest.shape:
        return False
    given, honest = given.to(torch.float64), honest.to(torch.float64)
    equal = (given == honest) | (given.isnan() & honest.isnan())
    difference = torch.where(equal, 0.0, given - honest)
    if not bool(difference.isfinite().all()):
        return False
    size = float(torch.where(honest.isfinite(), honest, 0.0).norm()) + scale * math.sqrt(honest.numel())
    return float(difference.norm()) <= SAME * size


def difference(mutant: Outcome, honest: Outcome) -> str | None:
    """The name of the first gradient in which two answers to one case differ; None where they are the same."""
    needs = mutant.case.needs
    for place, name in enumerate(mutant.question.truth.grads):
        if needs is not None and not needs[place]:
            continue
        given, wanted = mutant.given.get(name), honest.given.get(name)
        if given is None and wanted is None:
            continue
        zeros = torch.zeros_like(given if given is not None else wanted)
        scale = scale_of(mutant.question, name) if mutant.question.truth.grads[name] is not None else 0.0
        if not same(zeros if given is None else given, zeros if wanted is None else wanted, scale):
            return name
    return None
