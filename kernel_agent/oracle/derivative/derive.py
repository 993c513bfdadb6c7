"""Traces a reference and its autograd, and writes down how the gradients follow from the inputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_agent.oracle.derivative.constants import Derivation
from kernel_agent.oracle.derivative.formula import Formula, Named, folded, legend
from kernel_agent.oracle.derivative.trace import Trace
from kernel_agent.oracle.derivative.translate import Translation
from kernel_agent.oracle.leaves import LeafCall

MOST_LINES = 48


@dataclass(frozen=True)
class Traced:
    """A function as recorded."""

    trace: Trace
    outputs: Mapping[str, Tensor]
    """Those that carry a gradient, by name."""
    grads: Mapping[str, Tensor | None]
    """By input."""


def derive(
    function: Callable[..., Any],
    call: LeafCall,
    names: Sequence[str],
    sizes: Mapping[str, int],
    outputs: Mapping[int, str],
) -> Derivation:
    """Lines of assignments that give `dx` for every leaf `x`, for cotangents `grad_y` of outputs `y`.

    `names` has one name per positional argument of the call; `sizes` are the dims to name numbers by; `outputs` are the
    names of those that have a cotangent, by position. Raises what the function raises.
    """
    traced = _traced(function, call, names, outputs)
    nodes = traced.trace.nodes
    scalars = _scalars(function, call, names)
    translation = Translation(nodes, sizes, scalars)
    results = [
        Named(f"d{name}", translation.of(0 if grad is None else traced.trace.node(grad)))
        for name, grad in traced.grads.items()
    ]
    formula = Formula(results, translation.named, sizes)
    lines = folded(formula.lines(), [result.name for result in results])
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES
        lines = (*lines[: MOST_LINES // 2], f"... {left} more lines ...", *lines[-(MOST_LINES // 2) :])
    symbols = {**{name: value for value, name in scalars.items()}, **sizes}
    return Derivation((*legend(lines), *lines), tuple(formula.constants.values), symbols)


def _traced(
    function: Callable[..., Any],
    call: LeafCall,
    names: Sequence[str],
    wanted: Mapping[int, str],
) -> Traced:
    trace = Trace()
    watch = _Locals(function)
    for name, value in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
        if isinstance(value, Tensor):
            trace.name(value, name)
    with trace, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        with watch:
            result = function(*call.args, **call.kwargs)
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        found = {
            name: outputs[place]
            for place, name in wanted.items()
            if place < len(outputs) and isinstance(outputs[place], Tensor) and outputs[place].requires_grad
        }
        gradients: dict[int, tuple[Tensor, str]] = {}
        for name, value in watch.found.items():
            if name in names or not trace.knows(value):
                continue
            trace.node(value).name = trace.node(value).name or name
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(_noting(gradients, f"d{name}"))
        cotangents = {name: torch.ones_like(output.detach()).normal_() for name, output in found.items()}
        for name, cotangent in cotangents.items():
            trace.name(cotangent, f"grad_{name}")
        grads = torch.autograd.grad(
            list(found.values()), list(call.leaves.values()), list(cotangents.values()), allow_unused=True
        )
    for tensor, name in gradients.values():
        if trace.knows(tensor) and trace.node(tensor).op != "input":
            trace.node(tensor).name = trace.node(tensor).name or name
    return Traced(trace, found, dict(zip(call.leaves, grads, strict=True)))


def _noting(found: dict[int, tuple[Tensor, str]], name: str) -> Callable[[Tensor], None]:
    def note(gradient: Tensor | None) -> None:
        if gradient is None:  # nothing flows there
            return
        found.setdefault(id(gradient), (gradient, name))

    return note


class _Locals:
    """Names of tensors in a function when it returns: they are the names its author thinks in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._code = getattr(inspect.unwrap(function), "__code__", None)
        self.found: dict[str, Tensor] = {}

    def __enter__(self) -> _Locals:
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _look(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "return" and frame.f_code is self._code:
            self.found = {name: value for name, value in frame.f_locals.items() if isinstance(value, Tensor)}


def _scalars(function: Callable[..., Any], call: LeafCall, names: Sequence[str]) -> dict[float, str]:
    """Values of number arguments by their names, where a value says whose it is."""
    given: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function).parameters.values()
        given = {p.name: p.default for p in parameters if p.default is not p.empty}
    except (TypeError, ValueError):  # no signature: only what was passed is known
        pass
    given |= {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    numbers = {name: float(value) for name, value in given.items() if type(value) in (int, float)}
    values = list(numbers.values())
    return {
        value: name
        for name, value in numbers.items()
        if values.count(value) == 1 and value not in (0.0, 1.0, -1.0, 2.0, 0.5)
    }
