"""Names a stub's outputs after the variables it returns, so that messages say `mean` and not `output 1`."""

from __future__ import annotations

import ast

from kernel_agent.pairs.sections import truth_source
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.syntax import Function, defined_functions, parse

RESERVED = frozenset({"saved", "needs"})
"""Names that `backward` uses itself."""


def output_names(facts: FileFacts, count: int) -> tuple[str, ...]:
    """`count` distinct names that are neither parameters nor keywords: returned variables, else `out` or `out0`, ..."""
    function = defined_functions(parse(truth_source(facts.source)))[facts.stub]
    taken = {*facts.parameters, facts.stub, *RESERVED}
    names: list[str] = []
    for position, variable in enumerate(_returned(function, count, facts.is_pair)):
        name = variable if variable and variable not in taken else "out" if count == 1 else f"out{position}"
        while name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _returned(function: Function, count: int, is_pair: bool) -> list[str | None]:
    """Variable names in the last `return` that returns `count` outputs; None where an expression is returned."""
    nothing: list[str | None] = [None] * count
    for value in reversed([node.value for node in _returns(function) if node.value is not None]):
        if is_pair and isinstance(value, ast.Tuple) and len(value.elts) == 2:
            value = value.elts[0]
        items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
        if len(items) == count:
            return [item.id if isinstance(item, ast.Name) else None for item in items]
    return nothing


def _returns(function: Function) -> list[ast.Return]:
    """Return statements of a function itself, in file order, without those of functions inside it."""
    found: list[ast.Return] = []
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Return):
            found.append(node)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
    return found
