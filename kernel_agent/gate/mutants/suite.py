"""The cases that mutants are held against: the gate's own, and a wider suite that a mutant must pass to be no mistake.

The wider suite holds shapes that no verdict is made with: other seeds, more odd sizes, and sizes at which every axis of
a grid has several tiles, and one more of them than grouped orders of tiles take at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from kernel_agent.gate.candidate import read_candidate
from kernel_agent.gate.cases import Case, ShapePlan, affordable, make_plan
from kernel_agent.gate.derived_shapes import tiled_entries
from kernel_agent.gate.mutants.same import rounding_scale, scale_of
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.questions import Question, ask
from kernel_agent.oracle import CotangentKind, ForwardTruth, GradientTruth, Point, Truths, make_cotangents
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry

_MORE_SEEDS = 100
_TILED = 3
"""Shapes of several tiles at most."""


class Suites:
    """The questions of one pair whose honest backward is green."""

    def __init__(self, truths: Truths, options: GateOptions, honest: str) -> None:
        """`honest` is the pair file."""
        self.truths = truths
        self.honest = honest
        self.options = options

    @cached_property
    def gate(self) -> list[Question]:
        """Every case of a verdict, in its order: the cheapest shape first."""
        text = read_candidate(self.truths.spec, self.honest)
        plan = make_plan(self.truths, self.options, accepts_needs=text.accepts_needs)
        return [question for questions in ask(self.truths, plan.shapes).questions for question in questions]

    @cached_property
    def wider(self) -> list[Question]:
        """Cases beside them, asked for equality with the honest backward: they hold no truth."""
        return list(self._unseen())

    @property
    def shapes(self) -> list[ShapeEntry]:
        """All entries that either suite holds."""
        found = {q.case.point.entry.label: q.case.point.entry for q in (*self.gate, *self.wider)}
        return list(found.values())

    def with_truth(self, question: Question) -> Question:
        """The same case with its truth. Raises `TruthError` where there is none."""
        ((found,),) = ask(self.truths, [ShapePlan(question.case.point.entry, True, 0, (question.case,))]).questions
        return found

    def _unseen(self) -> Iterator[Question]:
        seen = {question.case.point.entry.label for question in self.gate}
        seeds = tuple(seed + _MORE_SEEDS for seed in self.options.seeds)
        options = replace(self.options, seeds=seeds, odd_sizes=3 * self.options.odd_sizes, values=())
        plan = make_plan(self.truths, options, accepts_needs=False)
        kinds = (CotangentKind.RANDOM, CotangentKind.STRIDED)
        # swept shapes on other values, once each; of new shapes every one
        cases = [replace(shape.cases[0], kind=kinds[k % 2]) for k, shape in enumerate(plan.shapes) if shape.cases]
        cases.sort(key=lambda case: case.point.entry.label in seen)
        required = [question.case.point.entry for question in self.gate if question.case.required]
        tiled = [entry for entry in tiled_entries(required, self.options) if entry.label not in seen]
        tiled = affordable(self.truths, tiled, 2 * self.options.max_elements, self.options)
        new = [Case(Point(entry=e, seed=seeds[0]), kinds[k % 2], False) for k, e in enumerate(tiled)]
        answers = self.truths.forwards([case.point for case in (*new, *cases)])
        sound = [
            (case, answer)
            for case, answer in zip((*new, *cases), answers, strict=True)
            if isinstance(answer, ForwardTruth) and (case.required or not answer.findings)
        ]
        few = [pair for pair in sound if pair[0] in new][:_TILED]
        for case, forward in (*few, *(pair for pair in sound if pair[0] not in new)):
            cotangents = make_cotangents(case.kind, forward.forms, case.point.seed)
            nothing = GradientTruth({}, {}, {}, forward.provenance)
            yield Question(case, forward, cotangents, nothing, frozenset())


def scales(questions: Sequence[Question], spec: KernelSpec) -> list[list[float]]:
    """How large a difference in each gradient of each case is rounding; the larger of what is known of it."""

    def scale(question: Question, name: str) -> float:
        least = rounding_scale(question.forward, spec, question.cotangents, name)
        return least if question.truth.grads.get(name) is None else max(least, scale_of(question, name))

    return [[scale(question, name) for name in spec.grads] for question in questions]
