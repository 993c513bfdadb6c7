"""`asked_numbers`: literals that a kernel compares its constexprs with, as `if ORDER == 2`: there it is another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from triton.runtime.jit import JITFunction

Number = int | float


def asked_numbers(function: Any, open_: frozenset[str] = frozenset()) -> dict[str, tuple[Number, ...]]:
    """By parameter. What a function asks that is called with a parameter counts. `open_`: functions that are being
    read."""
    found: dict[str, dict[Number, None]] = {}
    tree = function.parse().body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for name, number in _compared(node):
                found.setdefault(name, {})[number] = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            callee = function.fn.__globals__.get(node.func.id)
            if isinstance(callee, JITFunction) and callee.fn.__name__ not in open_:
                asked = asked_numbers(callee, open_ | {function.fn.__name__})
                for parameter, name in _handed(node, callee.arg_names):
                    if parameter in asked:
                        found.setdefault(name, {}).update(dict.fromkeys(asked[parameter]))
    return {name: tuple(numbers) for name, numbers in found.items()}


def _compared(node: ast.Compare) -> Iterator[tuple[str, Number]]:
    """Names and literals of equations."""
    sides = [node.left, *node.comparators]
    for one, relation, other in zip(sides, node.ops, sides[1:], strict=False):
        if not isinstance(relation, (ast.Eq, ast.NotEq)):
            continue
        for name, literal in ((one, other), (other, one)):
            number = literal.value if isinstance(literal, ast.Constant) else None
            if isinstance(name, ast.Name) and isinstance(number, (int, float)) and not isinstance(number, bool):
                yield name.id, number


def _handed(node: ast.Call, parameters: list[str]) -> Iterator[tuple[str, str]]:
    """Parameters of a function, and names that a call gives for them."""
    given: Mapping[str, ast.expr] = {
        **dict(zip(parameters, node.args, strict=False)),
        **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg},
    }
    for parameter, value in given.items():
        if isinstance(value, ast.Name):
            yield parameter, value.id
