"""`apart`: results of a backward that would be views of one memory, as one tensor or as tensors of their own; `whole`:
one whose elements would share a place in memory, with a place for each.

Where a kernel computes one gradient for two inputs, each gets a view of it in its own shape. Autograd keeps what it is
given as the `.grad` of each: of two that share memory, scaling one in place would scale the other. One tensor for both
it sees, and copies.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.stub.body import Body

_VIEWS = frozenset({"reshape", "as_strided", "permute", "to"})
"""Methods by which a backward puts a gradient into the form of its input; what they give may be a view."""


@dataclass(frozen=True)
class _View:
    """What an expression makes of a variable."""

    root: str
    """The variable."""
    steps: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Methods and what they are given, the first one first."""

    @property
    def text(self) -> str:
        """As an expression."""
        return self.root + "".join(f".{method}({', '.join(given)})" for method, given in self.steps)


def apart(names: Sequence[str], results: Sequence[str], body: Body) -> list[str]:
    """The results, each an expression of the gradient of the input of that name, of which no two are views of one
    variable: inputs of one form share a tensor, and others get copies."""
    found = list(results)
    views = [_view(text) for text in results]
    for place, view in enumerate(views):
        earlier = next((at for at in range(place) if view is not None and _root(views[at]) == view.root), None)
        first = None if earlier is None else views[earlier]
        if view is None or first is None or earlier is None or not (view.steps or first.steps):
            continue
        if found[earlier] == results[earlier] and first.steps:
            found[earlier] = body.bind(f"d{names[earlier]}", first.text)
        alike = _alike(first, view)
        copied = f"{view.text}.clone()"
        text = copied if alike is None else f"{found[earlier]} if {alike} else {copied}" if alike else found[earlier]
        found[place] = body.bind(f"d{names[place]}", text) if alike else text
    return found


def whole(result: str, body: Body) -> str:
    """A result; one that repeats what it has, as the gradient of a sum does, is written out."""
    return f"{result}.contiguous()" if _repeats(ast.parse(result, mode="eval").body, body) else result


def _repeats(node: ast.expr, body: Body) -> bool:
    """Whether an expression, or what a variable was bound to, is expanded, and only put into another form since."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "expand":
            return True
        if node.func.attr not in _VIEWS:
            return False
        node = node.func.value
    bound = body.bound(node.id) if isinstance(node, ast.Name) else ""
    return bool(bound) and _repeats(ast.parse(bound, mode="eval").body, body)


def _root(view: _View | None) -> str:
    return "" if view is None else view.root


def _view(text: str) -> _View | None:
    """An expression as a view; None where it is something else. Of several shapes one after the other the last one
    counts."""
    node = ast.parse(text, mode="eval").body
    steps: list[tuple[str, tuple[str, ...]]] = []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
        if node.keywords:
            return None
        step = (node.func.attr, tuple(map(ast.unparse, node.args)))
        if not (step[0] == "reshape" and steps and steps[-1][0] == "reshape"):
            steps.append(step)
        node = node.func.value
    return _View(node.id, tuple(reversed(steps))) if isinstance(node, ast.Name) else None


def _alike(one: _View, other: _View) -> str | None:
    """A condition under which two views of a variable are the same; empty where they always are, None where that is not
    known."""
    if not one.steps or not other.steps:
        return _is_as_it_was(one.root, *one.steps, *other.steps)
    if [method for method, _ in one.steps] != [method for method, _ in other.steps]:
        return None
    asked: dict[str, None] = {}
    for (_, first), (_, second) in zip(one.steps, other.steps, strict=True):
        if len(first) != len(second):
            return None
        asked.update((f"{there} == {here}", None) for here, there in zip(first, second, strict=True) if here != there)
    return " and ".join(asked)


def _is_as_it_was(root: str, *steps: tuple[str, tuple[str, ...]]) -> str | None:
    """A condition under which a view is the variable itself."""
    asked = []
    for method, given in steps:
        if method == "reshape" and len(given) == 1:
            asked.append(f"{root}.shape == {given[0]}")
        elif method == "as_strided":
            asked.append(f"({root}.shape, {root}.stride()) == ({given[0]}, {given[1]})")
        elif method == "to":
            asked.append(f"{root}.dtype == {given[0]}")
        else:
            return None
    return " and ".join(asked)
