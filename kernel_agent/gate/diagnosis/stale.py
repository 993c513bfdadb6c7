"""Whether a backward reads only a part of a statistic that was saved for every row: then rows take that of another."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.gate.batch import candidate_job
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.records import Fault, Hypothesis
from kernel_agent.gate.options import STANDARD
from kernel_agent.gate.words import in_backward, line_text
from kernel_agent.oracle import Truths

_MOST = 0.5
"""Share of a saved tensor's elements up to which the rest was forgotten: padding at an end is less."""


class _Read(BaseModel):
    """A saved tensor, as the child tells it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    place: int = Field(ge=0, le=1000)
    elements: int
    read: int
    line: int


def stale_statistics(evidence: Evidence, truths: Truths, grads: tuple[str, ...]) -> tuple[Hypothesis, ...]:
    """One hypothesis for each of `grads`, where a statistic is read for few of its elements. Runs the backward again.

    Nothing is fitted: what is told is what the backward read.
    """
    if not grads:
        return ()
    job = candidate_job([evidence.red.question], evidence.text, STANDARD.limits, "kernel_agent.gate.reads_child:read")
    heard = [_Read.model_validate(message.record) for message in truths.sandbox.run(job).messages]
    partly = [one for one in heard if 0 < one.read <= _MOST * one.elements]
    if not partly:
        return ()
    found = min(partly, key=lambda one: one.read / one.elements)
    source = evidence.text.source
    name = in_backward([f"saved[{found.place}]"], source)[0]
    text = line_text(source, found.line)
    where = f"line {found.line} (`{text}`)" if text else "backward"
    statement = (
        f"{where} reads {found.read} of the {found.elements} elements of {name} in all programs together: "
        "rows take the statistic of another row"
    )
    return tuple(
        Hypothesis(grad=grad, fault=Fault.STALE_STATISTIC, statement=statement, left_over=None) for grad in grads
    )
