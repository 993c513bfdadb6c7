"""What a candidate is asked, and the exact gradients by which its answers are judged.

A case can be put to a candidate before the gradients of its truth are known: `pose` comes first, `Posed.answered` then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.gate.cases import Case, ShapePlan
from kernel_agent.oracle import Cotangents, ForwardTruth, GradientTruth, Point, Truths, make_cotangents
from kernel_agent.oracle.truth import Request


@dataclass(frozen=True)
class Put:
    """One case with everything that is needed to ask it."""

    case: Case
    forward: ForwardTruth
    cotangents: Cotangents


@dataclass(frozen=True)
class Question(Put):
    """One case with everything that is needed to ask and to judge it."""

    truth: GradientTruth
    stub_ops: frozenset[str]
    """Computing torch functions that the stub calls here, at the smallest entry, or at any required shape."""


@dataclass(frozen=True)
class Asked:
    """What a candidate is asked."""

    questions: list[list[Question]]
    """Per shape of the plan; empty where the truth itself has no answer at a shape that is not required."""
    skipped: tuple[str, ...]
    """The points that were left out, each with its reason."""


@dataclass(frozen=True)
class Posed:
    """The cases of a plan with their forwards, before the gradients of their truths are known."""

    shapes: tuple[tuple[Put, ...], ...]
    """Per shape of the plan; empty where the forward has no answer at a shape that is not required."""
    required: frozenset[str]
    """Keys of the points without which there is no verdict."""
    skipped: dict[str, str]
    """Why points were left out so far, by key."""

    def answered(self, truths: Truths) -> Asked:
        """The questions with their truths; gradients that are not known yet are computed in one child.

        Raises `TruthError` where a required case has none.
        """
        skipped = dict(self.skipped)
        forwards: dict[str, ForwardTruth] = {}
        sets: dict[str, list[Cotangents]] = {}
        for put in (put for shape in self.shapes for put in shape):
            forwards[_key(put.case.point)] = put.forward
            sets.setdefault(_key(put.case.point), []).append(put.cotangents)
        for unanswered in truths.prepare([Request(forwards[key], tuple(sets[key])) for key in sets]):
            key = _key(unanswered.point)
            if key in self.required:
                raise unanswered.error
            skipped[key] = f"{unanswered.point.label}: {unanswered.error.message}"
        found = {key: iter(truths.gradients(forwards[key], sets[key])) for key in sets if key not in skipped}
        asked = [[put for put in shape if _key(put.case.point) not in skipped] for shape in self.shapes]
        everywhere = frozenset(truths.spec.torch_ops).union(
            *(put.forward.torch_ops for shape in asked for put in shape if put.case.required)
        )

        def question(put: Put) -> Question:
            truth, ops = next(found[_key(put.case.point)]), everywhere.union(put.forward.torch_ops)
            return Question(put.case, put.forward, put.cotangents, truth, ops)

        return Asked([[question(put) for put in shape] for shape in asked], tuple(skipped.values()))


def pose(truths: Truths, shapes: Sequence[ShapePlan]) -> Posed:
    """The cases of every shape; forwards that are not known yet are computed in one child.

    Raises `TruthError` where the forward has no answer for a required case.
    """
    cases = [case for shape in shapes for case in shape.cases]
    points = {_key(case.point): case.point for case in cases}
    required = frozenset(_key(case.point) for case in cases if case.required)
    skipped: dict[str, str] = {}
    forwards: dict[str, ForwardTruth] = {}
    for (key, point), answer in zip(points.items(), truths.forwards(list(points.values())), strict=True):
        if isinstance(answer, ForwardTruth):
            forwards[key] = answer
        elif key in required:
            truths.forward(point)
        else:
            skipped[key] = f"{point.label}: the forward has no answer there ({answer})"

    def put(case: Case) -> Put:
        forward = forwards[_key(case.point)]
        return Put(case, forward, make_cotangents(case.kind, forward.forms, case.point.seed))

    posed = tuple(tuple(put(case) for case in shape.cases if _key(case.point) in forwards) for shape in shapes)
    return Posed(posed, required, skipped)


def ask(truths: Truths, shapes: Sequence[ShapePlan]) -> Asked:
    """The questions of every shape, truth included; what is not known yet is computed in two children.

    Raises `TruthError` where the truth has no answer for a required case.
    """
    return pose(truths, shapes).answered(truths)


def _key(point: Point) -> str:
    return point.model_dump_json()
