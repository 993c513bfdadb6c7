"""The line of the candidate that does it, where one can be told: the backward runs again with one operation changed.

A line is named where a single change at it makes every gradient that it reaches exact, in every case that it was tried
on: another factor on one operand of a sum, one more step of a loop, a bound that counts or does not. For gradients that
are not finite it is the line without whose NaN they would be. The child that runs the candidate never sees the truth.
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

from kernel_agent.gate.batch import Question, candidate_job
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.records import Suspect
from kernel_agent.gate.diagnosis.what import cases_of
from kernel_agent.gate.options import STANDARD
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import line_text
from kernel_agent.ir.trials import EditKind
from kernel_agent.oracle import Truths

SECONDS = 3.0
"""Time for trying; what was not tried by then is not suspected."""
EXACT = 1e-6
"""Norm that may be left of an error, over the norm of the error."""
_UNTOUCHED = 1e-12
"""Change of a gradient over its norm up to which an edit does not reach it."""
_ADDING = {"arith.addf": "sum", "arith.subf": "difference"}
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


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    edit: _Edit
    name: str = Field(max_length=200)
    line: int
    variable: str = Field(max_length=200)
    column: int | None = None
    how: str = Field(default="", max_length=200)


class _Heard(BaseModel):
    """One message of the child."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    case: int
    edit: _Edit | None
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


def suspect(evidence: Evidence, truths: Truths) -> Suspect | None:
    """The line that a single change at mends, confirmed on up to three cases; None where there is none."""
    problem = evidence.red.problem
    first = evidence.red.question
    if sum(t.numel() for t in first.truth.grads.values() if t is not None) > _MAX_ELEMENTS or problem is None:
        return None
    if problem.status is Status.NOT_FINITE:
        return _origin(evidence, truths)
    if problem.status is not Status.WRONG_GRADIENT:
        return None
    cases = [outcome.question for outcome in cases_of(evidence, problem.grad or "")]
    if len(cases) < 2:
        return None
    trials = _run(cases[:1], "all", evidence, truths)
    places = {place.edit: place for trial in trials for place in trial.heard.places}
    cures = [cure for trial in trials[1:] if (cure := _cure(trials[0], trial, cases[0])) is not None]
    cures = [cure for cure in cures if problem.grad in cure.grads]
    cures.sort(key=lambda cure: -len(cure.grads))
    best = [cure for cure in cures if len(cure.grads) == len(cures[0].grads)][:6]
    if not best:
        return None
    again = _run(cases[1:], [cure.edit.model_dump(mode="json") for cure in best], evidence, truths)
    sure = [cure for cure in best if _confirmed(cure, again, cases[1:])]
    return _told(sure[0], places, len(cases), evidence) if sure else None


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


def _confirmed(cure: _Cure, trials: Sequence[_Trial], cases: Sequence[Question]) -> bool:
    """Whether the gradients that it reaches are exact in all these cases."""
    seen = [trial for trial in trials if trial.heard.edit == cure.edit]
    if len(seen) != len(cases):
        return False
    for trial in seen:
        for name in cure.grads:
            truth = cases[trial.heard.case].truth.grads[name]
            given = trial.given.get(name)
            if truth is None or given is None or given.shape != truth.shape:
                return False
            if not float((given - truth).norm()) <= EXACT * float(truth.norm()):
                return False
    return True


def _told(cure: _Cure, places: dict[_Edit, _Place], cases: int, evidence: Evidence) -> Suspect | None:
    asked = cure.edit.model_copy(update={"factor": 0.0})
    place = places.get(asked)
    if place is None:
        return None
    what = _operand(place, evidence.text.source)
    grads = "the gradient of " + " and of ".join(cure.grads)
    factor = cure.edit.factor
    change = {
        EditKind.FACTOR: _factor_words(what, factor),
        EditKind.OTHER: "masked lanes read 0 here (`other=0.0`)",
        EditKind.LONGER: "this loop takes one step more",
        EditKind.INCLUSIVE: "the bound of this comparison is counted the other way (`<` for `<=`, or the reverse)",
        EditKind.UNMASKED: "this selection keeps every lane",
        EditKind.FINITE: "",
    }[cure.edit.kind]
    text = line_text(evidence.text.source, place.line)
    return Suspect(
        line=place.line, statement=f"`{text}`: {grads} would be exact in all {cases} cases tried if {change}"
    )


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
    return f"the {number} operand of this {_ADDING[place.name]}" if place.name in _ADDING else "this product"


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
