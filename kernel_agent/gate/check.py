"""`check`: the one judge of every backward. Truth first, then the candidate in a process of its own, then the comparison."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass

from kernel_agent.errors import InputError
from kernel_agent.gate import words
from kernel_agent.gate.candidate import CandidateText, read_candidate
from kernel_agent.gate.cases import Case, Plan, ShapePlan, make_plan
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.shape import ShapeRun, run_shape
from kernel_agent.gate.verdict import CaseResult, ForwardChange, Status, Verdict
from kernel_agent.oracle import Truths
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.sandbox import Sandbox

OnCase = Callable[[CaseResult, int, int], None]
"""Called after each case with its result, how many are done, and how many are planned."""


@dataclass
class _Progress:
    """What a check has seen so far."""

    plan: Plan
    on_case: OnCase | None
    results: list[CaseResult]
    first_case: Case | None = None
    first_problem: Problem | None = None
    extra_saved_bytes: int = 0

    def add(self, case: Case, result: CaseResult, problem: Problem | None) -> None:
        self.results.append(result)
        if problem is not None and self.first_problem is None:
            self.first_case, self.first_problem = case, problem
        if self.on_case is not None:
            self.on_case(result, len(self.results), self.plan.size)


def check(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    options: GateOptions = GateOptions(),
    on_case: OnCase | None = None,
    *,
    truths: Truths | None = None,
) -> Verdict:
    """Judge a complete pair file against the truth of `spec`.

    `pair_source` may be a dataset file or an assembled candidate; its check section is neither read nor shown to it.
    `truths` keeps what was computed for earlier candidates; without it, everything is computed for this call.
    A bad candidate is a red verdict. Raises `InputError` or `TruthError` when the spec's own forward cannot be judged by.
    """
    start = time.perf_counter()
    truths = truths or Truths(spec, sandbox)
    try:
        text = read_candidate(spec, pair_source)
    except InputError as error:
        return Verdict(status=Status.BAD_FORMAT, message=error.message, line=error.line, details=error.remedy)
    if text.problem is not None:
        return _red(text.problem, None, None, options, start)
    plan = make_plan(truths, options, accepts_needs=text.accepts_needs)
    progress = _Progress(plan, on_case, [])
    for shape in plan.shapes:
        run = run_shape(truths, sandbox, shape, text, options)
        for outcome in run.outcomes:
            progress.add(outcome.case, outcome.result, outcome.problem)
        progress.extra_saved_bytes = max(progress.extra_saved_bytes, run.extra_saved_bytes)
        if progress.first_problem is not None and options.stop_at_red:
            break
    if progress.first_problem is not None:
        problem = _with_pattern(progress.first_problem, progress, run, shape)
        return _red(problem, progress, _forward_change(spec, text, progress), options, start)
    return _accepted(progress, _forward_change(spec, text, progress), start)


def _accepted(progress: _Progress, change: ForwardChange, start: float) -> Verdict:
    ran = any(result.required for result in progress.results)
    message = f"all {len(progress.results)} cases agree with the exact gradients"
    return Verdict(
        status=Status.GREEN if ran else Status.NO_CASE,
        message=message if ran else "no required entry of SWEEP could be run, so nothing is proven",
        cases=tuple(progress.results),
        cases_planned=progress.plan.size,
        notes=progress.plan.notes,
        forward=change,
        seconds=time.perf_counter() - start,
    )


def _red(
    problem: Problem, progress: _Progress | None, change: ForwardChange | None, options: GateOptions, start: float
) -> Verdict:
    case = progress.first_case.name if progress and progress.first_case else None
    return Verdict(
        status=problem.status,
        message=f"{problem.message} [{case}]" if case else problem.message,
        case=case,
        grad=problem.grad,
        tile=problem.tile,
        ratio=problem.ratio,
        line=problem.line,
        details=problem.details,
        cases=tuple(progress.results) if progress else (),
        cases_planned=progress.plan.size if progress else 0,
        notes=progress.plan.notes if progress else (),
        forward=change,
        seconds=time.perf_counter() - start,
    )


def _with_pattern(problem: Problem, progress: _Progress, run: ShapeRun, shape: ShapePlan) -> Problem:
    """Add what the cases of the red shape have in common: often that is the diagnosis."""
    rows = [problem.details] if problem.details else []
    scores = [(outcome, score) for outcome in run.outcomes for score in outcome.result.grads]
    names = list(dict.fromkeys(score.grad for _, score in scores))
    right = [n for n in names if all(s.passed for _, s in scores if s.grad == n)]
    if right and len(right) < len(names):
        rows.append(f"right in every case at {shape.entry.label}: {words.listed(right)}")
    good = [o.case.name for o in run.outcomes if o.result.status is Status.GREEN]
    bad = [o.case.name for o in run.outcomes if o.result.status is not Status.GREEN]
    earlier = len(progress.results) - len(run.outcomes)
    if good:
        rows.append(f"red: {'; '.join(bad)}")
        rows.append(f"green at this shape: {'; '.join(good)}")
    if earlier:
        rows.append(f"{earlier} cases at other shapes before this one are green")
    return Problem(
        problem.status, problem.message, problem.line, "\n".join(rows), problem.grad, problem.tile, problem.ratio
    )


def _forward_change(spec: KernelSpec, text: CandidateText, progress: _Progress) -> ForwardChange:
    default = spec.facts.source if spec.facts.is_pair else assemble(spec, Candidate(backward=""))
    old, new = (split_sections(source).forward.strip().splitlines() for source in (default, text.source))
    changed = [row for row in difflib.ndiff(old, new) if row[:2] in ("+ ", "- ")]
    return ForwardChange(extra_saved_bytes=progress.extra_saved_bytes, lines_changed=len(changed))
