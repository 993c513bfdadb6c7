"""`bindings`: which expressions give the names of a backward their values where a kernel is launched."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Bindings = Mapping[str, tuple[ast.expr, ...]]
"""Name -> the expressions that give it its value."""


def bindings(scope: ast.Module | Function, before: ast.AST | None = None) -> Bindings:
    """Names with the expression that gives them their value: the only one of the scope or, given a node of it, the last
    one that surely runs before that."""
    found: dict[str, list[tuple[ast.expr, ...]]] = {}
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in nodes:
        for name, values in _bound(node):
            found.setdefault(name, []).append(values)
    single = {name: values[0] for name, values in found.items() if len(values) == 1}
    return single if before is None else {**single, **_last(scope.body, before)}


def _last(block: Sequence[ast.stmt], before: ast.AST) -> dict[str, tuple[ast.expr, ...]]:
    """What the statements of a block bind, once, on the way to a node, by name; nothing where that is left open."""
    found: dict[str, tuple[ast.expr, ...]] = {}
    for statement in block:
        if any(node is before for node in ast.walk(statement)):
            parts = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            inside = [part for part in parts if any(node is before for one in part for node in ast.walk(one))]
            return {**found, **_last(inside[0], before)} if inside else found
        if isinstance(statement, ast.Assign):
            found |= {name: () if name in found else values for name, values in _bound(statement)}
        else:
            for node in ast.walk(statement):
                for name, _ in _bound(node):
                    found.pop(name, None)
    return found


def _bound(node: ast.AST) -> Iterator[tuple[str, tuple[ast.expr, ...]]]:
    """Names that an assignment binds, each with the expressions that it may be."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, (node.value,)
        elif isinstance(target, ast.Tuple):
            for place, name in enumerate(target.elts):
                if isinstance(name, ast.Name):
                    yield name.id, tuple(_element(node.value, place))


def _element(value: ast.expr, place: int) -> Iterator[ast.expr]:
    """One element of a tuple, or of both of `(128, 64) if wide else (64, 32)`."""
    if isinstance(value, ast.Tuple) and place < len(value.elts):
        yield value.elts[place]
    elif isinstance(value, ast.IfExp):
        yield from _element(value.body, place)
        yield from _element(value.orelse, place)
