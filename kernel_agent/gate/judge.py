"""From what a candidate child answered to the result of one case. Contract first, values last."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernel_agent.gate import words
from kernel_agent.gate.answer import Answer, Failure, FailureKind, Found, Returned
from kernel_agent.gate.layout import is_contiguous, shares_memory
from kernel_agent.gate.naming import in_own_words, saved_as
from kernel_agent.gate.rule import Agreement, Comparison, breaks, compare
from kernel_agent.gate.torch_ops import foreign_calls
from kernel_agent.gate.verdict import GradientScore, Status
from kernel_agent.oracle import ForwardTruth, GradientTruth, OutputForm
from kernel_agent.pairs.meta import PairMeta
from kernel_agent.pairs.spec import KernelSpec

_STATUS_OF_FINDING = {
    "OUT_OF_BOUNDS": Status.OUT_OF_BOUNDS,
    "WILD_POINTER": Status.OUT_OF_BOUNDS,
    "WRAPPED_OFFSET": Status.OUT_OF_BOUNDS,
    "RACE": Status.RACE,
    "DUPLICATE_LANES": Status.RACE,
    "UNINITIALIZED_READ": Status.UNINITIALIZED_READ,
    "UNWRITTEN_OUTPUT": Status.NOT_FINITE,
    "ASSERTION": Status.CRASHED,
    "FALSE_PROMISE": Status.FALSE_PROMISE,
}
_STATUS_OF_FAILURE = {
    FailureKind.COMPILE: Status.COMPILE_ERROR,
    FailureKind.UNSUPPORTED: Status.UNSUPPORTED_OP,
    FailureKind.LAUNCH: Status.CRASHED,
    FailureKind.PYTHON: Status.CRASHED,
    FailureKind.FORM: Status.BAD_FORMAT,
    FailureKind.UNEXPLAINED: Status.UNEXPLAINED,
}


@dataclass(frozen=True)
class Problem:
    """Why something is red."""

    status: Status
    message: str
    """One sentence in the words of the candidate's code."""
    line: int | None = None
    """Line of the pair file."""
    details: str = ""
    """Further facts, one per line."""
    grad: str | None = None
    tile: tuple[int, ...] | None = None
    ratio: float | None = None
    tuned: bool = False
    """Cases ran with other configurations of autotuned kernels: what they have in common tells nothing."""


@dataclass(frozen=True)
class Judged:
    """The result of one answer: green when there is no problem."""

    problem: Problem | None
    scores: tuple[GradientScore, ...] = field(default=())


def judge_failure(failure: Failure, source: str, where: str) -> Problem:
    """An exception in the candidate's code; `where` is 'importing the file', 'forward' or 'backward'."""
    status = _STATUS_OF_FAILURE[failure.kind]
    if failure.type in ("MemoryError", "OutOfMemoryError"):  # Python's, and torch's of a GPU
        status = Status.OUT_OF_MEMORY
    message = f"{where}: {words.failure_message(failure)}" + words.quoted(source, failure.line)
    return Problem(status, message, failure.line, words.trace(source, failure))


def judge_forward(
    answer: Answer,
    tensors: dict[str, Tensor],
    truth: ForwardTruth,
    spec: KernelSpec,
    meta: PairMeta,
    stub_ops: Collection[str],
    source: str,
    *,
    extreme: bool = False,
) -> Problem | None:
    """The candidate's forward against the outputs of the user's stub, which calls `stub_ops` at one shape or other.

    `extreme`: see `pairs.values.EXTREME`.
    """
    foreign = foreign_calls(answer.calls, meta.torch_ops, stub_ops)
    foreign = tuple(name for name in foreign if name not in truth.torch_ops)
    if foreign:
        message = f"forward computes with torch: {words.listed(foreign)}; the user's stub does not"
        return Problem(Status.TORCH_FALLBACK, message)
    if not truth.findings:  # what the user's own kernels do is not the candidate's fault
        found = [f for f in answer.findings if f.kind != "UNWRITTEN_OUTPUT"]
        if found:
            return _from_findings(found, source, "forward")
    changed = [name for name in answer.mutated if name not in truth.mutated]
    if changed:
        names = words.listed(changed)
        return Problem(Status.INPUT_MUTATED, f"forward changes the content of its arguments: {names}")
    if len(answer.returned) != len(truth.outputs):
        message = f"forward returns {len(answer.returned)} outputs, the user's stub {len(truth.outputs)}"
        return Problem(Status.WRONG_FORWARD, message)
    for i, (returned, expected) in enumerate(zip(answer.returned, truth.outputs, strict=True)):
        name = spec.outputs[i].name if i < len(spec.outputs) else str(i)
        problem = _output_problem(name, returned, tensors.get(str(i)), expected, truth, i, extreme)
        if problem is not None:
            return problem
    return None


def _output_problem(
    name: str,
    returned: Returned,
    given: Tensor | None,
    expected: object,
    truth: ForwardTruth,
    position: int,
    extreme: bool,
) -> Problem | None:
    form = truth.forms[position]
    if form is None or not isinstance(expected, Tensor):
        if returned.type == "tensor" or returned.value != expected:
            said = returned.value or returned.type
            return Problem(Status.WRONG_FORWARD, f"output `{name}` is {said}, the user's stub gives {expected!s:.100}")
        return None
    dtype = str(form.dtype).removeprefix("torch.")
    if given is None:
        return Problem(Status.WRONG_FORWARD, f"output `{name}` is {returned.type}, not a tensor")
    if tuple(given.shape) != form.shape or returned.dtype != dtype:
        message = (
            f"output `{name}` is {returned.dtype} {tuple(given.shape)}, the user's stub gives {dtype} {form.shape}"
        )
        return Problem(Status.WRONG_FORWARD, message)
    if misplaced := _output_layout(name, returned, form):
        return Problem(Status.WRONG_FORWARD, misplaced)
    wide = expected.to(torch.float64)
    size = float(torch.where(wide.isfinite(), wide, 0.0).square().mean().sqrt()) if wide.numel() else 0.0
    seen = compare(given, wide, size)
    if seen.passed or (extreme and not breaks(given, wide)):
        return None
    message = f"output `{name}` of forward differs from the user's stub: {words.difference(seen)}"
    return Problem(Status.WRONG_FORWARD, message, tile=seen.tile, ratio=seen.ratio)


def _output_layout(name: str, returned: Returned, form: OutputForm) -> str:
    """How an output lies otherwise than that of the user's stub, where programs that use it would see that."""
    if returned.on_host != form.on_host:
        places = ("on the GPU", "made on the CPU")
        return f"output `{name}` is {places[returned.on_host]}, the user's stub gives one {places[form.on_host]}"
    if (returned.of_argument or returned.meets) and not form.shares:
        whose = "an argument" if returned.of_argument else "another output"
        return (
            f"output `{name}` shares memory with {whose}, the user's stub gives it memory of its own: "
            "what changes one in place changes the other"
        )
    if is_contiguous(form.shape, form.strides) and not is_contiguous(form.shape, returned.strides):
        return (
            f"output `{name}` has strides {returned.strides} for shape {form.shape}, the user's stub gives a "
            "contiguous one, which programs may view in other shapes"
        )
    return ""


def judge_backward(
    answer: Answer,
    tensors: dict[str, Tensor],
    truth: GradientTruth,
    forward: ForwardTruth,
    cotangent_rms: tuple[float, ...],
    needs: tuple[bool, ...] | None,
    spec: KernelSpec,
    meta: PairMeta,
    stub_ops: Collection[str],
    source: str,
    *,
    extreme: bool = False,
) -> Judged:
    """The candidate's gradients against the truth, with a score for every gradient that can be compared.

    `extreme`: see `pairs.values.EXTREME`; nothing is compared there.
    """
    sizes = tuple(0 if form is None else math.prod(form.shape) for form in forward.forms)
    scores: list[GradientScore] = []
    problems: list[Problem] = []
    if len(answer.returned) == len(spec.grads):
        for i, name in enumerate(spec.grads):
            if needs is not None and not needs[i]:
                continue
            scale = truth.scale(name, cotangent_rms, sizes) if truth.grads[name] is not None else 0.0
            given = tensors.get(str(i))
            problem, score = _gradient(name, answer.returned[i], given, truth, scale, spec, forward, source)
            if extreme:
                problem, score = _finite_alone(problem, given, truth.grads[name]), None
            problems += [] if problem is None else [problem]
            scores += [] if score is None else [score]
        problems = _with_exchange_hint(problems, tensors, truth, spec)
        wanted = [i for i in range(len(spec.grads)) if needs is None or needs[i]]
        problems += _shared(answer, wanted, spec.grads)
    everything = needs is None or all(needs)
    contract = _contract_problem(answer, tensors, spec, meta, stub_ops, source, everything)
    by_value = min(problems, key=lambda p: _ORDER.index(p.status), default=None)
    return Judged(_with_configurations(contract or _unwritten(answer, by_value, spec), answer), tuple(scores))


def _with_configurations(problem: Problem | None, answer: Answer) -> Problem | None:
    """Say which configurations of autotuned kernels ran: others may be right."""
    if problem is None or not answer.tuned:
        return problem
    row = "Once for each key Triton runs all configurations on the same memory, and any of them may be chosen."
    details = "\n".join(part for part in (problem.details, row) if part)
    return replace(problem, message=f"{problem.message}; {words.listed(answer.tuned)}", details=details, tuned=True)


_ORDER = (
    *(Status.WRONG_COUNT, Status.WRONG_SHAPE, Status.WRONG_DTYPE, Status.WRONG_DEVICE, Status.WRONG_STRIDES),
    *(Status.NOT_FINITE, Status.WRONG_GRADIENT),
)


def _contract_problem(
    answer: Answer,
    tensors: dict[str, Tensor],
    spec: KernelSpec,
    meta: PairMeta,
    stub_ops: Collection[str],
    source: str,
    everything: bool,
) -> Problem | None:
    """Everything but values, in the order of `verdict.STAGE_OF`; `everything`: all gradients are needed."""
    if everything and answer.launches == 0:  # one that is the cotangent itself needs no kernel
        return Problem(Status.NO_TRITON_LAUNCH, "backward launches no Triton kernel")
    foreign = foreign_calls(answer.calls, meta.torch_ops, stub_ops)
    if foreign:
        remedy = "Compute it in a Triton kernel; torch may only allocate, view, copy, fill and add up partial buffers."
        return Problem(Status.TORCH_FALLBACK, f"backward computes with torch: {words.listed(foreign)}", details=remedy)
    # An unwritten output is judged by its values; the finding explains the NaN there.
    found = [f for f in answer.findings if f.kind != "UNWRITTEN_OUTPUT"]
    if found:
        return _from_findings(found, source, "backward")
    if answer.mutated:
        names = words.listed(words.in_backward(answer.mutated, source))
        return Problem(Status.INPUT_MUTATED, f"backward changes the content of what it is given: {names}")
    if len(answer.returned) != len(spec.grads):
        wanted = ", ".join(spec.grads)
        message = f"backward returns {len(answer.returned)} gradients instead of {len(spec.grads)}: {wanted}"
        forms = [
            (r.dtype or r.type, tuple(tensors[str(i)].shape) if str(i) in tensors else None)
            for i, r in enumerate(answer.returned)
        ]
        return Problem(Status.WRONG_COUNT, message, details=words.returned_values(forms, spec.grads))
    return None


def _unwritten(answer: Answer, problem: Problem | None, spec: KernelSpec) -> Problem | None:
    """Explain NaN by memory that nothing wrote; alone, an unwritten gradient is a problem too."""
    findings = [f for f in answer.findings if f.kind == "UNWRITTEN_OUTPUT"]
    if not findings or (problem is not None and problem.status is not Status.NOT_FINITE):
        return problem

    def named(match: re.Match[str]) -> str:
        place = int(match[1])
        return f"the gradient of `{spec.grads[place]}`" if place < len(spec.grads) else match[0]

    said = re.sub(r"output ([0-9]{1,4})\b", named, findings[0].message)
    if problem is None:
        return Problem(Status.NOT_FINITE, said)
    return replace(problem, message=f"{problem.message}; {said}")


def _from_findings(findings: Sequence[Found], source: str, where: str) -> Problem:
    known = [f for f in findings if f.kind in _STATUS_OF_FINDING] or list(findings)
    order = list(_STATUS_OF_FINDING)
    first = min(known, key=lambda f: order.index(f.kind) if f.kind in order else len(order))
    status = _STATUS_OF_FINDING.get(first.kind, Status.CRASHED)
    told = [(f.kind, in_own_words(f.message, source, f.line)) for f in findings[:10]]
    message = f"{where}: {in_own_words(first.message, source, first.line)}" + words.quoted(source, first.line)
    return Problem(status, message, first.line, "\n".join(f"{kind}: {text}" for kind, text in told))


def _gradient(
    name: str,
    returned: Returned,
    given: Tensor | None,
    truth: GradientTruth,
    scale: float,
    spec: KernelSpec,
    forward: ForwardTruth,
    source: str,
) -> tuple[Problem | None, GradientScore | None]:
    expected = truth.grads[name]
    if expected is None:
        if given is None and returned.type == "None":
            return None, None
        return Problem(Status.WRONG_SHAPE, f"`{name}` is no tensor here, so its gradient must be None", grad=name), None
    if given is None:
        if returned.type == "None" and not bool(expected.any()):
            return None, GradientScore(grad=name, passed=True, ratio=0.0)
        message = f"the gradient of `{name}` is {returned.type} instead of a tensor of shape {tuple(expected.shape)}"
        return Problem(Status.WRONG_SHAPE, message, grad=name), _nothing(name)
    if given.shape != expected.shape:
        shapes = f"has shape {tuple(given.shape)} instead of {tuple(expected.shape)}, the shape of `{name}`"
        hint = words.shape_hint(tuple(given.shape), tuple(expected.shape))
        message = f"the gradient of `{name}` {shapes}{saved_as(name, source)}{hint}"
        return Problem(Status.WRONG_SHAPE, message, grad=name), _nothing(name)
    if given.is_complex():
        message = f"the gradient of `{name}` is {returned.dtype}; gradients of real inputs are real"
        return Problem(Status.WRONG_DTYPE, message, grad=name), _nothing(name)
    given = given.to(torch.float64)  # whatever the child sent: what it says of the dtype need not be true
    seen = compare(given, expected, scale)
    score = GradientScore(
        grad=name, passed=seen.passed, ratio=seen.ratio, tile=seen.tile, relative_error=seen.relative_error
    )
    dtype = str(_argument_dtype(name, spec, forward)).removeprefix("torch.")
    if returned.dtype != dtype:
        own = f"`{name}`{saved_as(name, source)} is {dtype}"
        message = f"the gradient of `{name}` is {returned.dtype}; {own}, so its gradient must be too"
        return Problem(Status.WRONG_DTYPE, message, grad=name), score.model_copy(update={"passed": False})
    if seen.passed:
        misplaced = layout_problem(name, returned, tuple(given.shape))
        return misplaced, score if misplaced is None else score.model_copy(update={"passed": False})
    return _value_problem(name, seen, given, expected), score


def _finite_alone(problem: Problem | None, given: Tensor | None, expected: Tensor | None) -> Problem | None:
    """A problem with values counts where the truth is finite and the gradient is not; any other counts as it is."""
    if problem is None or problem.status not in (Status.NOT_FINITE, Status.WRONG_GRADIENT):
        return problem
    broken = given is not None and expected is not None and breaks(given, expected)
    return problem if broken else None


def layout_problem(name: str, returned: Returned, shape: tuple[int, ...]) -> Problem | None:
    """Where a right gradient lies: on the device of its input, and every element in memory of its own.

    One that lies in an argument of the call may share memory as that does.
    """
    if returned.on_host:
        message = f"the gradient of `{name}` is made on the CPU; `{name}` is on the GPU, so its gradient must be too"
        return Problem(Status.WRONG_DEVICE, message, details=f"Allocate it with device={name}.device.", grad=name)
    if returned.handed_back or not shares_memory(shape, returned.strides):
        return None
    message = (
        f"the gradient of `{name}` has strides {returned.strides} for shape {shape}: several of its elements share "
        "one place in memory"
    )
    remedy = "Write it out, as with .contiguous(): what changes it in place would change each several times."
    return Problem(Status.WRONG_STRIDES, message, details=remedy, grad=name)


def _shared(answer: Answer, wanted: Collection[int], names: Sequence[str]) -> list[Problem]:
    """Gradients that are wanted and lie in one memory, as several tensors.

    One tensor for several is fine: PyTorch sees that somebody else holds it, and copies. It keeps each of several
    tensors as the `.grad` of its input, and what scales or clears one in place does so to the other.
    """
    found = []
    for i in wanted:
        for j in answer.returned[i].meets:
            if j in wanted:
                message = f"the gradients of `{names[j]}` and `{names[i]}` are two tensors that share memory"
                remedy = "Give each memory of its own, or return one tensor for both."
                found.append(Problem(Status.WRONG_STRIDES, message, details=remedy, grad=names[i]))
    return found


def _value_problem(name: str, seen: Comparison, given: Tensor, expected: Tensor) -> Problem:
    if seen.agreement is Agreement.NOT_FINITE:
        message = f"the gradient of `{name}` has {words.strange(given)} where the truth is finite, {words.place(seen)}"
        return Problem(Status.NOT_FINITE, message, grad=name, tile=seen.tile, ratio=seen.ratio)
    message = f"the gradient of `{name}` is wrong: {words.difference(seen)}"
    details = words.worst_elements(name, given, expected, seen)
    return Problem(Status.WRONG_GRADIENT, message, details=details, grad=name, tile=seen.tile, ratio=seen.ratio)


def _with_exchange_hint(
    problems: list[Problem], tensors: dict[str, Tensor], truth: GradientTruth, spec: KernelSpec
) -> list[Problem]:
    """Say so where a wrong gradient is the right one of another input."""
    result = []
    for problem in problems:
        given = tensors.get(str(spec.grads.index(problem.grad))) if problem.grad else None
        twins = [
            other
            for other, expected in truth.grads.items()
            if problem.status in (Status.WRONG_GRADIENT, Status.WRONG_SHAPE)
            and given is not None
            and expected is not None
            and other != problem.grad
            and given.shape == expected.shape
            and bool(expected.any())
            and compare(given, expected, 0.0).passed
        ]
        hint = (
            f"; it is the gradient of `{twins[0]}`: return them in the order {', '.join(spec.grads)}" if twins else ""
        )
        result.append(replace(problem, message=problem.message + hint))
    return result


def _argument_dtype(name: str, spec: KernelSpec, forward: ForwardTruth) -> torch.dtype:
    argument = forward.argument(spec, name)
    assert isinstance(argument, Tensor)  # it has a gradient
    return argument.dtype


def _nothing(name: str) -> GradientScore:
    return GradientScore(grad=name, passed=False, ratio=math.inf, relative_error=math.inf)
