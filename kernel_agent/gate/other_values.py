"""Cases on inputs that no candidate can have seen: a seed drawn here, and other distributions of values.

They are asked once the cheapest shape is green, at that shape, and none is required: where the forward has no finite
answer they are left out, and a red one counts only where differences of the forward confirm the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import Status
from kernel_agent.oracle import ForwardTruth, Outcome, Point, Refusal, RefusalKind, TruthError, Truths, cross_check
from kernel_agent.oracle.checks import DerivativeCheck
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.values import Values

FEW = 12
"""Cases of a budget that does not reach beyond the cheapest shape: it gets no other values."""
_BEND = 0.5
"""Relative difference of a slope up to which kinks at some of the elements explain it."""
_VALUES = (Status.WRONG_GRADIENT, Status.WRONG_FORWARD, Status.NOT_FINITE)
"""What may be red because the truth is badly conditioned; memory errors and the like are red on any values."""


def value_points(truths: Truths, entry: ShapeEntry, options: GateOptions) -> list[Point]:
    """The points of all distributions at one entry, on the drawn seed, then on those of earlier verdicts."""
    if options.max_cases <= FEW:
        return []
    seeds = (truths.drawn_seed, *options.drawn)
    return [Point(entry=entry, seed=seed, values=values) for seed in seeds for values in options.values]


def usable(
    points: Sequence[Point], answers: Sequence[ForwardTruth | Refusal], usual: ForwardTruth, notes: list[str]
) -> list[Point]:
    """The points at which the forward answers as soundly as it does on `usual` values; the others go to the notes."""
    kept: list[Point] = []
    left_out: dict[str, list[str]] = {}
    for point, answer in zip(points, answers, strict=True):
        reason = _why_not(answer, usual)
        refused = isinstance(answer, Refusal) and answer.kind is RefusalKind.VALUES
        if refused and point.values in (Values.SPACED, Values.NUMBERS):  # there are no rows, or no numbers
            continue
        if point.values is Values.SPACED:
            as_made = point.model_copy(update={"values": Values.AS_MADE})
            found = answers[points.index(as_made)] if as_made in points else None
            reason = "" if not reason and _same(answer, found) else "the forward takes rows without gaps alone"
        if reason:
            left_out.setdefault(reason, []).append(_said(point))
        else:
            kept.append(point)
    notes += [f"values left out: {', '.join(said)} ({reason})" for reason, said in left_out.items()]
    return kept


def in_doubt(truths: Truths, point: Point, status: Status, options: GateOptions) -> bool:
    """Whether a red case may be the truth's own weakness: only here, and only where its slope is not confirmed.

    Takes differences of the forward at these values, in a truth child; costs nothing on the way to a green verdict.
    """
    if status not in _VALUES or (point.values is Values.AS_MADE and point.seed in options.seeds):
        return False
    try:
        found = cross_check(truths, point)
    except TruthError:
        return True
    if point.extreme:
        return any(map(_steep, found.derivatives))
    return not found.agrees or any(check.outcome is not Outcome.AGREES for check in found.derivatives)


def _steep(check: DerivativeCheck) -> bool:
    """Whether a slope may have no end, as that of a root at zero. At a kink it only bends."""
    return not check.relative_difference <= _BEND


def _why_not(answer: ForwardTruth | Refusal, usual: ForwardTruth) -> str:
    if isinstance(answer, Refusal):
        return str(answer).splitlines()[0]
    if answer.findings and not usual.findings:
        return f"the forward itself: {answer.findings[0]}"
    if _finite(usual) and not _finite(answer):
        return "the forward's outputs are not finite there"
    return ""


def _same(one: ForwardTruth | Refusal, other: ForwardTruth | Refusal | None) -> bool:
    if not isinstance(one, ForwardTruth) or not isinstance(other, ForwardTruth):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-9, equal_nan=True)
        for a, b in zip(one.outputs, other.outputs, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    )


def _finite(forward: ForwardTruth) -> bool:
    return all(bool(torch.isfinite(output).all()) for output in forward.outputs if isinstance(output, Tensor))


def _said(point: Point) -> str:
    return "the drawn seed" if point.values is Values.AS_MADE else point.values.value
