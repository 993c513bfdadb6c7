"""What mistake it is: the residual of every wrong gradient against a bank of hypotheses.

A statement is made only where a hypothesis explains the whole residual, to 1e-6 of its norm, in every case that it is
tried on: it is better to say nothing than to send a repair in a wrong direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_agent.gate.batch import Outcome
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.factors import Factors
from kernel_agent.gate.diagnosis.fits import finite
from kernel_agent.gate.diagnosis.plain import Seen, plain_hypothesis
from kernel_agent.gate.diagnosis.records import Hypothesis
from kernel_agent.oracle import CotangentKind, Truths

_PLAIN_KINDS = (CotangentKind.RANDOM, CotangentKind.STRIDED, CotangentKind.TRANSPOSED, CotangentKind.EXPANDED)
"""Cotangents under which no term of a gradient hides."""
_CASES = 3
"""Cases that a hypothesis is tried on: seeds and layouts differ."""


def hypotheses(evidence: Evidence, truths: Truths) -> tuple[Hypothesis, ...]:
    """The mistakes that explain a wrong gradient at the shape of the first red case, one per gradient at most."""
    found = []
    for grad in truths.spec.grads:
        cases = cases_of(evidence, grad)
        if not cases:
            continue
        seen = [Seen(_given(outcome, grad), _truths(outcome)) for outcome in cases]
        hypothesis = plain_hypothesis(grad, seen, Factors(truths.spec, cases[0].question.forward))
        if hypothesis is not None:
            found.append(hypothesis)
    return tuple(found)


def cases_of(evidence: Evidence, grad: str) -> list[Outcome]:
    """Red cases in which a gradient is wrong by value, the first one first; none where it is not finite."""
    wrong = [o for o in evidence.here if grad in evidence.wrong(o) and o.question.truth.grads[grad] is not None]
    wrong = [o for o in wrong if o.given[grad].shape == _truth(o, grad).shape and finite(o.given[grad])]
    wrong = [o for o in wrong if finite(_truth(o, grad))]
    telling = [o for o in wrong[1:] if o.case.kind in _PLAIN_KINDS]
    other_seeds = [o for o in telling if o.case.point.seed != wrong[0].case.point.seed]
    rest = [o for o in telling if o not in other_seeds[:1]]
    return [*wrong[:1], *other_seeds[:1], *rest][:_CASES]


def _truth(outcome: Outcome, grad: str) -> Tensor:
    truth = outcome.question.truth.grads[grad]
    assert truth is not None
    return truth


def _given(outcome: Outcome, grad: str) -> Tensor:
    return outcome.given[grad].to(torch.float64)


def _truths(outcome: Outcome) -> dict[str, Tensor]:
    return {name: truth for name, truth in outcome.question.truth.grads.items() if truth is not None}
