"""`cross_check`: two independent looks at the truth before anything is judged by it.

The exact gradients against central differences of the forward in float64, and exact outputs and gradients against the
`reference` that the user gave. Both judge the oracle and the user's file, never a candidate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_agent.oracle.against_reference import compare_with_reference
from kernel_agent.oracle.checks import CrossCheck, DerivativeCheck, Outcome, ReferenceCheck
from kernel_agent.oracle.cotangents import CotangentKind, Cotangents, make_cotangents
from kernel_agent.oracle.difference import Slope
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import ForwardTruth, OutputForm, Point, Refusal, TruthError
from kernel_agent.oracle.truth import Truths
from kernel_agent.pairs.sweep import smallest
from kernel_agent.sandbox import Message

TOLERANCE = 1e-5
"""Largest relative difference between an exact and a central-difference derivative that counts as agreement."""


def cross_check(truths: Truths, point: Point | None = None) -> CrossCheck:
    """Check the truth at one point; None: the smallest SWEEP entry. Raises as `Truths.gradients` does."""
    point = point or Point(entry=smallest(truths.spec.sweep))
    forward = truths.forward(point)
    references: tuple[ReferenceCheck, ...] = ()
    precision = ""
    if truths.spec.facts.has_reference:
        compared = compare_with_reference(truths, forward)
        references, precision = compared.checks, compared.precision
    if truths.spec.custom_gradient:
        reason = "the file declares its own gradient with `surrogate`, which the forward's slope need not follow"
        return CrossCheck(point=point.label, references=references, precision=precision, skipped=reason)
    derivatives = _derivatives(truths, forward)
    return CrossCheck(point=point.label, derivatives=derivatives, references=references, precision=precision)


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


def _answered(messages: tuple[Message, ...], point: Point) -> tuple[Message, ...]:
    """The messages; raises `TruthError` when one of them is a refusal: the truth itself had an answer there."""
    for message in messages:
        if "refusal" in message.record:
            refusal = Refusal.model_validate(message.record["refusal"])
            raise TruthError(f"the truth at {point.label} cannot be cross-checked: {refusal}")
    return messages
