"""What a candidate's process says for the candidate is not believed: its record is carried out again without its code.

A green answer comes from a process that ran the candidate, which may have patched everything in it. So the steps it
wrote down (torch functions, launches with arguments and grid) go to a second process, which has the user's forward and
the candidate's kernels and nothing else of the candidate. The gradients, launches, torch functions and findings that
are judged are the second one's. What was red is red without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernel_agent.gate.answer import Stage
from kernel_agent.gate.batch import BatchRun, Outcome, candidate_job, judged_batch
from kernel_agent.gate.candidate import CandidateText, default_pair
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.kernels_alone import kernels_alone
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import listed
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Sandbox

ENTRY = "kernel_agent.gate.replay_child:replayed"
_AGAIN = "carried out again from its record, without the candidate's code: "


def recompute(
    runs: Sequence[BatchRun], spec: KernelSpec, sandbox: Sandbox, text: CandidateText, options: GateOptions
) -> BatchRun:
    """All cases of green batches again, in one process that holds no code of the candidate."""
    kernels = kernels_alone(text.source, default_pair(spec))
    questions = [outcome.question for run in runs for outcome in run.outcomes]
    extra = {
        "source": kernels.text,
        "trusted_lines": kernels.trusted_lines,
        "forwards": [program for run in runs for program in run.script.programs(Stage.FORWARD)],
        "backwards": [program for run in runs for program in run.script.programs(Stage.BACKWARD)],
        "cotangents": [question.case.kind.value for question in questions],
        "again": [question.case.again for question in questions],
    }
    limits = replace(options.limits, wall_s=len(runs) * options.limits.wall_s)
    job = candidate_job(questions, text, limits, ENTRY, extra)
    again = judged_batch(sandbox.run(job), questions, spec, text, options)
    outcomes = [_named(outcome) for outcome in again.outcomes]
    tampering = _tampering(runs)
    if tampering is not None and all(outcome.problem is None for outcome in outcomes):
        outcomes[-1] = _refused(outcomes[-1], tampering)
    return replace(again, outcomes=tuple(outcomes))


def _tampering(runs: Sequence[BatchRun]) -> Problem | None:
    """What a right backward has done besides that would last where it is used."""
    names = sorted({name for run in runs for name in run.script.replaced})
    if names:
        remedy = "Call what other modules hold and leave it there: the file runs in programs that use it, too."
        return Problem(Status.TAMPERED, f"the file replaces {listed(names)}", details=remedy)
    left = max(run.script.report.left_behind for run in runs)
    if left:
        remedy = "A backward ends with what it starts."
        return Problem(Status.TAMPERED, f"the candidate leaves processes behind: {left}", details=remedy)
    return None


def _named(outcome: Outcome) -> Outcome:
    """A red outcome says that it is not what the candidate's process answered."""
    if outcome.problem is None:
        return outcome
    return _refused(outcome, replace(outcome.problem, message=_AGAIN + outcome.problem.message))


def _refused(outcome: Outcome, problem: Problem) -> Outcome:
    result = outcome.result.model_copy(update={"status": problem.status, "message": problem.message})
    return replace(outcome, problem=problem, result=result)
