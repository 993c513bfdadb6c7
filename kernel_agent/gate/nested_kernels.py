"""Kernels that are defined within a function, a class or a branch, where they mean what they would at the top level.

Builders of kernels and classes of operators define them there. Such a kernel can be taken out only where every name it
uses has its meaning at the top level: none is bound by a function around it, other than as a kernel that is taken out
as well. And its own name must be bound nowhere else at the top level, else other kernels would meet it there.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Nested:
    """A function below the top level."""

    node: ast.FunctionDef
    around: tuple[ast.AST, ...]
    """Functions that it is defined in, the outermost first; classes bind no names for what is in them."""


def nested_kernels(
    module: Sequence[ast.stmt], some: Sequence[ast.stmt], is_kernel: Callable[[ast.FunctionDef], bool]
) -> list[ast.stmt]:
    """Those within `some` statements of a module that may stand at its top level; `is_kernel` tells by decorators."""
    found = [one for one in _within(some, ()) if is_kernel(one.node)]
    kernels = {id(one.node) for one in found}
    names = Counter(one.node.name for one in found)
    names.update(name for statement in module for name in _bound_at_top(statement, kernels))
    found = [one for one in found if names[one.node.name] == 1]
    taken = {id(one.node) for one in found}
    return [one.node for one in found if not _free(one.node) & set(_bound_around(one, taken))]


def _within(nodes: Sequence[ast.AST], around: tuple[ast.AST, ...]) -> Iterator[Nested]:
    for node in nodes:
        inner = (*around, node) if isinstance(node, _SCOPES) and not isinstance(node, ast.ClassDef) else around
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield Nested(child, inner)
            yield from _within([child], inner)


def _free(kernel: ast.FunctionDef) -> set[str]:
    """Names that a kernel does not bind itself, and those of its decorators, defaults and annotations."""
    own = {name for part in (kernel.args, *kernel.body) for inner in ast.walk(part) for name in _names(inner)}
    body = {part.id for node in kernel.body for part in ast.walk(node) if isinstance(part, ast.Name)}
    head = (*kernel.decorator_list, kernel.args, *([kernel.returns] if kernel.returns else []))
    return (body - own) | {part.id for node in head for part in ast.walk(node) if isinstance(part, ast.Name)}


def _bound_around(one: Nested, taken: set[int]) -> Iterator[str]:
    """Names that the functions around a kernel, or any within them, bind other than by kernels that are taken out."""
    waiting: list[ast.AST] = list(one.around)
    while waiting:
        node = waiting.pop()
        if id(node) not in taken:
            yield from _names(node)
            waiting += ast.iter_child_nodes(node)


def _bound_at_top(node: ast.AST, kernels: set[int]) -> Iterator[str]:
    """Names that a statement binds in the module itself, as `global` does from anywhere; nested `kernels` aside."""
    if id(node) in kernels:
        return
    yield from _names(node)
    if isinstance(node, _SCOPES):
        yield from (name for part in ast.walk(node) if isinstance(part, ast.Global) for name in part.names)
        return
    for child in ast.iter_child_nodes(node):
        yield from _bound_at_top(child, kernels)


def _names(node: ast.AST) -> Iterator[str]:
    """What one part of a tree binds, in whatever way."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
