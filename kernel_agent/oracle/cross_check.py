"""`cross_check`: two independent looks at the truth before anything is judged by it.

The exact gradients against central differences of the forward in float64, and the exact outputs against the `reference`
that the user gave. Both judge the oracle and the user's file, never a candidate.
"""

from __future__ import annotations

import enum
import math

import torch
from pydantic import Field
from torch import Tensor

from kernel_agent.oracle.cotangents import CotangentKind, Cotangents, make_cotangents
from kernel_agent.oracle.difference import Slope
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import ForwardTruth, OutputForm, Point, Refusal, TruthError
from kernel_agent.oracle.truth import Truths
from kernel_agent.pairs.spec import Record
from kernel_agent.pairs.sweep import smallest
from kernel_agent.sandbox import Message

TOLERANCE = 1e-5
"""Largest relative difference between an exact and a central-difference derivative that counts as agreement."""


class Outcome(str, enum.Enum):
    """What one comparison says."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    INCONCLUSIVE = "inconclusive"


class DerivativeCheck(Record):
    """A directional derivative of one combination of outputs."""

    outputs: tuple[str, ...]
    exact: float = Field(description="<gradient, direction>")
    numeric: float = Field(description="central difference along the direction")
    relative_difference: float
    outcome: Outcome
    reason: str = ""


class ReferenceCheck(Record):
    """One output against the user's `reference`."""

    output: str
    outcome: Outcome
    relative_error: float = 0.0
    worst: tuple[int, ...] = Field(default=(), description="index of the element that differs most")
    reason: str = ""


class CrossCheck(Record):
    """What both looks say at one point."""

    point: str
    derivatives: tuple[DerivativeCheck, ...] = ()
    references: tuple[ReferenceCheck, ...] = ()
    skipped: str = Field(default="", description="why there are no derivative checks, if there are none")

    @property
    def agrees(self) -> bool:
        """True when nothing disagrees; an inconclusive comparison does not."""
        outcomes = [c.outcome for c in self.derivatives] + [c.outcome for c in self.references]
        return Outcome.DISAGREES not in outcomes


def cross_check(truths: Truths, point: Point | None = None) -> CrossCheck:
    """Check the truth at one point; None: the smallest SWEEP entry. Raises as `Truths.gradients` does."""
    point = point or Point(entry=smallest(truths.spec.sweep))
    forward = truths.forward(point)
    references = _references(truths, forward) if truths.spec.facts.has_reference else ()
    if truths.spec.custom_gradient:
        reason = "the file declares its own gradient with `surrogate`, which the forward's slope need not follow"
        return CrossCheck(point=point.label, references=references, skipped=reason)
    return CrossCheck(point=point.label, derivatives=_derivatives(truths, forward), references=references)


def _derivatives(truths: Truths, forward: ForwardTruth) -> tuple[DerivativeCheck, ...]:
    point, spec = forward.point, truths.spec
    names = tuple(fact.name for fact in spec.outputs)
    alone = [(i,) for i, form in enumerate(forward.forms) if form is not None and form.differentiable]
    combinations = [*alone, tuple(i for (i,) in alone)] if len(alone) > 1 else alone
    sets = [_chosen(forward.forms, chosen, point.seed) for chosen in combinations]
    exact = truths.gradients(forward, sets)
    generator = torch.Generator().manual_seed(point.seed + 104729)
    directions = {
        name: torch.randn(tuple(grad.shape), generator=generator, dtype=torch.float64)
        for name, grad in exact[0].grads.items()
        if grad is not None
    }
    tensors: dict[str, Tensor] = {f"direction.{name}": direction for name, direction in directions.items()}
    for i, cotangents in enumerate(sets):
        tensors |= {f"{i}.{j}": c for j, c in enumerate(cotangents) if c is not None}
    payload = {
        "spec": spec.model_dump(mode="json"),
        "point": point.model_dump(mode="json"),
        "sets": [[None if c is None else f"{i}.{j}" for j, c in enumerate(s)] for i, s in enumerate(sets)],
    }
    messages = _answered(run_truth(truths.sandbox, "difference:differences", spec.facts, payload, tensors), point)
    sizes = _input_sizes(truths, forward)
    checks = []
    for chosen, truth, message in zip(combinations, exact, messages, strict=True):
        along = {
            name: float((grad * directions[name]).sum()) * sizes[name]
            for name, grad in truth.grads.items()
            if grad is not None
        }
        expected = math.sqrt(
            sum(float(g.square().sum()) * sizes[n] ** 2 for n, g in truth.grads.items() if g is not None)
        )
        checks.append(
            _judge(
                tuple(names[i] if i < len(names) else str(i) for i in chosen),
                sum(along.values()),
                float(message.record["value"]),
                expected,
                Slope(message.record["slope"]),
            )
        )
    return tuple(checks)


def _judge(outputs: tuple[str, ...], exact: float, numeric: float, expected: float, slope: Slope) -> DerivativeCheck:
    # Along a random direction the derivative is about norm(gradient); a small one by chance is measured against that.
    size = max(abs(exact), abs(numeric), expected)
    difference = abs(exact - numeric) / size if size else 0.0
    if difference <= TOLERANCE:
        outcome, reason = Outcome.AGREES, ""
    elif slope is Slope.JUMPS:
        outcome, reason = Outcome.INCONCLUSIVE, "the forward jumps along the direction: it has no slope there"
    else:
        outcome, reason = Outcome.DISAGREES, "the exact gradient is not the slope of the forward"
    return DerivativeCheck(
        outputs=outputs, exact=exact, numeric=numeric, relative_difference=difference, outcome=outcome, reason=reason
    )


def _chosen(forms: tuple[OutputForm | None, ...], chosen: tuple[int, ...], seed: int) -> Cotangents:
    kept = tuple(form if i in chosen else None for i, form in enumerate(forms))
    return make_cotangents(CotangentKind.RANDOM, kept, seed + 15485863)


def _input_sizes(truths: Truths, forward: ForwardTruth) -> dict[str, float]:
    """RMS of each input: directions are scaled by it in the child, so that every input moves by the same part."""
    sizes = {}
    for fact in truths.spec.inputs:
        value = forward.argument(truths.spec, fact.name)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            sizes[fact.name] = float(value.to(torch.float64).square().mean().sqrt()) or 1.0
        else:
            sizes[fact.name] = 1.0
    return sizes


def _references(truths: Truths, forward: ForwardTruth) -> tuple[ReferenceCheck, ...]:
    spec = truths.spec
    payload = {"spec": spec.model_dump(mode="json"), "point": forward.point.model_dump(mode="json")}
    (message,) = _answered(run_truth(truths.sandbox, "difference:references", spec.facts, payload), forward.point)
    names = [fact.name for fact in spec.outputs]
    if "failed" in message.record:
        reason = f"reference raises {message.record['failed']}"
        return tuple(ReferenceCheck(output=name, outcome=Outcome.INCONCLUSIVE, reason=reason) for name in names)
    tolerance = _tolerance(forward)
    checks = []
    for i, (name, output) in enumerate(zip(names, forward.outputs, strict=False)):
        given = message.tensors.get(str(i))
        if not isinstance(output, Tensor) or given is None:
            continue
        checks.append(_against_reference(name, output.to(torch.float64), given, tolerance))
    return tuple(checks)


def _answered(messages: tuple[Message, ...], point: Point) -> tuple[Message, ...]:
    """The messages; raises `TruthError` when one of them is a refusal: the truth itself had an answer there."""
    for message in messages:
        if "refusal" in message.record:
            refusal = Refusal.model_validate(message.record["refusal"])
            raise TruthError(f"the truth at {point.label} cannot be cross-checked: {refusal}")
    return messages


def _against_reference(name: str, output: Tensor, given: Tensor, tolerance: float) -> ReferenceCheck:
    if output.shape != given.shape:
        reason = f"`{name}` has shape {tuple(output.shape)}, the reference gives {tuple(given.shape)}"
        return ReferenceCheck(output=name, outcome=Outcome.DISAGREES, relative_error=math.inf, reason=reason)
    both = output.isfinite() & given.isfinite()
    alike = bool(((output == given) | both | (output.isnan() & given.isnan())).all())
    error = torch.where(both, (output - given).abs(), 0.0 if alike else math.inf)
    error = torch.where(output == given, 0.0, error)
    size = float(torch.where(given.isfinite(), given, 0.0).square().mean().sqrt()) if given.numel() else 0.0
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape)) if error.numel() else ()
    largest = float(error.max()) if error.numel() else 0.0
    relative = largest / size if size else (math.inf if largest else 0.0)
    if relative <= tolerance:
        return ReferenceCheck(output=name, outcome=Outcome.AGREES, relative_error=relative)
    at = list(worst)
    reason = f"`{name}` at {at} is {float(output[worst]):.6g}, the reference gives {float(given[worst]):.6g}"
    return ReferenceCheck(output=name, outcome=Outcome.DISAGREES, relative_error=relative, worst=worst, reason=reason)


def _tolerance(forward: ForwardTruth) -> float:
    """A reference may round through any dtype in sight, and through float32 where it says `.float()`."""
    dtypes = {form.dtype for form in forward.forms if form is not None and form.dtype.is_floating_point}
    dtypes |= {
        v.dtype for v in (*forward.args, *forward.kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()
    }
    coarsest = max((float(torch.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    return 32 * max(coarsest, float(torch.finfo(torch.float32).eps) * 8)
