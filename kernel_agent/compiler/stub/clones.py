"""`with_clones`: the text of a stub that keeps what launches overwrite, in locals that the backward may ask for."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.stub.source import StubSource


def with_clones(source: StubSource, wanted: Sequence[tuple[int, str]]) -> tuple[str, dict[str, str]]:
    """The text with a statement `x_before = x.clone()` in front of statements that launch.

    `wanted`: a line of a launch, and a local that is a tensor there. Returns the text and, for each new local, the one
    that it is a clone of.
    """
    taken = {node.id for node in ast.walk(source.function) if isinstance(node, ast.Name)} | set(source.parameters)
    lines, clones = list(source.lines), {}
    for line, local in sorted(set(wanted), reverse=True):
        statement = _statement(source.function, line)
        if statement is None or lines[statement.lineno - 1][: statement.col_offset].strip():
            continue
        name = free_name(f"{local}_before", taken)
        clones[name] = local
        lines.insert(statement.lineno - 1, f"{' ' * statement.col_offset}{name} = {local}.clone()")
    return "\n".join(lines), clones


def clone_before(source: StubSource, line: int, local: str, clones: Mapping[str, str]) -> str | None:
    """The clone of a local that is made right before the launch in a line; None where there is none."""
    for body in _bodies(source.function):
        for place, statement in enumerate(body):
            if not statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                continue
            for other in reversed(body[:place]):
                name = _target(other)
                if name not in clones:
                    break
                if clones[name] == local:
                    return name
    return None


def clone_lines(source: StubSource, names: Collection[str]) -> list[int]:
    """Where the stub makes some clones."""
    return [one.lineno for body in _bodies(source.function) for one in body if _target(one) in names]


def _target(statement: ast.stmt) -> str:
    """The local that a plain assignment binds; empty for anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _statement(function: ast.FunctionDef, line: int) -> ast.stmt | None:
    """The innermost statement around a line."""
    found = None
    for body in _bodies(function):
        for one in body:
            if one.lineno <= line <= (one.end_lineno or one.lineno):
                found = one
    return found


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements, those around before those within."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body
            for one in body:
                yield from _bodies(one)
