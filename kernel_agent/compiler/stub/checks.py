"""Checks of facts that several ways through a backward share: asked once, before the ways part."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kernel_agent.compiler.stub.lines import UNFORMATTED, Line

Check = tuple[Line, Line]
"""`if ...:` and what it raises."""


def shared_checks(bodies: Sequence[Sequence[Line]]) -> tuple[list[Line], list[list[Line]]]:
    """The checks that all bodies have and that read nothing which a body binds, and the bodies without them."""
    bound = {name for body in bodies for line in body if not line.depth for name in _bound(line)}
    common = [
        check
        for check in _checks(bodies[0])
        if all(check in _checks(body) for body in bodies[1:]) and not bound & _names(check[0])
    ]
    return [line for check in common for line in check], [_without(body, common) for body in bodies]


def _checks(body: Sequence[Line]) -> list[Check]:
    return [
        (line, body[place + 1])
        for place, line in enumerate(body[:-1])
        if not line.depth and line.opening.startswith("if ") and body[place + 1].opening.startswith("raise ValueError(")
    ]


def _without(body: Sequence[Line], checks: Sequence[Check]) -> list[Line]:
    kept: list[Line] = []
    place = 0
    while place < len(body):
        if tuple(body[place : place + 2]) in checks:
            place += 2
        else:
            kept.append(body[place])
            place += 1
    return kept


def _bound(line: Line) -> set[str]:
    """Names that a statement gives a value; of the head of a block none."""
    text = "\n".join(line.shown(str, 0)).removesuffix(UNFORMATTED)
    return set() if text.endswith(":") else _names_of(text, ast.Store)


def _names(line: Line) -> set[str]:
    return _names_of("\n".join([*line.shown(str, 0), "    pass"]), ast.Load)


def _names_of(text: str, context: type[ast.expr_context]) -> set[str]:
    return {
        node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }
