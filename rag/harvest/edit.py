"""The text of a piece of a file with the names it has elsewhere: changed in place, all else stays as written."""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.pairs.sections import SECTION_MARKERS
from rag.harvest.closure import Gatherer, Piece, registrations, wrappings
from rag.harvest.module import Module
from rag.harvest.names import Names, bound_names
from rag.harvest.resolve import Definition, External, Resolved
from rag.harvest.scope import Imported, Reference


@dataclass(frozen=True)
class Change:
    """A range of a file's bytes and what stands there instead."""

    start: int
    end: int
    text: str


class Editor:
    """Writes pieces. `moved`: members of classes that the backward's class has now, with its name."""

    def __init__(self, gatherer: Gatherer, names: Names, moved: dict[str, str] | None = None) -> None:
        self._gatherer, self._names, self._moved = gatherer, names, moved or {}

    def prepare(self, pieces: list[Piece]) -> None:
        """Rename what could not be called by its name where it is used."""
        for piece in pieces:
            for reference in piece.references():
                resolved, _ = self._gatherer.needs(piece, reference)
                if isinstance(resolved.target, Definition) and not reference.through_self:
                    name = self._names.of(resolved.target)
                    other = len(reference.path) - len(resolved.rest) > 1 or name != reference.path[0]
                    if other and self._names.hidden(name):
                        self._names.rename(resolved.target)

    def text(self, piece: Piece) -> str:
        """A piece as it stands in the new file, with the comments above it, without indentation of its own."""
        module = piece.module
        first, last = _lines(piece)
        start, end = module.starts[first - 1], module.starts[last]
        parts, at = [], start
        for change in sorted(self._changes(piece), key=lambda change: change.start):
            if change.start < at or change.end > end:
                continue
            parts.append(module.data[at : change.start])
            parts.append(change.text.encode("utf-8"))
            at = change.end
        parts.append(module.data[at:end])
        text = textwrap.dedent(b"".join(parts).decode("utf-8")).rstrip()
        return "\n".join(line.rstrip() for line in text.split("\n") if line.rstrip() not in SECTION_MARKERS)

    def _changes(self, piece: Piece) -> Iterator[Change]:
        module = piece.module
        yield from self._without_registration(piece)
        for reference in piece.references():
            resolved, _ = self._gatherer.needs(piece, reference)
            change = self._renamed(module, reference, resolved)
            if change is not None:
                yield change
        if piece.owner is None:
            for name in bound_names(piece):
                final = self._names.of(Definition(module.path, name))
                if final != name:
                    yield from (Change(*place, final) for place in _sites(piece, name))
        if not piece.header:
            yield from self._local_imports(piece)
            for call in wrappings(piece.node):
                (start, end), (inner, inner_end) = module.place(call), module.place(call.args[0])
                yield from (Change(start, inner, ""), Change(inner_end, end, ""))

    def _renamed(self, module: Module, reference: Reference, resolved: Resolved) -> Change | None:
        target = resolved.target
        if not isinstance(target, (Definition, External)) or (isinstance(target, External) and reference.imported):
            return None
        if reference.through_self and not (isinstance(target, Definition) and resolved.member in self._moved):
            return None
        name = self._names.of(target)
        if isinstance(target, Definition) and resolved.member in self._moved:
            name = self._moved[resolved.member]
        used = len(reference.path) - len(resolved.rest)
        old = ".".join(reference.path[:used])
        node: ast.expr = reference.node
        for _ in range(len(reference.path) - used):
            assert isinstance(node, ast.Attribute)
            node = node.value
        place = module.place(node)
        if name == old or module.data[slice(*place)].decode("utf-8") != old:
            return None  # before Python 3.12, what stands in f-strings has no place of its own
        return Change(*place, name)

    def _local_imports(self, piece: Piece) -> Iterator[Change]:
        """Imports inside of functions of what stands in the same file now."""
        for node in ast.walk(piece.node):
            if isinstance(node, ast.ImportFrom):
                imported = [Imported(node.module or "", node.level, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                imported = [Imported.of_import(alias)[1] for alias in node.names]
            else:
                continue
            if any(self._gatherer.is_ours(one, piece.module) for one in imported):
                yield Change(*piece.module.place(node), "pass")

    def _without_registration(self, piece: Piece) -> Iterator[Change]:
        """Operators stand as plain functions: the file registers nothing when it is imported."""
        for decorator in registrations(piece.node):
            start, end = piece.module.place(decorator)
            yield Change(piece.module.data.rindex(b"@", 0, start), end, "# an operator of torch.library")


def _lines(piece: Piece) -> tuple[int, int]:
    """First and last line of a piece, from 1, with the comments directly above it."""
    node = piece.node
    decorated = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    decorators = node.decorator_list if isinstance(node, decorated) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    last = node.end_lineno or node.lineno
    if piece.header:
        assert isinstance(node, ast.ClassDef)
        ends = [node.lineno, *(part.end_lineno or 0 for part in (*node.bases, *(k.value for k in node.keywords)))]
        last = max(ends)
        while not piece.module.lines[last - 1].split(b"#")[0].rstrip().endswith(b":"):
            last += 1
        return first, last
    lines = piece.module.lines
    above = list(itertools.takewhile(lambda line: line.strip().startswith(b"#"), reversed(lines[: first - 1])))
    return first - (len(above) if first - len(above) > 1 else 0), last


def _sites(piece: Piece, name: str) -> Iterator[tuple[int, int]]:
    """Where a statement at module level binds a name."""
    stack: list[ast.AST] = [piece.node]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                start, _ = piece.module.place(node)
                at = piece.module.data.index(name.encode("utf-8"), start + len("def "))
                yield at, at + len(name.encode("utf-8"))
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            yield piece.module.place(node)
        stack.extend(ast.iter_child_nodes(node))
