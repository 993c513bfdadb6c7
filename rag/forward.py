"""The forward part of a file: what a search may look at. Nothing of the check or of a backward belongs to it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.pairs.sections import has_all_markers, split_sections
from kernel_agent.pairs.syntax import parse

# Top-level names of the published convention that are not the forward itself.
NOT_FORWARD = frozenset(
    {"META", "SWEEP", "make_args", "reference", "surrogate", "flops", "setup", "backward", "main", "__main__"}
)

BACKWARD_METHODS = frozenset({"backward", "vjp", "jvp", "vmap"})
"""Methods of an autograd.Function that are not its forward."""


@dataclass(frozen=True)
class ForwardPart:
    """The statements of a file that make up its forward."""

    docstring: str
    """Docstring of the module, empty if there is none."""
    statements: tuple[ast.stmt, ...]
    """Imports, constants, kernels and host functions in file order, without the docstring."""

    @property
    def functions(self) -> tuple[ast.FunctionDef, ...]:
        """Kernels and host functions, also in a class or behind an `if` or `try`; none inside another function."""
        return tuple(_functions(self.statements))


def forward_part(source: str, path: Path | None = None) -> ForwardPart:
    """Cut the forward out of a user's file or a pair file by its syntax tree; nothing is executed.

    Of a pair file, the forward section is kept. Of a user's file, everything is kept but the convention's other names
    (SWEEP, make_args, reference, backward, ...) and the functions that only those use. Raises InputError with the line
    if the source is not Python.
    """
    docstring = ast.get_docstring(parse(source, path)) or ""
    if has_all_markers(source):
        return ForwardPart(docstring, tuple(parse(split_sections(source).forward, path).body))
    whole = parse(source, path).body[1 if docstring else 0 :]
    body = [_without_backward(statement) for statement in whole]
    methods = [was for was, now in zip(whole, body, strict=True) if was is not now]
    return ForwardPart(docstring, tuple(_without_others(body, _names_used(methods))))


def _functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, (ast.ClassDef, ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from _functions(ast.iter_child_nodes(node))


def _without_backward(statement: ast.stmt) -> ast.stmt:
    """A class without its methods `backward`, `vjp`, ...; any other statement as it is."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    kept = [s for s in statement.body if not (isinstance(s, ast.FunctionDef) and s.name in BACKWARD_METHODS)]
    same = copy.copy(statement)
    same.body = kept or [ast.Pass()]
    return statement if len(kept) == len(statement.body) else same


def _without_others(body: list[ast.stmt], dropped_uses: set[str]) -> list[ast.stmt]:
    others = [statement for statement in body if _names_bound(statement) & NOT_FORWARD]
    kept = [statement for statement in body if statement not in others]
    # A kernel that only the dropped statements use (the hand-written backward's) goes with them, and so on downwards.
    while True:
        only_theirs = (_names_used(others) | dropped_uses) - _names_used(kept)
        dropped = [s for s in kept if isinstance(s, ast.FunctionDef) and s.name in only_theirs]
        if not dropped:
            return kept
        others += dropped
        kept = [statement for statement in kept if statement not in dropped]


def _names_bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    if isinstance(statement, ast.If) and any(
        isinstance(node, ast.Constant) and node.value == "__main__" for node in ast.walk(statement.test)
    ):
        return {"__main__"}
    return set()


def _names_used(statements: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
