"""`asked_numbers`: literals that a kernel compares its constexprs with, as `if ORDER == 2`: there it is another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction

from kernel_agent.compiler.ssa.special import Number

_EQUATIONS = (ast.Eq, ast.NotEq)
_SIDES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


@dataclass(frozen=True)
class Asked:
    """What a kernel asks of one constexpr."""

    equal: tuple[Number, ...] = ()
    """Whether it is one of these."""
    sides: tuple[Number, ...] = ()
    """On which side of these it is."""

    def __or__(self, other: Asked) -> Asked:
        return Asked(
            tuple(dict.fromkeys((*self.equal, *other.equal))), tuple(dict.fromkeys((*self.sides, *other.sides)))
        )


def asked_numbers(function: Any, open_: frozenset[str] = frozenset()) -> dict[str, Asked]:
    """By parameter. What a function asks that is called with a parameter counts. `open_`: functions that are being
    read."""
    found: dict[str, Asked] = {}
    tree = function.parse().body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for name, asked in _compared(node):
                found[name] = found.get(name, Asked()) | asked
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            callee = function.fn.__globals__.get(node.func.id)
            if isinstance(callee, JITFunction) and callee.fn.__name__ not in open_:
                inner = asked_numbers(callee, open_ | {function.fn.__name__})
                for parameter, name in _handed(node, callee.arg_names):
                    if parameter in inner:
                        found[name] = found.get(name, Asked()) | inner[parameter]
    return found


def _compared(node: ast.Compare) -> Iterator[tuple[str, Asked]]:
    """Names, and what is asked of them."""
    sides = [node.left, *node.comparators]
    for one, relation, other in zip(sides, node.ops, sides[1:], strict=False):
        for name, literal in ((one, other), (other, one)):
            number = _number(literal)
            if isinstance(name, ast.Name) and number is not None and isinstance(relation, (*_EQUATIONS, *_SIDES)):
                yield name.id, Asked((number,)) if isinstance(relation, _EQUATIONS) else Asked((), (number,))


def _number(node: ast.expr) -> Number | None:
    """A literal, perhaps with a sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    known = node.value if isinstance(node, ast.Constant) else None
    return known if isinstance(known, (int, float)) and not isinstance(known, bool) else None


def _handed(node: ast.Call, parameters: list[str]) -> Iterator[tuple[str, str]]:
    """Parameters of a function, and names that a call gives for them."""
    given: Mapping[str, ast.expr] = {
        **dict(zip(parameters, node.args, strict=False)),
        **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg},
    }
    for parameter, value in given.items():
        if isinstance(value, ast.Name):
            yield parameter, value.id
