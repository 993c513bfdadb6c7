"""`make_diagnosis`: where and what is wrong with a red candidate. Never costs a verdict, and never changes one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.layout import ignored_strides
from kernel_agent.gate.diagnosis.matrix import pass_matrix, readings
from kernel_agent.gate.diagnosis.records import Diagnosis, Fault, Hypothesis
from kernel_agent.gate.diagnosis.stale import stale_statistics
from kernel_agent.gate.diagnosis.suspect import Mended, mended
from kernel_agent.gate.diagnosis.what import from_adjoint, from_truth
from kernel_agent.gate.diagnosis.where import regions
from kernel_agent.oracle import Truths

T = TypeVar("T")

_OF_NO_LINE = frozenset({Fault.EXCHANGED, Fault.TRANSPOSED, Fault.WRONG_AXIS, Fault.STRIDES_IGNORED})
"""Mistakes that no change of one operation mends: looking for its line would cost time for nothing."""


def make_diagnosis(evidence: Evidence, truths: Truths) -> Diagnosis:
    """Everything that can be told; a part that fails is empty, with a note that says why."""
    start = time.perf_counter()
    notes: list[str] = []

    def part(name: str, find: Callable[[], T], nothing: T) -> T:
        try:
            return find()
        except Exception as error:  # whatever it is: the verdict stands without it, and the note says what failed
            notes.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            return nothing

    nothing: tuple[Hypothesis, ...] = ()
    plain = part("what", lambda: from_truth(evidence, truths), nothing)
    terms = part("terms", lambda: from_adjoint(evidence, truths, {found.grad for found in plain}), nothing)
    layout = part("layout", lambda: ignored_strides(evidence, truths), nothing)
    named = _first_of_each(*plain, *terms, *layout)
    change = Mended()
    if _unexplained(evidence, named) or any(found.fault not in _OF_NO_LINE for found in named):
        change = part("suspect", lambda: mended(evidence, truths), change)
    named = _first_of_each(*_more_telling(change, named), *named, *change.what)
    stale = part("stale", lambda: stale_statistics(evidence, truths, _unexplained(evidence, named)), nothing)
    return Diagnosis(
        matrix=part("matrix", lambda: pass_matrix(evidence.here), ()),
        readings=part("matrix", lambda: readings(evidence.here), ()),
        where=part("where", lambda: regions(evidence), ()),
        what=(*named, *stale),
        suspect=change.suspect,
        notes=tuple(notes),
        seconds=time.perf_counter() - start,
    )


def _more_telling(change: Mended, named: tuple[Hypothesis, ...]) -> tuple[Hypothesis, ...]:
    """A loop that ends one block early may leave out a whole term; the line that does it says more than the term."""
    missing = {found.grad for found in named if found.fault is Fault.MISSING_TERM}
    early = (found for found in change.what if found.fault is Fault.LAST_BLOCK_SKIPPED)
    return tuple(found for found in early if found.grad in missing and change.suspect is not None)


def _unexplained(evidence: Evidence, named: tuple[Hypothesis, ...]) -> tuple[str, ...]:
    """Wrong gradients of the first red case that no hypothesis is about."""
    return tuple(g for g in evidence.wrong(evidence.red) if g not in {found.grad for found in named})


def _first_of_each(*found: Hypothesis) -> tuple[Hypothesis, ...]:
    """The first explanation of every gradient."""
    kept: dict[str, Hypothesis] = {}
    for hypothesis in found:
        kept.setdefault(hypothesis.grad, hypothesis)
    return tuple(kept.values())


def with_headline(message: str, diagnosis: Diagnosis, grad: str | None) -> str:
    """The verdict's sentence with the explanation of the gradient that it names, or else of the first explained one."""
    about = next((found for found in diagnosis.what if found.grad == grad), None)
    if about is None:
        return f"{message}. {diagnosis.what[0].grad}: {diagnosis.what[0].statement}" if diagnosis.what else message
    begin = f"the gradient of `{grad}` is wrong: "
    if message.startswith(begin):
        sure = "" if about.left_over is None else f" (residual explained to {about.left_over:.0e})"
        return f"{begin}{about.statement}{sure}; {message[len(begin) :]}"
    return f"{message}. {grad}: {about.statement}"
