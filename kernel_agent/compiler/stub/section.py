"""Traced calls of a stub and plans for their launches -> the forward and backward sections of a pair."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.compiler.emit.source import KernelSource, documented
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.backward import BackwardWriter
from kernel_agent.compiler.stub.clones import clone_lines
from kernel_agent.compiler.stub.docstrings import backward_docstring, computed
from kernel_agent.compiler.stub.dtypes import for_every_dtype
from kernel_agent.compiler.stub.forward import Kept, forward_function
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.narrow import refused_narrow
from kernel_agent.compiler.stub.needs import sparing
from kernel_agent.compiler.stub.partly import none_where_unbound, sometimes_bound
from kernel_agent.compiler.stub.repeated import repeated
from kernel_agent.compiler.stub.shared import shared_kernels
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import Trace
from kernel_agent.compiler.stub.unbound import unbound
from kernel_agent.compiler.stub.ways import Way, branched
from kernel_agent.errors import InternalError
from kernel_agent.pairs.adjoints import declarable
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec

Printer = Callable[..., KernelSource]
"""The Triton source of a kernel; `docstring` as `triton_source` takes it."""


@dataclass(frozen=True)
class Sections:
    """What is derived."""

    candidate: Candidate
    plans: tuple[BackwardPlan, ...]
    """Of the launches whose backward is launched, from the last to the first."""
    remarks: tuple[str, ...] = ()
    """What is to be told of loops around them, and of calls that the backward refuses."""


def write_sections(
    spec: KernelSpec,
    source: StubSource,
    ways: Sequence[Way],
    printer: Printer,
    clones: Mapping[str, str] | None = None,
) -> Sections:
    """Write both sections. `clones`: locals of the stub that the user's has not, and what each is a clone of; those
    that the backward does not need are left out again. Raises `CannotDerive`."""
    traces = [way.trace for way in ways]
    finals, sometimes = _merged([one.names for one in traces]), _sometimes_given(traces)
    names = Names(source, finals, clones, sometimes)
    sources: dict[int, KernelSource] = {}

    def signature(kernel: Kernel, document: Callable[[str], str] | None = None) -> Sequence[str]:
        printed = printer(kernel)
        if document is not None:
            printed = documented(printed, document(printed.text))
        sources[id(kernel)] = for_every_dtype(printed, kernel, spec.facts.source)
        return sources[id(kernel)].parameters

    writers = [
        BackwardWriter(
            way.trace, source, names, way.kernels, way.planner, way.eraser, signature, spec.grads, way.optional
        )
        for way in ways
    ]
    written = [writer.write(_outputs(spec, way.trace)) for way, writer in zip(ways, writers, strict=True)]
    optional = {(place, name) for way in ways for place, name, value in way.conditions if value is None}
    tests = [way.tests(writer, names, optional) for way, writer in zip(ways, writers, strict=True)]
    texts = [[sources[id(kernel)] for kernel in one.kernels] for one in written]
    shared = shared_kernels(written, texts, tests, names)
    written = shared.written
    unpacked = names.unpacked()
    spare = clone_lines(source, set(clones or {}) - {kept.name for kept in unpacked.saved})
    saved, absent = none_where_unbound(unpacked.saved, sometimes_bound(source.function).difference(source.parameters))
    if names.states is not None:  # as many as the loop has trips, behind all else
        saved = (*saved, Kept(f"*{names.states.name}", f"*{names.states.name}"))
    forward = forward_function(
        source.whole, saved, (*unpacked.first, *absent), spare, _kept(names, source), returns_saved=spec.facts.is_pair
    )
    flags = [names.fresh(f"need_{name}") for name in spec.grads]
    spared = [sparing(one.body, one.results, flags) for one in written]
    written = [
        one if less is None else replace(one, body=less.body, results=less.results)
        for one, less in zip(written, spared, strict=True)
    ]
    body = [_unpacking([kept.name for kept in saved]), *(Line(text) for text in unpacked.lines)]
    parameters = ["saved", *(name for name, _ in _outputs(spec, ways[0].trace))]
    if any(less is not None for less in spared):
        parameters.append("needs=None")
        body.append(Line("", tuple(flags), f" = needs or (True,) * {len(flags)}", bare=True))
    always = {name: value for name, value in finals.items() if name not in sometimes}
    narrow = refused_narrow(traces, source, saved, always)
    body += narrow
    body += branched(tests, written)
    steps = [(plan, kernel) for one in written for plan, kernel in one.steps]
    made: dict[str, str] = {}
    for plan, kernel in steps:  # of what a kernel computes for several ways, the most
        name, what = shared.names[kernel.name], computed(plan, kernel)
        made[name] = max(made.get(name, ""), what, key=len)
    docstring = backward_docstring(spec.grads, [name for name in parameters if name.startswith("grad_")], made)
    head = Line("def backward(", tuple(parameters), "):").shown(names.filled, 0)
    head.append(f'    """{docstring}"""')
    function = "\n".join([*head, *(row for line in body for row in line.shown(names.filled, 1))])
    lost = unbound(function, flags)
    if lost:
        raise InternalError(f"the derived backward reads {', '.join(lost)} before anything binds it")
    helpers = dict.fromkeys(helper for one in written for helper in one.helpers)
    ops = declarable({name for one in written for name in one.torch_ops})
    ops |= repeated(function, [way.trace for way in ways])
    candidate = Candidate(
        forward=_forward_section(spec, source.whole, forward),
        backward=_backward_section(shared.kernels, list(helpers), function),
        torch_ops=tuple(sorted(ops)),
    )
    told = dict.fromkeys(text for one in written for text in one.remarks)
    told |= {"calls with floats of 16 bits are refused: no entry of SWEEP has them": None} if narrow else {}
    return Sections(candidate, tuple(plan for one in written for plan in one.plans), tuple(told))


def _kept(names: Names, source: StubSource) -> dict[int, str]:
    """Statements by which the forward keeps states of trips, by the lines that they stand ahead of."""
    if names.states is None:
        return {}
    (loop,) = [one for one in source.whole.function.body if one.lineno == names.states.loop.first]
    assert isinstance(loop, ast.For)
    return {loop.lineno: names.states.made, loop.body[0].lineno: names.states.grown}


def _merged(finals: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Locals of several calls; a tensor rather than None."""
    found: dict[str, object] = {}
    for final in finals:
        for name, value in final.items():
            if name not in found or isinstance(value, Tensor):
                found[name] = value
    return found


def _sometimes_given(traces: Sequence[Trace]) -> set[str]:
    """Parameters and locals that are None in one of several calls; what a tensor is asked for is asked elsewhere."""
    given = [set(one.inputs) for one in traces]
    nothing = {name for one in traces for name, value in one.names.items() if value is None}
    return nothing | set().union(*given) - given[0].intersection(*given)


def _outputs(spec: KernelSpec, trace: Trace) -> list[tuple[str, Tensor | None]]:
    """Name of every cotangent, with the output where it has one."""
    result = trace.result[0] if spec.facts.is_pair else trace.result
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return [
        (f"grad_{fact.name}", value if isinstance(value, Tensor) and fact.needs_grad else None)
        for fact, value in zip(spec.outputs, values, strict=True)
    ]


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
