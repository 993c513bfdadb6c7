"""Cases for the configurations of autotuned kernels that no other case has run: a clock may choose any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernel_agent.gate.batch import BatchRun, turns
from kernel_agent.gate.cases import Plan, ShapePlan
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.questions import Question


def turns_of(runs: Sequence[BatchRun]) -> int:
    """So many configurations of each autotuned kernel were asked for."""
    return sum(len(set(turns(run.script.questions))) for run in runs)


def more_configurations(runs: Sequence[BatchRun], plan: Plan, options: GateOptions) -> tuple[list[Question], Plan]:
    """The first question once for each of them, and the plan with these cases; what there is no room for is noted.

    Every case of `runs` took the next configuration, from the first one on.
    """
    if not runs:
        return [], plan
    first = runs[0].script.questions[0]
    choices = max((answer.choices for run in runs for answer in run.script.of_backwards), default=0)
    done = turns_of(runs)
    room = range(done, min(choices, done + options.max_cases - plan.size))
    more = [replace(first, case=replace(first.case, configuration=number)) for number in room]
    notes = plan.notes
    if (left := choices - done - len(more)) > 0:
        notes += (
            f"{left} of {choices} configurations of an autotuned kernel left out: the budget is {options.max_cases}",
        )
    if not more:
        return [], replace(plan, notes=notes)
    shape = ShapePlan(first.case.point.entry, True, first.forward.elements, tuple(one.case for one in more))
    return more, replace(plan, shapes=(*plan.shapes, shape), notes=notes)
