"""`decisions`: how the conditions in a stub's own text fell in one call, which tells the ways through it apart."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.flow import EMPTY, SAME, is_float, storage_of, tensors_in
from kernel_agent.compiler.stub.source import StubSource, own_nodes
from kernel_agent.compiler.stub.trace import TorchSeen, Trace

_OF_IMAGES = frozenset({"dtype", "device", "element_size", "itemsize", "is_cuda", "item", "tolist"})
"""What the tensors of a traced call would answer in another way, or what needs their values."""

Fallen = Mapping[tuple[int, int], "Decision"]
"""By line and column."""


@dataclass(frozen=True)
class Decision:
    """A condition with its value."""

    node: ast.expr
    line: int
    """The condition was asked here; what it asks has the same value at the end."""
    value: bool


def decisions(source: StubSource, trace: Trace) -> Fallen:
    """The conditions that can be asked again at the end of the stub, as they fell in a call."""
    found = {}
    for node in own_nodes(source.function):
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        test = node.test
        locals_ = [name for name in free_names(test) if source.is_local(name)]
        if any(isinstance(one, ast.Attribute) and one.attr in _OF_IMAGES for one in ast.walk(test)):
            continue
        if not all(name in trace.names and source.kept_after(name, test.lineno) for name in locals_):
            continue
        try:
            value = source.value(test, trace.names)
        except Exception:  # the user's code, on images of tensors: what cannot be asked again tells nothing
            continue
        if isinstance(value, (bool, int)):
            found[test.lineno, test.col_offset] = Decision(test, test.lineno, bool(value))
    return found


def shared(calls: Sequence[Fallen]) -> Fallen:
    """The decisions that fell alike in several calls."""
    first, *rest = calls
    return {
        place: one
        for place, one in first.items()
        if all(place in other and other[place].value == one.value for other in rest)
    }


def apart(one: Fallen, other: Fallen) -> list[tuple[int, int]]:
    """Where decisions fell in two ways."""
    return [place for place, mine in one.items() if place in other and other[place].value != mine.value]


def torch_path(trace: Trace) -> tuple[tuple[str, int], ...]:
    """Which torch functions what depends on floating inputs went through, and where; those that leave it as it is
    aside."""
    active = {storage_of(tensor) for tensor in trace.inputs.values() if is_float(tensor)}
    found = []
    for event in trace.events:
        if not isinstance(event, TorchSeen):
            active |= {storage_of(tensor) for tensor in event.tensors.values() if is_float(tensor)}
        elif event.name not in EMPTY and _any(active, (event.args, event.kwargs)):
            active |= {storage_of(part) for part in tensors_in((event.result,)) if is_float(part)}
            if event.name not in SAME:
                found.append((event.name, event.site.line))
    return tuple(found)


def _any(active: set[int], values: object) -> bool:
    return any(isinstance(part, Tensor) and storage_of(part) in active for part in tensors_in(values))
