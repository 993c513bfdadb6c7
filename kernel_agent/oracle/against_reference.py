"""Compares the truth with the user's `reference`: outputs, and gradients against autograd through it.

Both judge the oracle and the user's file, never a candidate. The comparison is as fine as the coarsest dtype that the
reference computes in allows, float32 at the finest: constants in kernels are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernel_agent.oracle.checks import Outcome, ReferenceCheck
from kernel_agent.oracle.cotangents import CotangentKind, Cotangents, make_cotangents, rms
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import ForwardTruth, GradientTruth, Refusal, TruthError
from kernel_agent.oracle.truth import Truths
from kernel_agent.sandbox import Message

_ROUNDINGS = 32
"""Units of rounding that a chain of operations may lose without being wrong."""
_FINEST = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class ReferenceComparison:
    """The outcome for all outputs and gradients at one point."""

    checks: tuple[ReferenceCheck, ...]
    precision: str
    """See `CrossCheck.precision`."""


def compare_with_reference(truths: Truths, forward: ForwardTruth) -> ReferenceComparison:
    """Run the reference at the forward's point. A declared `surrogate` replaces its gradients: none are compared then.

    Raises `TruthError` where the truth refuses.
    """
    spec, point = truths.spec, forward.point
    cotangents: Cotangents = ()
    if spec.grads and not spec.custom_gradient:
        cotangents = make_cotangents(CotangentKind.RANDOM, forward.forms, point.seed + 32452843)
    payload = {"spec": spec.model_dump(mode="json"), "point": point.model_dump(mode="json")}
    tensors = {f"cotangent.{i}": cotangent for i, cotangent in enumerate(cotangents) if cotangent is not None}
    (message,) = run_truth(truths.sandbox, "reference:compared", spec.facts, payload, tensors)
    if "refusal" in message.record:
        refusal = Refusal.model_validate(message.record["refusal"])
        raise TruthError(f"the truth at {point.label} cannot be cross-checked: {refusal}")
    names = [fact.name for fact in spec.outputs]
    if message.record["failed"]:
        reason = f"reference raises {message.record['failed']}"
        unclear = [ReferenceCheck(output=name, outcome=Outcome.INCONCLUSIVE, reason=reason) for name in names]
        return ReferenceComparison(tuple(unclear), "")
    coarsest = max((getattr(torch, name) for name in message.record["dtypes"]), key=_eps, default=torch.float64)
    checks = []
    for i, (name, output) in enumerate(zip(names, forward.outputs, strict=False)):
        given = message.tensors.get(str(i))
        if isinstance(output, Tensor) and given is not None:
            checks.append(_judged(_Pair(name, False, output.to(torch.float64), given), coarsest, 0.0))
    if tensors:
        checks += _gradient_checks(truths, forward, cotangents, message, coarsest)
    precision = "" if coarsest == torch.float64 else str(coarsest).removeprefix("torch.")
    return ReferenceComparison(tuple(checks), precision)


def _gradient_checks(
    truths: Truths, forward: ForwardTruth, cotangents: Cotangents, message: Message, coarsest: torch.dtype
) -> list[ReferenceCheck]:
    used = message.record["used"]
    failed = message.record.get("gradients_failed", "")
    if not used:
        why = f"autograd through the reference raises {failed}" if failed else "the reference is not differentiable"
        return [
            ReferenceCheck(output=name, gradient=True, outcome=Outcome.INCONCLUSIVE, reason=why)
            for name in truths.spec.grads
        ]
    chosen = tuple(cotangent if i in used else None for i, cotangent in enumerate(cotangents))
    (truth,) = truths.gradients(forward, [chosen])
    checks = []
    for name, exact in truth.grads.items():
        given = message.tensors.get(f"grad.{name}")
        if exact is not None and given is not None:
            checks.append(_judged(_Pair(name, True, exact, given), coarsest, _natural_size(truth, name, chosen)))
    return checks


def _natural_size(truth: GradientTruth, name: str, cotangents: Cotangents) -> float:
    """What an element of this gradient is by units alone; one that is zero by algebra has rounding of that size."""
    sizes = tuple(0 if c is None else c.numel() for c in cotangents)
    return truth.natural_size(name, tuple(rms(c) for c in cotangents), sizes)


@dataclass(frozen=True)
class _Pair:
    """What is compared."""

    name: str
    gradient: bool
    exact: Tensor
    given: Tensor

    @property
    def title(self) -> str:
        """The subject of a sentence."""
        return f"the gradient of `{self.name}`" if self.gradient else f"`{self.name}`"


def tolerance_of(coarsest: torch.dtype) -> float:
    """Largest error, relative to the RMS of the values, that a reference which computes in this dtype may explain."""
    return float(_ROUNDINGS * max(_eps(coarsest), _FINEST))


def _judged(pair: _Pair, coarsest: torch.dtype, natural: float) -> ReferenceCheck:
    """Compare element by element, relative to the RMS of the values; `natural` adds what rounding makes of a zero."""
    tolerance = tolerance_of(coarsest)
    exact, given = pair.exact, pair.given
    source = "autograd through the reference" if pair.gradient else "the reference"
    if exact.shape != given.shape:
        reason = f"{pair.title} has shape {tuple(exact.shape)}, {source} gives {tuple(given.shape)}"
        return ReferenceCheck(
            output=pair.name,
            gradient=pair.gradient,
            outcome=Outcome.DISAGREES,
            relative_error=math.inf,
            tolerance=tolerance,
            reason=reason,
        )
    if exact.numel() == 0:
        return ReferenceCheck(output=pair.name, gradient=pair.gradient, outcome=Outcome.AGREES, tolerance=tolerance)
    same = (exact == given) | (exact.isnan() & given.isnan())
    both = exact.isfinite() & given.isfinite()
    error = torch.where(same, 0.0, torch.where(both, (exact - given).abs(), math.inf))
    worst = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))  # torch's loads sympy
    largest = float(error[worst])
    size = max(_finite_rms(given), _finite_rms(exact) if pair.gradient else 0.0)
    allowance = tolerance * size + _ROUNDINGS * max(_eps(coarsest), torch.finfo(torch.float32).eps) * natural
    mine, theirs = float(exact[worst]), float(given[worst])
    outcome, reason = Outcome.AGREES, ""
    if largest > allowance:
        outcome = Outcome.DISAGREES
        reason = f"{pair.title} at {list(worst)} is {mine:.6g}, {source} gives {theirs:.6g}"
        if coarsest != torch.float64:
            reason += f" (it computes in {str(coarsest).removeprefix('torch.')}: {tolerance:.0e} of the RMS is allowed)"
        if pair.gradient and not bool(given.isfinite().all()):
            outcome = Outcome.INCONCLUSIVE
    return ReferenceCheck(
        output=pair.name,
        gradient=pair.gradient,
        outcome=outcome,
        relative_error=largest / size if size else (math.inf if largest else 0.0),
        tolerance=tolerance,
        worst=() if outcome is Outcome.AGREES else worst,
        exact=mine,
        reference=theirs,
        reason=reason,
    )


def _finite_rms(values: Tensor) -> float:
    return float(torch.where(values.isfinite(), values, 0.0).square().mean().sqrt())


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)
