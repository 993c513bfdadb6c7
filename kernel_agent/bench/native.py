"""`check_native`: a candidate's real kernels at real sizes and dtypes on the GPU, against the exact gradients.

The exact tier proves the algorithm and says nothing of rounding, of sizes that no executor on a CPU reaches, or of what
the hardware does with a kernel. Truth comes from the executor on the GPU, in a child that is gone before the
candidate's starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from kernel_agent.bench.kinks import remarks, without
from kernel_agent.bench.native_rule import NativeComparison, compare_native, honest_bits
from kernel_agent.bench.native_truth import NativeGradient, NativeTruth
from kernel_agent.bench.rig import STANDARD, BenchOptions, Rig
from kernel_agent.bench.second_look import look
from kernel_agent.errors import InputError
from kernel_agent.gate.answer import Failure, Returned, Said
from kernel_agent.gate.batch import ended_problem
from kernel_agent.gate.candidate import CandidateText, read_candidate
from kernel_agent.gate.judge import Judged, Problem, judge_failure, layout_problem
from kernel_agent.gate.order import REMEDY
from kernel_agent.gate.verdict import CaseResult, GradientScore, Status, Tier, Verdict
from kernel_agent.machine import Machine, installed_versions
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.sandbox import Job, Report, Sandbox

TIER = "native"
COARSE = 0.1
"""A relative error below this may be rounding; a larger one is a mistake."""
CALLS = 5
"""Calls of every backward with the same arguments: what programs leave to chance shows between them."""
OnCase = Callable[[CaseResult, int, int], None]


class _Answer(Said):
    """One message of the candidate's child."""

    entry: int
    returned: tuple[str, ...] = Field(default=(), max_length=1000)
    layouts: tuple[Returned, ...] = Field(default=(), max_length=1000)
    dot_bits: int | None = None
    where: str = Field(default="", max_length=100)
    failure: Failure | None = None


def check_native(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    rig: Rig | None = None,
    options: BenchOptions = STANDARD,
    on_case: OnCase | None = None,
) -> Verdict:
    """Judge the real kernels of a pair file that is green in the exact tier.

    `rig` keeps what was computed for earlier candidates. A bad candidate is a red verdict. Raises `EnvironmentProblem`
    where there is no GPU, or where the user's own forward cannot be run on it.
    """
    start = time.perf_counter()
    rig = rig or Rig(spec, sandbox, options)
    try:
        text = read_candidate(spec, pair_source)
    except InputError as error:
        return Verdict(
            status=Status.BAD_FORMAT, message=error.message, line=error.line, details=error.remedy, tier=TIER
        )
    if text.problem is not None:
        return _verdict((), text.problem, 0, (), start)
    truths = rig.natives
    notes = _notes(rig)
    asked = list(truths.values())
    results, problem, remarked = _ask(asked, text, rig, on_case)
    verdict = _verdict(results, problem, len(asked), (*notes, *remarked), start)
    machine = Machine(gpu=rig.prepared.gpu.name, versions=installed_versions())
    sizes = [{grad.name: int(grad.truth.numel()) for grad in truth.grads} for truth in asked]
    chance = [chances(t.label, r.grads, s) for t, r, s in zip(asked, results, sizes, strict=False)]
    unordered = tuple(said for some in chance for said in some)
    return verdict.model_copy(update={"machine": machine, "unordered": unordered})


def _notes(rig: Rig) -> tuple[str, ...]:
    """What was left out or shrunk, said to the reader."""
    skipped = [f"{one.entry.label}: the forward itself does not run here: {one.reason}" for one in rig.prepared.skipped]
    labels = [inputs.entry.label for inputs in rig.inputs]
    without = [f"{labels[n]}: no exact gradients: {why}" for n, why in rig.prepared.unanswered.items()]
    remarks = [f"{truth.label}: {note}" for truth in rig.natives.values() for note in truth.notes]
    shrunk = [
        f"{labels[n]}: proven at {truth.label}"
        if truth.chosen
        else f"{labels[n]}: the truth does not fit into the free memory of this GPU; checked at {truth.label} instead"
        for n, truth in rig.natives.items()
        if truth.shrunk
    ]
    return (*skipped, *without, *remarks, *shrunk)


def _ask(
    asked: list[NativeTruth], text: CandidateText, rig: Rig, on_case: OnCase | None
) -> tuple[tuple[CaseResult, ...], Problem | None, tuple[str, ...]]:
    """One result per entry, up to the first that has no answer, the first problem, and what was left out."""
    if not asked:
        return (), None, ()
    tensors = {name: tensor for truth in asked for name, tensor in truth.given.items()}
    own = has_own_forward(rig.spec, text.source)
    payload = {
        "device": rig.options.device,
        "calls": CALLS,
        "source": text.shown,
        "own_forward": own,
        "entries": [truth.inputs.form for truth in asked],
    }
    report = rig.sandbox.run(
        Job("kernel_agent.bench.native_child:answered", payload, tensors, rig.options.limits, "native candidate")
    )
    results: list[CaseResult] = []
    first: Problem | None = None
    remarked: tuple[str, ...] = ()
    for number, (position, truth) in enumerate(rig.natives.items()):

        def judged(truth: NativeTruth, kinks: Mapping[str, Tensor], number: int = number) -> Judged:
            return _judge(report, number, truth, text, rig, kinks)

        looked = look(judged, truth, rig.looks(position))
        problem, scores = looked.judged.problem, looked.judged.scores
        remarked += remarks(truth.label, looked.kinks)
        case = f"{truth.label} cotangent=random native"
        result = CaseResult(
            case=case,
            required=True,
            status=Status.GREEN if problem is None else problem.status,
            grads=scores,
            message="" if problem is None else problem.message,
            tier=Tier.NATIVE,
        )
        results.append(result)
        if on_case is not None:
            on_case(result, len(results), len(asked))
        first = first or problem
        if problem is not None and not scores:  # no answer at all
            break
    return tuple(results), first, remarked


def _judge(
    report: Report,
    number: int,
    truth: NativeTruth,
    text: CandidateText,
    rig: Rig,
    kinks: Mapping[str, Tensor],
) -> Judged:
    """The problem of one entry, and its scores; none where there was no answer."""
    last = number == len(report.messages) - 1
    if number >= len(report.messages):
        return Judged(ended_problem(report, rig.options.limits))
    message = report.messages[number]
    try:
        answer = _Answer.model_validate(message.record)
    except ValidationError:
        return Judged(Problem(Status.CRASHED, "the candidate wrote to the result channel"))
    if answer.failure is not None:
        return Judged(judge_failure(answer.failure, text.source, f"{answer.where} on the GPU"))
    if answer.entry != number:
        return Judged(Problem(Status.CRASHED, "the candidate wrote to the result channel"))
    problem, scores = judge_native(answer.returned, message.tensors, truth, answer.dot_bits, rig.spec.grads, kinks)
    if has_own_forward(rig.spec, text.source):
        problem = judge_outputs(message.tensors, truth, rig.spec) or problem
    problem = problem or _misplaced(answer.layouts, message.tensors, truth, rig.spec.grads)
    if problem is None and rig.options.deterministic:
        problem = _order_problem(truth, scores)
    if problem is None and last and number == len(report.messages) - 1 and not report.finished:
        problem = ended_problem(report, rig.options.limits)
    return Judged(problem, scores)


def _misplaced(
    layouts: Sequence[Returned], tensors: Mapping[str, Tensor], truth: NativeTruth, names: Sequence[str]
) -> Problem | None:
    """The first right gradient that lies where no gradient may."""
    for wanted in truth.grads:
        place = names.index(wanted.name)
        if place < len(layouts) and str(place) in tensors:
            problem = layout_problem(wanted.name, layouts[place], tuple(tensors[str(place)].shape))
            if problem is not None:
                return problem
    return None


def has_own_forward(spec: KernelSpec, pair_source: str) -> bool:
    """Whether a pair file's forward section is not the one that goes with the spec."""
    default = spec.facts.source if spec.facts.is_pair else assemble(spec, Candidate(backward=""))
    return split_sections(default).forward.strip() != split_sections(pair_source).forward.strip()


def judge_outputs(tensors: Mapping[str, Tensor], truth: NativeTruth, spec: KernelSpec) -> Problem | None:
    """The outputs of a candidate's own forward, which may miss the exact ones by twice what the user's kernels do."""
    for wanted in truth.outputs:
        place = int(wanted.name)
        name = spec.outputs[place].name if place < len(spec.outputs) else wanted.name
        given = tensors.get(f"out.{place}")
        if given is None or given.shape != wanted.truth.shape or given.dtype != wanted.dtype:
            return Problem(Status.WRONG_FORWARD, f"output `{name}` has another form than the stub's on the GPU")
        seen = compare_native(given, wanted.truth, wanted.honest, wanted.scale, wanted.dtype, _honest_bits(truth))
        if not seen.passed:
            message = (
                f"output `{name}` of forward is off by {seen.relative_error:.1e} on the GPU, the user's own kernels by "
                f"{seen.honest_error:.1e}"
            )
            return Problem(Status.WRONG_FORWARD, message, tile=seen.tile, ratio=seen.ratio)
    return None


def judge_native(
    returned: tuple[str, ...],
    tensors: Mapping[str, Tensor],
    truth: NativeTruth,
    dot_bits: int | None,
    names: Sequence[str],
    kinks: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Problem | None, tuple[GradientScore, ...]]:
    """Every gradient of one call, both times it was computed, against the truth; the first problem and all scores.

    `names` are those of all gradients that a backward returns, in order; `kinks` are elements to leave out.
    """
    if len(returned) != len(names):
        return Problem(Status.WRONG_COUNT, f"backward returns {len(returned)} gradients on the GPU"), ()
    problems: list[Problem] = []
    scores: list[GradientScore] = []
    bits = _honest_bits(truth)
    for wanted in truth.grads:
        place = names.index(wanted.name)
        again = tensors.get(f"again.{place}")  # only where it is another
        found = [tensors.get(str(place)), *([] if again is None else [again])]
        seen: NativeComparison | None = None
        for given in found:
            if given is None and returned[place] == "NoneType" and not bool(wanted.truth.any()):
                continue
            if given is None or given.shape != wanted.truth.shape:
                shape = None if given is None else tuple(given.shape)
                message = f"the gradient of `{wanted.name}` is {shape or returned[place]} on the GPU"
                problems.append(Problem(Status.WRONG_SHAPE, message, grad=wanted.name))
                break
            if given.dtype != wanted.dtype:
                message = f"the gradient of `{wanted.name}` is {given.dtype} on the GPU, not {wanted.dtype}"
                problems.append(Problem(Status.WRONG_DTYPE, message, grad=wanted.name))
                break
            given = without(given, wanted.truth, kinks, wanted.name)
            one = compare_native(given, wanted.truth, wanted.honest, wanted.scale, wanted.dtype, bits)
            seen = one if seen is None or one.ratio > seen.ratio else seen
        if seen is None:
            continue
        scores.append(
            GradientScore(
                grad=wanted.name,
                passed=seen.passed,
                ratio=seen.ratio,
                tile=seen.tile,
                relative_error=seen.relative_error,
                spread=_spread(tensors.get(f"width.{place}"), seen),
                differing=_differing(tensors.get(f"width.{place}")),
            )
        )
        if not seen.passed:
            problems.append(_problem(wanted, seen, truth, dot_bits))
    order = (
        Status.WRONG_SHAPE,
        Status.WRONG_DTYPE,
        Status.NOT_FINITE,
        Status.WRONG_GRADIENT,
        Status.PRECISION_DOWNGRADE,
    )
    return min(problems, key=lambda problem: order.index(problem.status), default=None), tuple(scores)


def _order_problem(truth: NativeTruth, scores: Sequence[GradientScore]) -> Problem | None:
    """What real kernels that are otherwise right are rejected for where the same bits are asked for."""
    said = chances(truth.label, scores, {grad.name: int(grad.truth.numel()) for grad in truth.grads})
    if not said:
        return None
    grad = next(score.grad for score in scores if score.differing)
    return Problem(Status.NONDETERMINISTIC, said[0], details="\n".join((*said[1:], REMEDY)), grad=grad)


def _differing(width: Tensor | None) -> int:
    return 0 if width is None else int((width != 0).sum())


def _spread(width: Tensor | None, seen: NativeComparison) -> float:
    """How far calls lie apart, in units of the largest error that is allowed."""
    if width is None or width.numel() == 0:
        return 0.0
    largest = float(width.to(torch.float64).nan_to_num(math.inf).max())
    return largest / seen.largest_allowed if largest else 0.0


def chances(label: str, scores: Sequence[GradientScore], elements: Mapping[str, int]) -> tuple[str, ...]:
    """What is said of gradients that are not the same in every call; `elements` are those of each."""
    return tuple(
        f"{label}: {score.differing} of {elements[score.grad]} elements of the gradient of `{score.grad}` differ "
        f"between {CALLS} calls with the same arguments, by up to {score.spread:.2g} of the error that is allowed"
        for score in scores
        if score.differing
    )


def _honest_bits(truth: NativeTruth) -> int:
    return honest_bits((grad.dtype for grad in truth.grads), truth.inputs.dot_bits)


def _problem(wanted: NativeGradient, seen: NativeComparison, truth: NativeTruth, dot_bits: int | None) -> Problem:
    spans = ", ".join(
        str(i) if e == 1 else f"{i * e}:{(i + 1) * e}" for i, e in zip(seen.tile, seen.extent, strict=True)
    )
    where = f"worst in elements [{spans}]"
    if seen.strange:
        message = f"the gradient of `{wanted.name}` on the GPU has {seen.strange} elements that are not finite, {where}"
        return Problem(Status.NOT_FINITE, message, grad=wanted.name, tile=seen.tile, ratio=seen.ratio)
    said = (
        f"relative error {seen.relative_error:.1e} where honest rounding gives {seen.honest_error:.1e}, "
        f"{seen.ratio:.3g} times what is allowed, {where}"
    )
    allowed_bits = truth.inputs.dot_bits or _honest_bits(truth)
    if seen.relative_error <= COARSE:
        coarser = dot_bits is not None and dot_bits < allowed_bits
        reason = (
            f"its products keep {dot_bits} bits, the forward's {allowed_bits}: give tl.dot operands of the forward's "
            "dtype and its input_precision"
            if coarser
            else "the exact tier accepts the algorithm, so it is lost in arithmetic: accumulate in float32, and cut "
            "only what the forward cuts"
        )
        message = f"the gradient of `{wanted.name}` is too coarse on the GPU: {said}"
        return Problem(
            Status.PRECISION_DOWNGRADE, message, details=reason, grad=wanted.name, tile=seen.tile, ratio=seen.ratio
        )
    message = f"the gradient of `{wanted.name}` is wrong on the GPU at real sizes: {said}"
    return Problem(Status.WRONG_GRADIENT, message, grad=wanted.name, tile=seen.tile, ratio=seen.ratio)


def _verdict(
    results: tuple[CaseResult, ...], problem: Problem | None, planned: int, notes: tuple[str, ...], start: float
) -> Verdict:
    seconds = time.perf_counter() - start
    if problem is None and results:
        message = f"real kernels agree with the exact gradients in all {len(results)} required shapes"
        return Verdict(
            status=Status.GREEN,
            message=message,
            cases=results,
            cases_planned=planned,
            notes=notes,
            tier=TIER,
            seconds=seconds,
        )
    if problem is None:
        message = "no required entry of SWEEP could be checked on this GPU, so nothing is proven of real kernels"
        return Verdict(status=Status.NO_CASE, message=message, notes=notes, tier=TIER, seconds=seconds)
    case = next((result.case for result in results if result.status is not Status.GREEN), None)
    return Verdict(
        status=problem.status,
        message=f"{problem.message} [{case}]" if case else problem.message,
        case=case,
        grad=problem.grad,
        tile=problem.tile,
        ratio=problem.ratio,
        line=problem.line,
        details=problem.details,
        cases=results,
        cases_planned=planned,
        notes=notes,
        tier=TIER,
        seconds=seconds,
    )
