"""`check`: the one judge of every backward. Truth first, the candidate in a process of its own, then the comparison."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kernel_agent.errors import InputError
from kernel_agent.gate import words
from kernel_agent.gate.ahead import Ahead
from kernel_agent.gate.batch import BatchRun, Outcome, candidate_job, judged_batch
from kernel_agent.gate.candidate import CandidateText, default_pair, read_candidate
from kernel_agent.gate.cases import Plan, looks, make_plan
from kernel_agent.gate.diagnosis.diagnose import make_diagnosis, with_headline
from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.more_configurations import more_configurations, turns_of
from kernel_agent.gate.options import STANDARD, GateOptions, lesser
from kernel_agent.gate.order import distinct
from kernel_agent.gate.other_values import in_doubt
from kernel_agent.gate.questions import Asked, Posed, Question, ask, pose
from kernel_agent.gate.recomputed import Recomputation
from kernel_agent.gate.rule import VERSION
from kernel_agent.gate.verdict import CaseResult, ForwardChange, Status, Suite, Verdict
from kernel_agent.machine import Machine, installed_versions
from kernel_agent.oracle import Truths
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.values import EXTREME
from kernel_agent.sandbox import LeftFiles, Report, Sandbox, missing_walls

OnCase = Callable[[CaseResult, int, int], None]
"""Called after each case with its result, how many are done, and how many are planned."""


@dataclass
class _Progress:
    """What a check has seen so far."""

    plan: Plan
    on_case: OnCase | None
    outcomes: list[Outcome] = field(default_factory=list)
    first_red: Outcome | None = None
    extra_saved_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome and tell whoever watches. Tensors are kept of one shape: the red one, once there is one."""
        if self.first_red is None:
            entry = outcome.case.point.entry
            if self.outcomes and self.outcomes[-1].case.point.entry != entry:
                self.outcomes = [o.without_tensors() for o in self.outcomes]
            self.first_red = None if outcome.problem is None else outcome
        elif not self.at_red_shape(outcome):
            outcome = outcome.without_tensors()
        self.outcomes.append(outcome)
        if self.on_case is not None:
            self.on_case(outcome.result, len(self.outcomes), self.plan.size)

    def begin_again(self) -> None:
        """Forget outcomes that all were green and that nobody needs to be told of once more."""
        self.outcomes, self.on_case, self.extra_saved_bytes = [], None, 0

    def at_red_shape(self, outcome: Outcome) -> bool:
        """Whether an outcome belongs to the shape of the first red one."""
        return self.first_red is not None and outcome.case.point.entry == self.first_red.case.point.entry


def check(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    options: GateOptions = STANDARD,
    on_case: OnCase | None = None,
    *,
    truths: Truths | None = None,
    diagnose: bool = True,
) -> Verdict:
    """Judge a complete pair file against the truth of `spec`.

    `pair_source` may be a dataset file or an assembled candidate; its check section is neither read nor shown to it.
    `truths` keeps what was computed for earlier candidates; without it, everything is computed for this call.
    `diagnose` says of a red verdict where and what is wrong as well, for some seconds more.
    A bad candidate is a red verdict. Raises `InputError` or `TruthError` when the spec's forward cannot be judged by.
    """
    start = time.perf_counter()
    truths = truths or Truths(spec, sandbox)
    try:
        text = read_candidate(spec, pair_source)
    except InputError as error:
        return Verdict(status=Status.BAD_FORMAT, message=error.message, line=error.line, details=error.remedy)
    if text.problem is not None:
        return _red(text.problem, None, None, start)
    seen = looks(truths, options)
    plan = make_plan(truths, options, accepts_needs=text.accepts_needs)
    done = _examined(plan, truths, sandbox, text, options, on_case)
    progress, runs = done.progress, done.runs
    red = progress.first_red
    if red is not None and not done.again and in_doubt(truths, red.case.point, red.result.status, options):
        return _without_values(spec, pair_source, sandbox, options, on_case, truths, diagnose, red)
    walls = [note for run in runs[:1] for note in missing_walls(run.script.report.protections)]
    notes = (*progress.plan.notes, *seen(), *walls, *_left_files((*runs, *done.again)))
    progress.plan = replace(progress.plan, notes=notes)
    change = _forward_change(spec, text, progress)
    made_with = {"suite": suite(truths, options), "machine": Machine(versions=installed_versions())}
    if progress.first_red is not None and progress.first_red.problem is not None:
        verdict = _red(_with_pattern(progress.first_red.problem, progress), progress, change, start)
        verdict = verdict.model_copy(update=made_with)
        told = diagnose and not done.again and not progress.first_red.problem.tuned
        verdict = _diagnosed(verdict, progress, truths, text) if told else verdict
        if any(outcome.case.point.seed == truths.drawn_seed for outcome in progress.outcomes):
            truths.draw_again()  # the verdict names it, and the next candidate's author may read that
        return verdict
    answers = [answer for run in done.again for answer in run.script.of_backwards]
    chance = {"unordered": distinct(answers, text.source)}
    return _accepted(progress, change, start, options).model_copy(update=made_with | chance)


@dataclass(frozen=True)
class _Examined:
    """What the processes of a check have said."""

    progress: _Progress
    runs: tuple[BatchRun, ...]
    """Of the candidate."""
    again: tuple[BatchRun, ...]
    """Of what was carried out again; empty where the candidate's own answers are red."""


def _examined(
    plan: Plan,
    truths: Truths,
    sandbox: Sandbox,
    text: CandidateText,
    options: GateOptions,
    on_case: OnCase | None,
) -> _Examined:
    """Ask a plan. What has no need of each other runs side by side."""
    with Ahead(sandbox) as ahead:
        posed = pose(truths, plan.shapes)
        first = _begun(posed, ahead, text, options, truths.lowered)
        asked = posed.answered(truths)
        progress = _Progress(_without_skipped(plan, asked), on_case)
        again = Recomputation(truths, ahead, text, options)
        runs: list[BatchRun] = []
        for questions in _batches(asked.questions, progress, runs, options):
            if runs or (report := first(questions)) is None:
                known = {content: one for run in runs for content, one in run.script.lowered.items()}
                job = candidate_job(
                    questions, text, options.limits, lowered={**known, **truths.lowered}, asked=turns_of(runs)
                )
                report = sandbox.run(job, again.listener(questions))
            runs.append(judged_batch(report, questions, truths.spec, text, options))
            _add(runs[-1], progress, options)
            if progress.first_red is None:
                again.go_on(runs[-1])
            elif options.stop_at_red:
                break
        if progress.first_red is not None or not runs:
            return _Examined(progress, tuple(runs), ())
        progress.begin_again()
        found = again.found(runs)
        for run in found:
            _add(run, progress, options)
        return _Examined(progress, tuple(runs), found)


def _begun(
    posed: Posed, ahead: Ahead, text: CandidateText, options: GateOptions, lowered: Mapping[str, str]
) -> Callable[[list[Question]], Report | None]:
    """Ask the cheapest shape while the gradients of its truth are computed; the result has the report on its questions.

    None for other questions, as where a truth turns out to have no gradients.
    """
    cases = [put.case for shape in posed.shapes[:1] for put in shape]
    if not cases:
        return lambda questions: None  # noqa: ARG005
    report = ahead.begin(candidate_job(posed.shapes[0], text, options.limits, lowered=lowered))
    return lambda questions: report() if [question.case for question in questions] == cases else None


def _left_files(runs: tuple[BatchRun, ...]) -> tuple[str, ...]:
    """A note on files that the candidate made: nothing of a backward's, and where it is used they would stay."""
    left = max((run.script.report.left_files for run in runs), key=lambda one: one.count, default=LeftFiles())
    if not left.count:
        return ()
    more = ", ..." if left.count > len(left.names) else ""
    return (f"the candidate left {left.count} files where it ran, since removed: {', '.join(left.names)}{more}",)


def suite(truths: Truths, options: GateOptions) -> Suite:
    """What `check` asks with these truths, as a record."""
    return Suite(
        rule=VERSION,
        seeds=options.seeds,
        drawn=(truths.drawn_seed, *options.drawn),
        values=options.values,
        odd_sizes=options.odd_sizes,
        max_cases=options.max_cases,
        max_elements=options.max_elements,
        max_volume=options.max_volume,
        deterministic=options.deterministic,
    )


def _without_values(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    options: GateOptions,
    on_case: OnCase | None,
    truths: Truths,
    diagnose: bool,
    red: Outcome,
) -> Verdict:
    """The verdict without drawn inputs: at those, the truth itself is in doubt, and no candidate is blamed for that.

    What it is at extreme values says nothing of the others.
    """
    kept = tuple(values for values in options.values if values not in EXTREME) if red.case.point.extreme else ()
    plain = replace(options, values=kept)
    truths.draw_again()
    verdict = check(spec, pair_source, sandbox, plain, on_case, truths=truths, diagnose=diagnose)
    note = f"values left out: differences of the forward do not confirm the truth at {red.case.point.label}"
    return verdict.model_copy(update={"notes": (*verdict.notes, note)})


def foresee(truths: Truths, options: GateOptions = STANDARD, *, accepts_needs: bool = False) -> None:
    """Compute the truth of every case before there is a candidate; `check` with these `truths` then finds it known.

    Looks at full sizes are begun: `check` waits for them, since no case does. `accepts_needs`: whether the candidate's
    `backward` will take `needs`. Raises as `check` does.
    """
    looks(truths, options)
    ask(truths, make_plan(truths, options, accepts_needs=accepts_needs).shapes)


def _diagnosed(verdict: Verdict, progress: _Progress, truths: Truths, text: CandidateText) -> Verdict:
    """The verdict with what can be told of the mistake; its message begins with that where it explains everything."""
    assert progress.first_red is not None
    here = tuple(outcome for outcome in progress.outcomes if progress.at_red_shape(outcome))
    found = make_diagnosis(Evidence(text, progress.first_red, here), truths)
    return verdict.model_copy(
        update={
            "diagnosis": found,
            "message": with_headline(verdict.message, found, verdict.grad),
            "seconds": verdict.seconds + found.seconds,
        }
    )


def _without_skipped(plan: Plan, asked: Asked) -> Plan:
    """The plan as it is run: what has no truth is said in its notes instead."""
    kept = [
        replace(shape, cases=tuple(question.case for question in questions))
        for shape, questions in zip(plan.shapes, asked.questions, strict=True)
    ]
    notes = tuple(f"skipped, since the truth has no answer: {reason}" for reason in asked.skipped)
    return replace(plan, shapes=tuple(shape for shape in kept if shape.cases), notes=(*plan.notes, *notes))


def _batches(
    asked: list[list[Question]], progress: _Progress, runs: list[BatchRun], options: GateOptions
) -> Iterator[list[Question]]:
    """The cheapest shape by itself, since most candidates fail there; all others in one further process.

    What the `runs` of these have shown of autotuned kernels may need one more.
    """
    rest = [question for questions in asked[1:] for question in questions]
    yield from (batch for batch in (*asked[:1], rest) if batch)
    more, progress.plan = more_configurations(runs, progress.plan, options)
    yield from [more] if more else []


def _add(run: BatchRun, progress: _Progress, options: GateOptions) -> None:
    progress.extra_saved_bytes = max(progress.extra_saved_bytes, run.extra_saved_bytes)
    for outcome in run.outcomes:
        if options.stop_at_red and progress.first_red is not None and not progress.at_red_shape(outcome):
            return
        progress.add(outcome)


def _accepted(progress: _Progress, change: ForwardChange, start: float, options: GateOptions) -> Verdict:
    results = tuple(outcome.result for outcome in progress.outcomes)
    ran = any(result.required for result in results)
    message = f"all {len(results)} cases agree with the exact gradients{_limits(progress.plan, options)}"
    return Verdict(
        status=Status.GREEN if ran else Status.NO_CASE,
        message=message if ran else "no required entry of SWEEP could be run, so nothing is proven",
        cases=results,
        cases_planned=progress.plan.size,
        notes=progress.plan.notes,
        faults=progress.plan.faults,
        forward=change,
        seconds=time.perf_counter() - start,
    )


def _limits(plan: Plan, options: GateOptions) -> str:
    """What a green verdict must not hide: that less was asked than a standard one asks."""
    less = lesser(options)
    room = f"; {plan.left_out} more were left out" if plan.left_out else ""
    return f"{room}; fewer than the standard suite asks ({words.listed(less)})" if less else room


def _red(problem: Problem, progress: _Progress | None, change: ForwardChange | None, start: float) -> Verdict:
    case = progress.first_red.case.name if progress and progress.first_red else None
    return Verdict(
        status=problem.status,
        message=f"{problem.message} [{case}]" if case else problem.message,
        case=case,
        grad=problem.grad,
        tile=problem.tile,
        ratio=problem.ratio,
        line=problem.line,
        details=problem.details,
        cases=tuple(outcome.result for outcome in progress.outcomes) if progress else (),
        cases_planned=progress.plan.size if progress else 0,
        notes=progress.plan.notes if progress else (),
        faults=progress.plan.faults if progress else (),
        forward=change,
        seconds=time.perf_counter() - start,
    )


def _with_pattern(problem: Problem, progress: _Progress) -> Problem:
    """Add what the cases of the red shape have in common: often that is the diagnosis."""
    if problem.tuned:
        return problem
    here = [outcome for outcome in progress.outcomes if progress.at_red_shape(outcome)]
    rows = [problem.details] if problem.details else []
    scores = [score for outcome in here for score in outcome.result.grads]
    names = list(dict.fromkeys(score.grad for score in scores))
    right = [name for name in names if all(score.passed for score in scores if score.grad == name)]
    if right and len(right) < len(names):
        rows.append(f"right in every case at this shape: {words.listed(right)}")
    green = [outcome.case.name for outcome in here if outcome.problem is None]
    if green:
        rows.append("red: " + "; ".join(outcome.case.name for outcome in here if outcome.problem is not None))
        rows.append("green at this shape: " + "; ".join(green))
    earlier = len(progress.outcomes) - len(here)
    if earlier:
        rows.append(f"{earlier} cases at other shapes before this one are green")
    return replace(problem, details="\n".join(rows))


def _forward_change(spec: KernelSpec, text: CandidateText, progress: _Progress) -> ForwardChange:
    both = (default_pair(spec), text.source)
    old, new = (split_sections(source).forward.strip().splitlines() for source in both)
    # Not ndiff, which also looks for likenesses inside of lines: minutes for a forward of some hundred lines.
    rows = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    changed = sum(row[0] in "+-" for row in rows)
    return ForwardChange(extra_saved_bytes=progress.extra_saved_bytes, lines_changed=changed)
