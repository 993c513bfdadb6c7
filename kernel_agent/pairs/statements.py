"""A user's file as a list of module-level statements with their own text, so that they can be arranged anew."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kernel_agent.pairs.sections import SECTION_MARKERS
from kernel_agent.pairs.syntax import Function, is_main_guard, parse


@dataclass(frozen=True)
class Statement:
    """One module-level statement, or several that share a line."""

    text: str
    """Its lines as the user wrote them, with the comments above, without trailing newline."""
    nodes: tuple[ast.stmt, ...]
    """The syntax; all but one-liners with `;` have one node."""
    binds: frozenset[str]
    """Names it binds or changes: definitions, imports, assignments, `SWEEP.append(...)`."""
    uses: frozenset[str]
    """Names it mentions."""

    @property
    def is_import(self) -> bool:
        """Whether it imports and does nothing else."""
        return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in self.nodes)

    @property
    def is_future(self) -> bool:
        """Whether it is `from __future__ import ...`, which must stand first in a file."""
        return all(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in self.nodes)

    @property
    def is_definition(self) -> bool:
        """Whether it only defines functions and classes: leaving it out changes nothing but the names it binds."""
        return all(isinstance(node, (Function, ast.ClassDef)) for node in self.nodes)


def statements(source: str, *, drop_decorator: ast.expr | None = None) -> list[Statement]:
    """Cut a file into statements, without its docstring, `__main__` block and kernel_agent imports.

    `drop_decorator` (a node of `parse(source)`, compared by position) is left out of the text.
    """
    lines = source.replace("\r\n", "\n").split("\n")
    found: list[Statement] = []
    above = 0
    for nodes in _by_line(parse(source).body):
        first, last = _first_line(nodes[0]), nodes[-1].end_lineno or nodes[-1].lineno
        text = _comments(lines[above : first - 1]) + _body(lines, first, last, drop_decorator)
        above = last
        kept = [node for node in nodes if not is_main_guard(node) and not is_text(node) and not _is_ours(node)]
        if not kept:
            continue
        rebuilt = _without_ours(kept)
        if rebuilt is not None:
            text = [rebuilt]
        found.append(Statement("\n".join(text), tuple(kept), _binds(kept), _uses(kept)))
    return found


def _by_line(body: list[ast.stmt]) -> list[list[ast.stmt]]:
    groups: list[list[ast.stmt]] = []
    for node in body:
        if groups and _first_line(node) <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, (Function, ast.ClassDef)) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _comments(lines: list[str]) -> list[str]:
    """Comment lines directly above a statement; comments set apart by a blank line stay with it too, unless markers."""
    return [line.rstrip() for line in lines if line.strip() and line.rstrip() not in SECTION_MARKERS]


def _body(lines: list[str], first: int, last: int, dropped: ast.expr | None) -> list[str]:
    gone = range(0) if dropped is None else range(dropped.lineno, (dropped.end_lineno or dropped.lineno) + 1)
    return [lines[number - 1].rstrip() for number in range(first, last + 1) if number not in gone]


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string that nothing is done with: a docstring, or one that serves as a comment."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_ours(node: ast.stmt) -> bool:
    """Whether a statement only imports from kernel_agent, perhaps under `try`."""
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] == "kernel_agent" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").partition(".")[0] == "kernel_agent"
    return isinstance(node, ast.Try) and all(_is_ours(inner) for inner in node.body)


def _without_ours(nodes: list[ast.stmt]) -> str | None:
    """New text for `import torch, kernel_agent`; None where the user's text can stay."""
    if len(nodes) != 1 or not isinstance(nodes[0], ast.Import):
        return None
    names = [alias for alias in nodes[0].names if alias.name.partition(".")[0] != "kernel_agent"]
    return None if len(names) == len(nodes[0].names) else ast.unparse(ast.Import(names=names))


def _binds(nodes: list[ast.stmt]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, (Function, ast.ClassDef)):
            names.add(node.name)
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.alias):
                names.add(part.asname or part.name.partition(".")[0])
            elif isinstance(part, (Function, ast.ClassDef)):
                names.add(part.name)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                names.add(part.id)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target = node.value.func
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                names.add(target.value.id)
    return frozenset(names)


def _uses(nodes: list[ast.stmt]) -> frozenset[str]:
    return frozenset(part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))
