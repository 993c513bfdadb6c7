"""What mistake it is: the residual of every wrong gradient against a bank of hypotheses.

A statement is made only where a hypothesis explains the whole residual, to 1e-6 of its norm, in every case that it is
tried on: it is better to say nothing than to send a repair in a wrong direction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kernel_agent.gate.batch import Outcome
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.factors import Factors
from kernel_agent.gate.diagnosis.plain import Seen, padding_hypothesis, plain_hypothesis
from kernel_agent.gate.diagnosis.records import Hypothesis
from kernel_agent.gate.diagnosis.sentences import Sentences
from kernel_agent.oracle import CotangentKind, Truths
from kernel_agent.oracle.residual import EXACT, finite, norm
from kernel_agent.oracle.terms import WrongCase, explain

_PLAIN_KINDS = (CotangentKind.RANDOM, CotangentKind.STRIDED, CotangentKind.TRANSPOSED, CotangentKind.EXPANDED)
"""Cotangents under which no term of a gradient hides."""
_CASES = 3
"""Cases that a hypothesis is tried on: seeds and layouts differ."""


def from_truth(evidence: Evidence, truths: Truths) -> tuple[Hypothesis, ...]:
    """What the exact gradients alone explain at the shape of the first red case, one per gradient at most."""
    found = []
    for grad, outcomes in _cases(evidence, truths).items():
        seen = [Seen(_given(outcome, grad), _truths(outcome), _takers(outcome, grad)) for outcome in outcomes]
        factors = Factors(truths.spec, outcomes[0].question.forward)
        residuals = [part.given - part.truths[grad] for part in seen]
        hypothesis = plain_hypothesis(grad, seen, factors) or padding_hypothesis(grad, residuals, factors)
        found += [] if hypothesis is None else [hypothesis]
    return tuple(found)


def from_adjoint(evidence: Evidence, truths: Truths, explained: Collection[str]) -> tuple[Hypothesis, ...]:
    """What the graph of the forward explains of the gradients that are not `explained`, one per gradient at most.

    Raises what a question to a truth child does.
    """
    found: dict[str, Hypothesis] = {}
    rest = {grad: outcomes for grad, outcomes in _cases(evidence, truths).items() if grad not in explained}
    while rest:
        # gradients that are first wrong in the same case are explained by one child
        first = next(iter(rest.values()))[0]
        together = {grad: outcomes for grad, outcomes in rest.items() if outcomes[0] is first}
        sentences = Sentences(truths.spec, Factors(truths.spec, first.question.forward))
        said = explain(truths, _wrong_cases(together), block_sizes(evidence.text.source))
        found |= {explanation.grad: sentences.hypothesis(explanation) for explanation in said}
        rest = {grad: outcomes for grad, outcomes in rest.items() if grad not in together}
    return tuple(found[grad] for grad in truths.spec.grads if grad in found)


def _cases(evidence: Evidence, truths: Truths) -> dict[str, list[Outcome]]:
    """The cases of every gradient that is wrong by value."""
    cases = {grad: cases_of(evidence, grad) for grad in truths.spec.grads}
    return {grad: outcomes for grad, outcomes in cases.items() if outcomes}


def _wrong_cases(cases: Mapping[str, Sequence[Outcome]]) -> list[WrongCase]:
    """Every case that some gradient is to be explained in, the common first one first."""
    outcomes = list({id(outcome): outcome for listed in cases.values() for outcome in listed}.values())
    return [
        WrongCase(
            outcome.question.forward,
            outcome.question.cotangents,
            {
                grad: _given(outcome, grad) - _truth(outcome, grad)
                for grad, listed in cases.items()
                if any(outcome is one for one in listed)
            },
            tuple(score.grad for score in outcome.result.grads if not score.passed),
        )
        for outcome in outcomes
    ]


def block_sizes(source: str) -> tuple[int, ...]:
    """Whole numbers in a source that may be sizes of blocks."""
    found = {int(number) for number in re.findall(r"(?<![\w.])\d{1,5}(?![\w.])", source)}
    return tuple(sorted(number for number in found if 2 <= number <= 1 << 14))


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


def _takers(outcome: Outcome, grad: str) -> frozenset[str]:
    """Other inputs that were given this one's gradient."""
    truth = _truth(outcome, grad)
    others = {name: given for name, given in outcome.given.items() if name != grad and given.shape == truth.shape}
    close = EXACT * norm(truth)
    return frozenset(name for name, given in others.items() if norm(given.to(torch.float64) - truth) <= close)


def _truths(outcome: Outcome) -> dict[str, Tensor]:
    return {name: truth for name, truth in outcome.question.truth.grads.items() if truth is not None}
