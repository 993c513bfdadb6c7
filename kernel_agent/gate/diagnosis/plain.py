"""Hypotheses that need nothing but the truth: scale, sign, transposition, a wrong axis, another input's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from kernel_agent.gate.diagnosis.factors import Factors
from kernel_agent.gate.diagnosis.records import Fault, Hypothesis
from kernel_agent.oracle.residual import ENOUGH, EXACT, fit, left_over, norm, same, telling

Truths = dict[str, Tensor]
"""The exact gradients of all inputs in one case, float64."""

_WORDS = {-1.0: "its sign is wrong", 2.0: "it is twice the truth", 0.5: "it is half the truth"}


@dataclass(frozen=True)
class Seen:
    """One gradient in one case."""

    given: Tensor
    """Float64, of the truth's shape."""
    truths: Truths
    takers: frozenset[str] = frozenset()
    """Other inputs that were given this one's gradient."""


@dataclass(frozen=True)
class _Guess:
    fault: Fault
    form: Callable[[Truths], Tensor]
    """What the gradient would be, of the exact gradients."""
    words: str = ""
    """Empty where the factor is what is found."""


def plain_hypothesis(grad: str, seen: Sequence[Seen], factors: Factors) -> Hypothesis | None:
    """The first guess that explains a gradient in every case it was seen in; `seen` holds at least one."""
    for guess in _guesses(grad, seen[0]):
        fits = [fit(part.given, guess.form(part.truths)) for part in seen]
        worst = max(_of_residual(part, found.left_over, grad) for part, found in zip(seen, fits, strict=True))
        # what cannot be checked in a second case must hold for many elements
        sure = len(seen) > 1 or telling(seen[0].given) >= ENOUGH
        factor = fits[0].factor
        if worst > EXACT or not sure or not all(same(found.factor, factor) for found in fits):
            continue
        if guess.words and not same(factor, 1.0):
            continue
        if same(factor, 0.0):
            return None  # nothing at all: that is seen, and many mistakes end in it
        statement = guess.words or _scaled(factor, factors)
        fault = Fault.SIGN if same(factor, -1.0) else guess.fault
        return Hypothesis(grad=grad, fault=fault, statement=statement, left_over=worst)
    return None


def padding_hypothesis(grad: str, residuals: Sequence[Tensor], factors: Factors) -> Hypothesis | None:
    """Lanes beyond the end that count: every element is off by their number, whatever the cotangent is.

    `residuals` are those of cases with different cotangents, at least two.
    """
    if len(residuals) < 2 or residuals[0].numel() < 2:
        return None
    off = float(residuals[0].flatten()[0])
    worst = max(left_over(residual, torch.full_like(residual, off)) for residual in residuals)
    lanes = round(abs(off))
    said = factors.padding(lanes)
    if worst > EXACT or lanes == 0 or not same(abs(off), lanes) or not said:
        return None
    statement = f"every element is off by {off:g} whatever the cotangent is: {said} beyond the end are counted as 1"
    return Hypothesis(grad=grad, fault=Fault.UNMASKED_TAIL, statement=statement, left_over=worst)


def _of_residual(seen: Seen, left_over: float, grad: str) -> float:
    """What is left over of the gradient, in norms of the residual."""
    residual = norm(seen.given - seen.truths[grad])
    return left_over * norm(seen.given) / residual if residual > 0 else left_over


def _scaled(factor: float, factors: Factors) -> str:
    for known, words in _WORDS.items():
        if same(known, factor):
            return words
    return f"it is {factors.written(factor)} times the truth everywhere"


def _guesses(grad: str, seen: Seen) -> Iterator[_Guess]:
    truths = seen.truths

    def moved(fault: Fault, words: str, change: Callable[[Tensor], Tensor]) -> _Guess:
        return _Guess(fault, lambda these: change(these[grad]), words)

    shape = truths[grad].shape
    for other in seen.takers:  # one mistake before two: gradients of opposite sign that are exchanged look negated, too
        if other in truths and truths[other].shape == shape:
            yield _Guess(Fault.EXCHANGED, itemgetter(other), f"it is the gradient of `{other}`, and the reverse")
    yield _Guess(Fault.SCALE, itemgetter(grad))
    for other in truths:
        if other != grad and truths[other].shape == shape:
            yield _Guess(Fault.EXCHANGED, itemgetter(other), f"it is the gradient of `{other}`")
    for one, two in itertools.combinations(range(len(shape)), 2):
        if shape[one] == shape[two] > 1:
            words = f"it is the truth with dimensions {one} and {two} exchanged"
            yield moved(Fault.TRANSPOSED, words, partial(torch.transpose, dim0=one, dim1=two))
    if len(shape) >= 2:
        words = "it is the transposed truth, written in its own memory order into the right shape"
        yield moved(Fault.TRANSPOSED, words, lambda truth: truth.mT.reshape(shape))
    for dim in (dim for dim, size in enumerate(shape) if size > 1):
        words = f"it is the truth reversed along dimension {dim}"
        yield moved(Fault.WRONG_AXIS, words, partial(torch.flip, dims=(dim,)))
        for shift in (1, -1):
            words = f"it is the truth shifted by {shift:+d} along dimension {dim}"
            yield moved(Fault.WRONG_AXIS, words, partial(torch.roll, shifts=shift, dims=dim))
