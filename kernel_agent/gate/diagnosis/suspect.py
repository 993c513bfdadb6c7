"""The line of the candidate that does it, where one can be told: the backward runs again with one operation changed.

A line is named where a single change at it makes every gradient that it reaches exact, in every case that it was tried
on, and no change at another line does: another factor on one operand of a sum, one more step of a loop, a bound that
counts or does not. For gradients that are not finite it is the line without whose NaN they would be. The child that
runs the candidate never sees the truth.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kernel_agent.gate.batch import candidate_job
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.records import Fault, Hypothesis, Suspect
from kernel_agent.gate.diagnosis.what import cases_of
from kernel_agent.gate.options import STANDARD
from kernel_agent.gate.questions import Question
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import line_text
from kernel_agent.ir.trials import EditKind
from kernel_agent.oracle import Truths

SECONDS = 3.0
"""Processor time for trying; what was not tried by then is not suspected."""
EXACT = 1e-6
"""Norm that may be left of an error, over the norm of the error."""
_UNTOUCHED = 1e-12
"""Change of a gradient over its norm up to which an edit does not reach it."""
_ADDING = {"arith.addf": "sum", "arith.subf": "difference"}
_CONFIRMED = 12
"""Changes that are tried on further cases."""
_MAX_ELEMENTS = 1 << 17
"""Elements of all gradients together above which nothing is tried."""


class _Edit(BaseModel):
    """An edit as the child tells it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kernel: int
    op: int
    kind: EditKind
    operand: int
    factor: float
    mask: int


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    edit: _Edit
    name: str = Field(max_length=200)
    line: int
    variable: str = Field(max_length=200)
    other: str = Field(default="", max_length=200)
    column: int | None = None
    how: str = Field(default="", max_length=200)
    key: str = Field(default="", max_length=500)
    """Names the place in every case."""


class _Heard(BaseModel):
    """One message of the child."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    case: int
    edit: _Edit | None
    asked: int | None = None
    places: tuple[_Place, ...] = Field(default=(), max_length=5000)
    strange: tuple[_Place, ...] = Field(default=(), max_length=5000)


@dataclass(frozen=True)
class _Trial:
    """The gradients of one case after one edit."""

    heard: _Heard
    given: dict[str, Tensor]


@dataclass(frozen=True)
class _Cure:
    """An edit that makes gradients exact."""

    edit: _Edit
    grads: tuple[str, ...]


@dataclass(frozen=True)
class Mended:
    """What a single change says of a candidate."""

    suspect: Suspect | None = None
    what: tuple[Hypothesis, ...] = ()
    """The mistake of each gradient that the change makes exact, where it is one of the bank's classes."""


def mended(evidence: Evidence, truths: Truths) -> Mended:
    """The line that a single change at mends, confirmed on up to three cases; empty where there is none."""
    problem = evidence.red.problem
    first = evidence.red.question
    if sum(t.numel() for t in first.truth.grads.values() if t is not None) > _MAX_ELEMENTS or problem is None:
        return Mended()
    if problem.status is Status.NOT_FINITE:
        return Mended(_origin(evidence, truths))
    if problem.status is not Status.WRONG_GRADIENT:
        return Mended()
    cases = [outcome.question for outcome in cases_of(evidence, problem.grad or "")]
    if len(cases) < 2:
        return Mended()
    trials = _run(cases[:1], "all", evidence, truths)
    places = {place.edit: place for trial in trials for place in trial.heard.places}
    cures = [cure for trial in trials[1:] if (cure := _cure(trials[0], trial, cases[0])) is not None]
    cures = [cure for cure in cures if problem.grad in cure.grads]
    cures.sort(key=lambda cure: -len(cure.grads))
    best = [cure for cure in cures if len(cure.grads) == len(cures[0].grads)][:_CONFIRMED]
    if not best:
        return Mended()
    asked = [{"name": _place(cure, places).key, "factor": cure.edit.factor} for cure in best]
    again = _run(cases[1:], asked, evidence, truths)
    left = [(cure, _left_over(cure, number, again, cases[1:])) for number, cure in enumerate(best)]
    sure = [(cure, most) for cure, most in left if most <= EXACT]
    if not sure:
        return Mended()
    cure, most = sure[0]
    place = _place(cure, places)
    # what mends it at several lines may have gone wrong at any of them, or between
    alone = {_place(other, places).line for other, _ in sure} == {place.line}
    words = _change(cure.edit, place, evidence.text.source)
    fault = _fault(cure.edit, place)
    text = line_text(evidence.text.source, place.line)
    grads = "the gradient of " + " and of ".join(cure.grads)
    told = f"`{text}`: {grads} would be exact in all {len(cases)} cases tried if {words}"
    what = [
        Hypothesis(
            grad=name, fault=fault, statement=f"it would be exact if on your line `{text}` {words}", left_over=most
        )
        for name in cure.grads
        if fault is not None
    ]
    return Mended(Suspect(line=place.line, statement=told) if alone else None, tuple(what))


def _run(cases: Sequence[Question], edits: Any, evidence: Evidence, truths: Truths) -> list[_Trial]:
    """Trials in the order in which they ran; each case begins with the one without an edit."""
    extra = {"edits": edits, "seconds": SECONDS}
    job = candidate_job(list(cases), evidence.text, STANDARD.limits, "kernel_agent.gate.trial_child:tried", extra)
    report = truths.sandbox.run(job)
    names = truths.spec.grads
    trials = []
    for message in report.messages:
        heard = _Heard.model_validate(message.record)
        given = {n: message.tensors[str(i)].to(torch.float64) for i, n in enumerate(names) if str(i) in message.tensors}
        trials.append(_Trial(heard, given))
    return trials


def _cure(before: _Trial, after: _Trial, question: Question) -> _Cure | None:
    """The edit that makes every gradient exact that it reaches, with the factor that does so."""
    edit = after.heard.edit
    if edit is None:
        return None
    reached: list[str] = []
    wanted, moved = [], []
    for name, truth in question.truth.grads.items():
        old, new = before.given.get(name), after.given.get(name)
        if truth is None or old is None or new is None or not (old.shape == new.shape == truth.shape):
            continue
        if not bool((old.isfinite() & truth.isfinite()).all()):
            continue
        if not bool(new.isfinite().all()):
            return None
        if float((new - old).norm()) <= _UNTOUCHED * float(old.norm()):
            continue
        if not bool(truth.any()):
            return None  # many changes end in zero, and that is no reason to think that it was this one
        reached.append(name)
        wanted.append((truth - old).flatten())
        moved.append((new - old).flatten())
    if not reached:
        return None
    steps = 1.0
    if edit.kind is EditKind.FACTOR:  # gradients are linear in it: taking the operand away tells what each factor does
        along, target = torch.cat(moved), torch.cat(wanted)
        steps = float((along @ target) / (along @ along))
        edit = edit.model_copy(update={"factor": _rounded(1.0 - steps)})
    for target, along in zip(wanted, moved, strict=True):
        if float(target.norm()) == 0 or float((target - steps * along).norm()) > EXACT * float(target.norm()):
            return None
    return _Cure(edit, tuple(reached))


def _rounded(factor: float) -> float:
    """A factor as a small fraction where it is one: it was fitted, so its last digits are noise."""
    near = round(factor * 48) / 48
    return near if math.isclose(near, factor, rel_tol=1e-9, abs_tol=1e-9) else factor


def _place(cure: _Cure, places: dict[_Edit, _Place]) -> _Place:
    return places[cure.edit.model_copy(update={"factor": 0.0})]


def _left_over(cure: _Cure, asked: int, trials: Sequence[_Trial], cases: Sequence[Question]) -> float:
    """The largest error over that without the edit, of the gradients that it reaches in these cases; inf if untried."""
    before = {trial.heard.case: trial for trial in trials if trial.heard.edit is None}
    after = {trial.heard.case: trial for trial in trials if trial.heard.asked == asked}
    most = 0.0
    for number, question in enumerate(cases):
        for name in cure.grads:
            truth = question.truth.grads[name]
            old, new = (trials[number].given.get(name) if number in trials else None for trials in (before, after))
            if truth is None or old is None or new is None or not (old.shape == new.shape == truth.shape):
                return math.inf
            error = float((old - truth).norm())
            left = float((new - truth).norm()) / error if error > 0 else math.inf
            most = max(most, left if math.isfinite(left) else math.inf)
    return most


def _fault(edit: _Edit, place: _Place) -> Fault | None:
    """The class of the bank that the mistake belongs to; None for those that it does not know."""
    if edit.kind is EditKind.FACTOR:
        if place.name not in _ADDING:
            return None  # that the whole gradient has a factor is seen without any trial
        return {-1.0: Fault.TERM_SIGN, 0.5: Fault.DOUBLED_TERM}.get(edit.factor, Fault.FACTOR)
    return {
        EditKind.OTHER: Fault.UNMASKED_TAIL,
        EditKind.MASKED: Fault.UNMASKED_TAIL,
        EditKind.LONGER: Fault.LAST_BLOCK_SKIPPED,
        EditKind.OWN: Fault.STALE_STATISTIC,
        EditKind.TIMES: Fault.FACTOR,
        EditKind.OVER: Fault.FACTOR,
    }.get(edit.kind)


def _change(edit: _Edit, place: _Place, source: str) -> str:
    """The change, after `if`."""
    if edit.kind is EditKind.FACTOR:
        return _factor_words(_operand(place, source), edit.factor)
    named = f"`{place.variable}`" if place.variable else "what is summed up"
    if edit.kind in (EditKind.TIMES, EditKind.OVER):
        how = "multiplied" if edit.kind is EditKind.TIMES else "divided"
        return f"{_operand(place, source)} were {how} by `{place.other}`"
    return {
        EditKind.OTHER: "masked lanes read 0 (`other=0.0`)",
        EditKind.MASKED: f"{named} were zero in the lanes that the mask leaves out",
        EditKind.LONGER: "the loop took one step more",
        EditKind.INCLUSIVE: "the bound of the comparison counted the other way (`<` for `<=`, or the reverse)",
        EditKind.UNMASKED: "the selection kept every lane",
        EditKind.OWN: "every program loaded the element with its own number instead of one for all",
    }[edit.kind]


def _operand(place: _Place, source: str) -> str:
    """What is scaled, as the source writes it where that can be told."""
    if place.name in ("tt.store", "tt.atomic_rmw"):
        return "what is stored here"
    written = _summand(place, source) if place.name in _ADDING else None
    if written is not None:
        return f"`{written}`"
    if place.variable:
        return f"`{place.variable}`"
    number = "first" if place.edit.operand == 0 else "second"
    if place.name in _ADDING:
        return f"the {number} operand of this {_ADDING[place.name]}"
    return "what is summed up here" if place.name == "tt.reduce" else "this product"


def _summand(place: _Place, source: str) -> str | None:
    """The text of an operand of a sum, a difference, or a negation, found by where its right operand begins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            left, right = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            left, right = node.target, node.value
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            left, right = node, node.operand
        else:
            continue
        if (right.lineno, right.col_offset) == (place.line, place.column):
            return ast.unparse(left if place.edit.operand == 0 else right)
    return None


def _factor_words(what: str, factor: float) -> str:
    if factor == -1:
        return f"{what} had the other sign"
    if factor == 0:
        return f"{what} were left out"
    return f"{what} were {factor:.6g} times as large"


def _origin(evidence: Evidence, truths: Truths) -> Suspect | None:
    """The first line that makes NaN, or infinity, without which fewer elements of a gradient would be that."""
    trials = _run([evidence.red.question], "strange", evidence, truths)
    if not trials:
        return None
    places = {place.edit: place for place in trials[0].heard.strange}
    before = _not_finite(trials[0])
    for trial in trials[1:]:
        place = places.get(trial.heard.edit) if trial.heard.edit is not None else None
        if place is not None and _not_finite(trial) < before:
            text = line_text(evidence.text.source, place.line)
            named = f" in `{place.variable}`" if place.variable else ""
            return Suspect(line=place.line, statement=f"`{text}`: here NaN or infinity begins{named}: it {place.how}")
    return None


def _not_finite(trial: _Trial) -> int:
    return sum(int((~given.isfinite()).sum()) for given in trial.given.values())
