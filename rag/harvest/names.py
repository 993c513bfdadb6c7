"""`Names`: what each name of a gathered closure is called in the one file that it becomes part of."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import PurePosixPath

from rag.harvest.closure import Gatherer, Piece
from rag.harvest.module import Module
from rag.harvest.resolve import Definition, External, Resolver
from rag.harvest.scope import local_names

RESERVED = ("META", "SWEEP", "BENCH", "forward", "backward", "make_args", "reference", "surrogate", "flops", "setup")
"""Names of the pair format: what a checkout calls so is renamed."""

Key = Definition | str
"""A definition, or what an import takes from outside."""


class Names:
    """Keeps the names of a checkout; of two things with one name, the later gets that of its file after it."""

    def __init__(self, resolver: Resolver, reserved: Iterable[str] = ()) -> None:
        self._resolver = resolver
        self._taken: dict[str, Key | None] = dict.fromkeys((*RESERVED, *reserved))
        self._final: dict[Key, str] = {}
        self._locals: set[str] = set()
        self.imports: dict[str, None] = {}
        """Import statements of what comes from outside, in the order of first use."""

    def learn(self, pieces: Iterable[Piece], gatherer: Gatherer) -> None:
        """Name all that some pieces bind, and all that they take from outside."""
        pieces = list(pieces)
        for piece in pieces:
            self._locals |= local_names(piece.node)
        for piece in pieces:
            if piece.owner is None:
                for name in bound_names(piece):
                    self._name(Definition(piece.module.path, name), name)
        for piece in pieces:
            for reference in piece.references():
                resolved, _ = gatherer.needs(piece, reference)
                if isinstance(resolved.target, External) and reference.imported is None:
                    self._import(resolved.target)

    def of(self, target: Definition | External) -> str:
        """The name to write. Definitions that were not learned keep their own."""
        key = target if isinstance(target, Definition) else target.dotted
        return self._final.get(key, target.name)

    def _name(self, key: Key, wanted: str, home: str = "") -> str:
        if key in self._final:
            return self._final[key]
        home = home or (key.module if isinstance(key, Definition) else "")
        name, count = wanted, 1
        while name in self._taken:
            name = f"{wanted}_{_stem(home)}" + (f"_{count}" if count > 1 else "")
            count += 1
        self._taken[name] = key
        self._final[key] = name
        return name

    def _import(self, target: External) -> None:
        module = self._resolver.checkout.module(target.module)
        if target.dotted in self._final:
            self._plain_imports(module, target.name, self._final[target.dotted])
            return
        name = self._name(target.dotted, target.name, target.module)
        self._plain_imports(module, target.name, name)

    def _plain_imports(self, module: Module, bound: str, name: str) -> None:
        """The statements that bind a name in a file, for the name it has here."""
        bindings = [b for b in module.bindings.get(bound, ()) if b.imported is not None]
        first = [b for b in bindings if not b.fallback] or bindings
        found = [b.imported for b in bindings if b in first[:1] or (b.imported is not None and b.imported.whole)]
        for imported in found:
            if imported is None:
                continue
            if imported.level:
                continue
            if imported.whole:
                self.imports[f"import {imported.whole}"] = None
            elif imported.name:
                renamed = "" if imported.name == name else f" as {name}"
                self.imports[f"from {imported.module} import {imported.name}{renamed}"] = None
            else:
                self.imports[f"import {imported.module} as {name}"] = None
        if not found:
            star = next((star for star in module.stars if not star.level), None)
            if star is not None:
                self.imports[f"from {star.module} import {bound}"] = None

    def hidden(self, name: str) -> bool:
        """Whether a function here binds this name for itself: it cannot be written for something else there."""
        return name in self._locals

    def rename(self, target: Definition) -> str:
        """Another name for a definition whose own is hidden where it is used."""
        old = self._final.pop(target, target.name)
        if self._taken.get(old) == target:
            del self._taken[old]
        self._taken.setdefault(target.name, None)
        return self._name(target, target.name)


def bound_names(piece: Piece) -> tuple[str, ...]:
    """Module-level names that a statement binds."""
    if isinstance(piece.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (piece.node.name,)
    inside = {id(node) for node in ast.walk(piece.node)}
    return tuple(
        name
        for name, bindings in piece.module.bindings.items()
        if any(b.imported is None and b.node is not None and id(b.node) in inside for b in bindings)
    )


def _stem(path: str) -> str:
    pure = PurePosixPath(path)
    stem = pure.parent.name if pure.stem == "__init__" else pure.stem
    return "".join(c if c.isalnum() else "_" for c in stem) or "module"
