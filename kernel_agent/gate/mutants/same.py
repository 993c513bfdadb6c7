"""Whether a mutant's gradient is the honest one: much narrower than the rule, so that what the rule lets by is seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_agent.gate.questions import Question
from kernel_agent.oracle import Cotangents, ForwardTruth
from kernel_agent.oracle.cotangents import rms
from kernel_agent.pairs.spec import KernelSpec

NATURAL = 1e-3
"""Part of the natural size of a gradient of which `SAME` is rounding."""
SAME = 1e-12
"""Norm of the difference over the norm of the honest gradient and what a random cotangent gives; rounding is 1e-15."""


def scale_of(question: Question, name: str) -> float:
    """The S term of a gradient in a case."""
    sizes = tuple(0 if form is None else math.prod(form.shape) for form in question.forward.forms)
    return question.truth.scale(name, tuple(rms(c) for c in question.cotangents), sizes)


def rounding_scale(forward: ForwardTruth, spec: KernelSpec, cotangents: Cotangents, name: str) -> float:
    """The part of the S term that is known without a truth: what rounding makes of a gradient that is zero by algebra.

    `NATURAL` of `norm(output) * norm(cotangent) / norm(input)` per element, as in `GradientTruth.scale`.
    """
    value = forward.argument(spec, name)
    size = _norm(value) if isinstance(value, Tensor) else 0.0
    if not isinstance(value, Tensor) or not size:
        return 0.0
    pairs = zip(forward.outputs, cotangents, strict=False)
    sizes = [_norm(o) * _norm(c) / size for o, c in pairs if isinstance(o, Tensor) and c is not None]
    return NATURAL * math.sqrt(sum(s * s for s in sizes) / max(1, value.numel()))


def _norm(t: Tensor) -> float:
    return float(t.detach().to(torch.float64).nan_to_num(0.0, 0.0, 0.0).norm())


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
