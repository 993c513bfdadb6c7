"""Whether a candidate goes wrong over the layout of a cotangent: it is asked again with the same values, contiguous.

The truth depends on values alone, so the truth of the red case is the truth of this question too.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kernel_agent.gate.batch import Outcome, run_batch
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.records import Fault, Hypothesis
from kernel_agent.gate.options import STANDARD
from kernel_agent.oracle import CotangentKind, Truths
from kernel_agent.oracle.cotangents import LAYOUTS


def ignored_strides(evidence: Evidence, truths: Truths) -> tuple[Hypothesis, ...]:
    """One hypothesis per gradient that is right once a red cotangent is contiguous; runs the candidate once more.

    Only where a contiguous random cotangent passes and another layout does not.
    """
    passing = [o for o in evidence.here if o.case.kind is CotangentKind.RANDOM and o.problem is None]
    red = [o for o in evidence.here if o.case.kind in LAYOUTS and o.problem is not None and not o.case.partial]
    if not passing or not red:
        return ()
    asked = red[0].question
    dense = tuple(None if c is None else c.contiguous() for c in asked.cotangents)
    run = run_batch([replace(asked, cotangents=dense)], truths.spec, truths.sandbox, evidence.text, STANDARD)
    if any(outcome.problem is not None for outcome in run.outcomes) or not run.outcomes:
        return ()
    again = {score.grad: score for score in run.outcomes[0].result.grads}
    layouts = list(dict.fromkeys(LAYOUTS[o.case.kind] for o in red))
    statement = (
        f"the strides of the cotangent are ignored: with the same values in a contiguous cotangent it is exact, "
        f"and it is wrong when the cotangent is {' or '.join(layouts)}"
    )
    return tuple(
        Hypothesis(
            grad=name,
            fault=Fault.STRIDES_IGNORED,
            statement=statement,
            left_over=_left(red[0], name, again[name].relative_error),
        )
        for name in _wrong(red)
        if name in again and again[name].passed
    )


def _wrong(red: list[Outcome]) -> list[str]:
    """Gradients that some red case got wrong; all of them where reading out of bounds is all that is seen."""
    scores = [score for outcome in red for score in outcome.result.grads]
    names = list(dict.fromkeys(score.grad for score in scores))
    return [n for n in names if any(not s.passed for s in scores if s.grad == n)] or names


def _left(outcome: Outcome, name: str, after: float) -> float:
    """The relative error that is left over that of the red case; of the truth where that one is not finite or zero."""
    before = next((s.relative_error for s in outcome.result.grads if s.grad == name), 0.0)
    return after / before if before and math.isfinite(before) else after
