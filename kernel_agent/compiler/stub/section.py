"""Traced calls of a stub and plans for their launches -> the forward and backward sections of a pair."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.compiler.emit.source import KernelSource, documented
from kernel_agent.compiler.errors import OTHER_CONFIGURATIONS
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.backward import BackwardWriter, Planner, Written
from kernel_agent.compiler.stub.branches import branches_taken
from kernel_agent.compiler.stub.checks import shared_checks
from kernel_agent.compiler.stub.decisions import Decision
from kernel_agent.compiler.stub.docstrings import backward_docstring, computed
from kernel_agent.compiler.stub.dtypes import for_every_dtype
from kernel_agent.compiler.stub.forward import forward_function
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.needs import sparing
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import Trace
from kernel_agent.pairs.adjoints import declarable
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec

Printer = Callable[..., KernelSource]
"""The Triton source of a kernel; `docstring` as `triton_source` takes it."""


@dataclass(frozen=True)
class Way:
    """One configuration of the stub: a call that shows it, and what tells it from the others."""

    trace: Trace
    kernels: Mapping[int, Kernel]
    """Programs of the launches, by their position among the trace's events."""
    planner: Planner
    conditions: tuple[tuple[int, str, object], ...] = ()
    """What must hold for it: launch, parameter, value."""
    decisions: tuple[Decision, ...] = ()
    """And how conditions of the stub must fall."""


@dataclass(frozen=True)
class Sections:
    """What is derived."""

    candidate: Candidate
    plans: tuple[BackwardPlan, ...]
    """Of the launches whose backward is launched, from the last to the first."""


def write_sections(spec: KernelSpec, source: StubSource, ways: Sequence[Way], printer: Printer) -> Sections:
    """Write both sections. Raises `CannotDerive`."""
    names = Names(source, _merged([way.trace.names for way in ways]))
    sources: dict[int, KernelSource] = {}

    def signature(kernel: Kernel, document: Callable[[str], str] | None = None) -> Sequence[str]:
        printed = printer(kernel)
        if document is not None:
            printed = documented(printed, document(printed.text))
        sources[id(kernel)] = for_every_dtype(printed, kernel, spec.facts.source)
        return sources[id(kernel)].parameters

    writers = [
        BackwardWriter(way.trace, source, names, way.kernels, way.planner, signature, spec.grads) for way in ways
    ]
    written = [writer.write(_outputs(spec, way.trace)) for way, writer in zip(ways, writers, strict=True)]
    optional = {(place, name) for way in ways for place, name, value in way.conditions if value is None}
    tests = [_tests(way, writer, names, optional) for way, writer in zip(ways, writers, strict=True)]
    unpacked = names.unpacked()
    forward = forward_function(source, unpacked.saved, unpacked.first, returns_saved=spec.facts.is_pair)
    flags = [names.fresh(f"need_{name}") for name in spec.grads]
    spared = [sparing(one.body, one.results, flags) for one in written]
    written = [
        one if less is None else replace(one, body=less.body, results=less.results)
        for one, less in zip(written, spared, strict=True)
    ]
    body = [_unpacking([kept.name for kept in unpacked.saved]), *(Line(text) for text in unpacked.lines)]
    parameters = ["saved", *(name for name, _ in _outputs(spec, ways[0].trace))]
    if any(less is not None for less in spared):
        parameters.append("needs=None")
        body.append(Line("", tuple(flags), f" = needs or (True,) * {len(flags)}", bare=True))
    body += _branched(tests, written)
    steps = [(plan, kernel) for one in written for plan, kernel in one.steps]
    made = {kernel.name: computed(plan, kernel) for plan, kernel in steps}
    docstring = backward_docstring(spec.grads, [name for name in parameters if name.startswith("grad_")], made)
    head = Line("def backward(", tuple(parameters), "):").shown(names.filled, 0)
    head.append(f'    """{docstring}"""')
    function = "\n".join([*head, *(row for line in body for row in line.shown(names.filled, 1))])
    helpers = dict.fromkeys(helper for one in written for helper in one.helpers)
    kernels = [sources[id(kernel)] for one in written for kernel in one.kernels]
    ops = {name for one in written for name in one.torch_ops}
    candidate = Candidate(
        forward=_forward_section(spec, source, forward),
        backward=_backward_section(kernels, list(helpers), function),
        torch_ops=tuple(sorted(declarable(ops))) if ops else (),
    )
    return Sections(candidate, tuple(plan for one in written for plan in one.plans))


def _merged(finals: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Locals of several calls; a tensor rather than None."""
    found: dict[str, object] = {}
    for final in finals:
        for name, value in final.items():
            if name not in found or isinstance(value, Tensor):
                found[name] = value
    return found


def _outputs(spec: KernelSpec, trace: Trace) -> list[tuple[str, Tensor | None]]:
    """Name of every cotangent, with the output where it has one."""
    result = trace.result[0] if spec.facts.is_pair else trace.result
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return [
        (f"grad_{fact.name}", value if isinstance(value, Tensor) and fact.needs_grad else None)
        for fact, value in zip(spec.outputs, values, strict=True)
    ]


def _tests(way: Way, writer: BackwardWriter, names: Names, optional: set[tuple[int, str]]) -> dict[str, object]:
    """What a configuration was compiled for: expression of the backward -> value. What is always so is left out.

    `optional`: parameters that are None in some configuration.
    """
    launches = list(writer.launches.values())
    found: dict[str, object] = {names.expression(one.node, one.line, "way"): one.value for one in way.decisions}
    for place, parameter, value in way.conditions:
        node = launches[place].text.arguments[parameter]
        if isinstance(value, Tensor) and (place, parameter) not in optional:
            continue
        text = names.expression(node, launches[place].text.line, parameter)
        if not writer.source.is_constant(text):
            found[text] = value
    for taken in branches_taken(writer.source.function, {seen.site.line for seen in way.trace.launches}):
        text = names.expression(taken.test, taken.line, "taken")
        if not writer.source.is_constant(text):
            found[text] = taken.holds
    return found


def _branched(tests: Sequence[dict[str, object]], written: Sequence[Written]) -> list[Line]:
    """One way after another, each under what tells it from the others; what all share is asked first."""
    texts = list(dict.fromkeys(text for one in tests for text in one))
    shown = [{text: _test(text, one[text]) for text in texts if text in one} for one in tests]
    common = [text for text in texts if len({one.get(text, "") for one in shown}) == 1]
    refusal = f'raise NotImplementedError("{OTHER_CONFIGURATIONS}")'
    lines: list[Line] = []
    asked = list(dict.fromkeys(shown[0][text] for text in common))
    if asked:
        lines += [Line(f"if not ({' and '.join(asked)}):"), Line(refusal, depth=1)]
    own = [" and ".join(test for text, test in one.items() if text not in common) for one in shown]
    bodies: list[list[Line]] = [one.body for one in written]
    if len(own) > 1 and (not own[-1] or (len(own) == 2 and _opposite(*own))):  # every call goes one of these ways
        checks, bodies = shared_checks(bodies)
        lines += checks
    for place, (condition, one) in enumerate(zip(own, written, strict=True)):
        body = [*bodies[place], Line("return ", tuple(one.results), bare=True)]
        if not condition or (place == 1 == len(own) - 1 and _opposite(*own)):
            return [*lines, *body]
        lines += [Line(f"if {condition}:"), *(replace(line, depth=line.depth + 1) for line in body)]
    return [*lines, Line(refusal)]


def _opposite(one: str, other: str) -> bool:
    """Whether one of two tests holds wherever the other does not."""
    first, second = sorted((one, other), key=len)
    return " and " not in second and second in (f"not {first}", first.replace(" is None", " is not None"))


def _test(text: str, value: object) -> str:
    """Python that asks whether an expression has a value."""
    if value is None or isinstance(value, Tensor):
        return f"{text} is {'' if value is None else 'not '}None"
    if isinstance(value, bool):
        simple = isinstance(ast.parse(text, mode="eval").body, (ast.Name, ast.Attribute, ast.Call, ast.Compare))
        text = text if simple else f"({text})"
        return text if value else f"not {text}"
    if isinstance(value, (int, float, str)):
        return f"{text} == {value!r}"
    return f"str({text}) == {str(value)!r}"


def _unpacking(names: Sequence[str]) -> Line:
    if not names:
        return Line("() = saved")
    return Line(f"({names[0]},) = saved") if len(names) == 1 else Line("", tuple(names), " = saved", bare=True)


def _backward_section(kernels: Sequence[KernelSource], ours: Sequence[str], function: str) -> str:
    imports = list(dict.fromkeys(line for kernel in kernels for line in kernel.imports))
    helpers = {helper.name: helper.text for kernel in kernels for helper in kernel.helpers}
    parts = ["\n".join(imports)] if imports else []
    parts += [text.strip("\n") for text in (*helpers.values(), *(kernel.text for kernel in kernels), *ours, function)]
    return "\n\n\n".join(parts) + "\n"


def _forward_section(spec: KernelSpec, source: StubSource, function: str) -> str:
    """The function alone for a user's file; for a pair its whole section with the function in place."""
    if not spec.facts.is_pair:
        return function
    sections = split_sections(source.text)
    first = sections.forward_line + 1
    lines = sections.forward.split("\n")
    node: ast.FunctionDef = source.function
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    end = node.end_lineno or node.lineno
    kept = [*lines[: start - first], *function.rstrip("\n").split("\n"), *lines[end - first + 1 :]]
    return "\n".join(kept).strip("\n") + "\n"
