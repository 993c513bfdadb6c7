"""`Module`: one parsed file of a checkout: what its module-level names are bound to."""

from __future__ import annotations

import ast
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.pairs.syntax import Function, is_main_guard
from rag.harvest.scope import Imported, Reference, references

MUTATORS = frozenset({"append", "extend", "insert", "update", "add", "setdefault"})
"""Methods by which a module-level statement completes a table."""


@dataclass(frozen=True)
class Binding:
    """One statement's part in what a name means."""

    unit: ast.stmt
    """The statement to take along: the binding one, or the whole block where several of its branches bind the name."""
    node: ast.AST | None = None
    """The function, class or assigned expression."""
    imported: Imported | None = None
    """What it is imported as."""
    fallback: bool = False
    """It stands where something could not be imported, or binds None."""


class Module:
    """A file of a checkout and its names. `path` is relative to the checkout, with forward slashes."""

    def __init__(self, path: str, text: str, tree: ast.Module) -> None:
        self.path = path
        self.text = text
        self.tree = tree
        self.stars: list[Imported] = []
        self.bindings: dict[str, list[Binding]] = defaultdict(list)
        for statement in tree.body:
            self._bind(statement, statement, fallback=False)
            self._merge(statement)
        self._references: dict[tuple[ast.AST, ast.ClassDef | None], tuple[Reference, ...]] = {}

    @functools.cached_property
    def lines(self) -> list[bytes]:
        """Lines as UTF-8, with their ends: positions in a syntax tree count bytes."""
        return [line.encode("utf-8") for line in self.text.splitlines(keepends=True)]

    @functools.cached_property
    def data(self) -> bytes:
        """The whole text as UTF-8."""
        return b"".join(self.lines)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each line begins in `data`, and the end of the last."""
        return list(itertools.accumulate(map(len, self.lines), initial=0))

    def place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The range of `data` in which a node stands."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end_column

    @property
    def future_annotations(self) -> bool:
        """Whether annotations are not evaluated."""
        return any(
            b.imported is not None and b.imported.module == "__future__" for b in self.bindings.get("annotations", ())
        )

    def references(self, node: ast.AST, owner: ast.ClassDef | None = None) -> tuple[Reference, ...]:
        """What a part of this file, perhaps a member of a class, refers to outside of itself; kept."""
        if (node, owner) not in self._references:
            self._references[node, owner] = tuple(references(node, owner))
        return self._references[node, owner]

    def value(self, name: str) -> ast.AST | None:
        """The last function, class or expression that a name is bound to, rather than a fallback."""
        found = [binding for binding in self.bindings.get(name, ()) if binding.node is not None]
        best = [binding for binding in found if not binding.fallback] or found
        return best[-1].node if best else None

    def units(self, name: str) -> list[ast.stmt]:
        """Statements that give a name its meaning, in order."""
        found = [binding for binding in self.bindings.get(name, ()) if binding.imported is None]
        best = [binding for binding in found if not binding.fallback] or found
        return list(dict.fromkeys(binding.unit for binding in best))

    def classes(self) -> Iterator[tuple[ast.ClassDef, bool]]:
        """Every class, and whether it stands at module level."""
        top = {id(b.node) for found in self.bindings.values() for b in found}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node, id(node) in top

    def functions(self) -> Iterator[ast.FunctionDef]:
        """Functions at module level."""
        for found in self.bindings.values():
            for binding in found:
                if isinstance(binding.node, ast.FunctionDef):
                    yield binding.node

    def _bind(self, node: ast.stmt, top: ast.stmt, *, fallback: bool) -> None:
        if isinstance(node, (Function, ast.ClassDef)):
            self.bindings[node.name].append(Binding(node, node, fallback=fallback))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name, imported = Imported.of_import(alias)
                self.bindings[name].append(Binding(node, imported=imported, fallback=fallback))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported = Imported(node.module or "", node.level, alias.name)
                if alias.name == "*":
                    self.stars.append(imported)
                else:
                    self.bindings[alias.asname or alias.name].append(
                        Binding(node, imported=imported, fallback=fallback)
                    )
        elif isinstance(node, ast.Assign):
            self._assign(node.targets, node.value, node, fallback)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._assign([node.target], node.value, node, fallback)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in MUTATORS and isinstance(called.value, ast.Name):
                self.bindings[called.value.id].append(Binding(node, node.value, fallback=fallback))
        elif not is_main_guard(node):
            self._bind_blocks(node, top, fallback)

    def _bind_blocks(self, node: ast.stmt, top: ast.stmt, fallback: bool) -> None:
        if isinstance(node, ast.For):
            self._assign([node.target], node.iter, node, fallback)
        for block in ("body", "orelse", "finalbody"):
            for inner in getattr(node, block, ()):
                self._bind(inner, top, fallback=fallback)
        for handler in getattr(node, "handlers", ()):
            for inner in handler.body:
                self._bind(inner, top, fallback=True)

    def _merge(self, top: ast.stmt) -> None:
        """Take a whole block for a name that a loop, or more than one of its branches, binds."""
        if not isinstance(top, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            return
        inside = {id(node) for node in ast.walk(top)}
        for name, bindings in self.bindings.items():
            own = [b for b in bindings if id(b.unit) in inside and b.imported is None and not b.fallback]
            if len(own) > 1 or (own and isinstance(top, (ast.For, ast.While))):
                self.bindings[name] = [replace(b, unit=top) if b in own else b for b in bindings]

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, unit: ast.stmt, fallback: bool) -> None:
        nothing = isinstance(value, ast.Constant) and value.value is None
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                values = value.elts if same and isinstance(value, (ast.Tuple, ast.List)) else [value] * len(target.elts)
                for inner, own in zip(target.elts, values, strict=True):
                    self._assign([inner], own, unit, fallback)
            elif isinstance(target, ast.Starred):
                self._assign([target.value], value, unit, fallback)
            elif isinstance(target, ast.Name):
                self.bindings[target.id].append(Binding(unit, value, fallback=fallback or nothing))
            elif isinstance(target, (ast.Subscript, ast.Attribute)) and isinstance(target.value, ast.Name):
                self.bindings[target.value.id].append(Binding(unit, value, fallback=fallback))
