"""The queries that retrieval is measured with: forwards in other authors' styles, also with names taken away."""

from __future__ import annotations

import ast
import builtins
import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "rag_queries"
"""`<family>/<name>.py`: the folder says which family a reader would look in."""


@dataclass(frozen=True)
class Wanted:
    """A forward, and the family its nearest pairs belong to."""

    name: str
    family: str
    source: str
    tune: bool
    """Whether it may be looked at when weights are set; the others only measure."""


def read_queries() -> tuple[Wanted, ...]:
    """All queries, by path. A hash of the name says which half one belongs to."""
    found = []
    for path in sorted(FOLDER.glob("*/*.py")):
        name = path.relative_to(FOLDER).as_posix()
        tune = hashlib.sha256(name.encode()).digest()[0] % 2 == 0
        found.append(Wanted(name, path.parent.name, path.read_text(encoding="utf-8"), tune))
    return tuple(found)


def renamed(forward: str) -> str:
    """The forward with strangers' names and no docstrings."""
    return ast.unparse(_Renamed().visit(ast.parse(forward)))


def unnamed(forward: str) -> str:
    """The forward with strangers' names for its kernels, functions and classes, and no docstrings."""
    tree = ast.parse(forward)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return ast.unparse(_Renamed(frozenset(defined)).visit(tree))


class _Renamed(ast.NodeTransformer):
    """Every own name, or each of a few, becomes a word that no index knows, alike wherever it stands."""

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self.only = only
        self.names: dict[str, str] = {}

    def _new(self, name: str) -> str:
        if (
            name in ("tl", "triton", "torch")
            or hasattr(builtins, name)
            or (self.only is not None and name not in self.only)
        ):
            return name
        number = len(self.names)
        letters = "".join(chr(ord("a") + number // 26**i % 26) for i in range(3))
        return self.names.setdefault(name, f"zq{letters}x")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename a use."""
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Rename a parameter and keep its annotation."""
        self.generic_visit(node)
        node.arg = self._new(node.arg)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rename a definition and drop its docstring."""
        return self._definition(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Rename a definition and drop its docstring."""
        return self._definition(node)

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Drop the docstring."""
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def _definition(self, node):  # type: ignore[no-untyped-def]
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.name = self._new(node.name)
        return node
