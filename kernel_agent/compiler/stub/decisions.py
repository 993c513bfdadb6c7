"""`decisions`: how the conditions in a stub's own text fell in one call, which tells the ways through it apart."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

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
        if not all(name in trace.names for name in locals_):
            continue
        line = (
            test.lineno if all(source.kept_after(name, test.lineno) for name in locals_) else _asked_later(source, test)
        )
        if line is None:
            continue
        try:
            value = source.value(test, trace.names)
        except Exception:  # the user's code, on images of tensors: what cannot be asked again tells nothing
            continue
        if isinstance(value, (bool, int)):
            found[test.lineno, test.col_offset] = Decision(test, line, bool(value))
    return found


def _asked_later(source: StubSource, test: ast.expr) -> int | None:
    """The line after which a condition has the value that it had, where it asks whether a tensor is there and all that
    is bound to the name later is what a method of it gives: `bias = bias.contiguous()`."""
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and len(test.ops) == 1):
        return None
    (operator,), (other,), name = test.ops, test.comparators, test.left.id
    if not isinstance(operator, (ast.Is, ast.IsNot)) or not isinstance(other, ast.Constant) or other.value is not None:
        return None
    own = {id(node.targets[0]) for node in own_nodes(source.function) if _is_own_method(node, name)}
    later = [node for node in source.bindings(name) if getattr(node, "lineno", 0) > test.lineno]
    return max(getattr(node, "lineno", 0) for node in later) if all(id(node) in own for node in later) else None


def _is_own_method(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    """Whether a statement binds a name to what methods of its value give."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not _is_name(node.targets[0], name):
        return False
    value = node.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return value is not node.value and _is_name(value, name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


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
