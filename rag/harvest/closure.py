"""`Gatherer`: a root with all it needs of a checkout: statements of several files, what they need before them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rag.harvest.kernels import Kernels, class_members, last_name
from rag.harvest.module import Module
from rag.harvest.resolve import Definition, Missing, Resolved, Resolver
from rag.harvest.scope import Imported, Reference, evaluated_references

OPERATORS = frozenset({"triton_op", "custom_op"})
"""Functions of torch.library that make an operator of a function."""

MOST_PIECES = 250
"""Statements of a pair; one that needs more is a framework, not a pair."""


@dataclass(frozen=True)
class Piece:
    """A statement of a file, a member of a class, or the line of a class without its body."""

    module: Module
    node: ast.stmt
    owner: ast.ClassDef | None = None
    """The class whose member it is."""
    header: bool = False
    """Of a class: its line alone."""

    def references(self) -> Iterator[Reference]:
        """What it refers to. What registers an operator or wraps a kernel for torch is left out."""
        if self.header:
            assert isinstance(self.node, ast.ClassDef)
            for part in (*self.node.decorator_list, *self.node.bases, *(k.value for k in self.node.keywords)):
                yield from self.module.references(part)
            return
        dropped = {id(inner) for decorator in registrations(self.node) for inner in ast.walk(decorator)}
        dropped |= {id(call.func) for call in wrappings(self.node)}
        for reference in self.module.references(self.node, self.owner):
            if id(reference.node) not in dropped:
                yield reference


@dataclass
class Gathered:
    """What a root needs, itself included."""

    pieces: list[Piece] = field(default_factory=list)
    """What others refer to comes before them, as far as there is no circle."""
    missing: list[str] = field(default_factory=list)
    """What cannot be found, in words."""
    too_large: bool = False


def registrations(node: ast.stmt) -> list[ast.expr]:
    """Decorators that register a function with torch.library."""
    if not isinstance(node, ast.FunctionDef):
        return []
    called = [(d, d.func) for d in node.decorator_list if isinstance(d, ast.Call)]
    return [decorator for decorator, function in called if last_name(function) in OPERATORS]


def wrappings(node: ast.stmt) -> list[ast.Call]:
    """Calls that wrap a kernel for the tracing of torch; run eagerly they change nothing."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and len(call.args) == 1]
    return [call for call in calls if last_name(call.func) in ("wrap_triton", "capture_triton")]


class Family:
    """A class and its bases in the checkout, nearest first: an `autograd.Function` that is taken member by member."""

    def __init__(self, resolver: Resolver, root: Definition) -> None:
        self.root = root
        self.classes: dict[Definition, tuple[Module, ast.ClassDef]] = {}
        waiting = [root]
        while waiting:
            definition = waiting.pop(0)
            node = resolver.node(definition)
            if definition in self.classes or not isinstance(node, ast.ClassDef):
                continue
            self.classes[definition] = (resolver.checkout.module(definition.module), node)
            bases = [base.target for base in resolver.bases(definition)]
            waiting += [base for base in bases if isinstance(base, Definition)]

    def member(self, name: str) -> Piece | None:
        """The statement that binds a member, of the nearest class that has it."""
        for module, node in self.classes.values():
            found = [statement for own, statement in class_members(node) if own == name]
            if found:
                return Piece(module, found[-1], node)
        return None

    def headers(self) -> Iterator[Piece]:
        """The lines of all classes, bases first."""
        for module, node in reversed(self.classes.values()):
            yield Piece(module, node, header=True)

    def function(self, resolver: Resolver, name: str) -> tuple[Module, ast.FunctionDef] | None:
        """The function that is a member, `member = staticmethod(function)` seen through; None for anything else."""
        piece = self.member(name)
        if piece is None:
            return None
        if isinstance(piece.node, ast.FunctionDef):
            return piece.module, piece.node
        value = piece.node.value if isinstance(piece.node, ast.Assign) else None
        for reference in piece.module.references(value) if value is not None else ():
            target = resolver.resolve(piece.module, reference).target
            node = resolver.node(target) if isinstance(target, Definition) else None
            if isinstance(target, Definition) and isinstance(node, ast.FunctionDef):
                return resolver.checkout.module(target.module), node
        return None


class Gatherer:
    """Gathers for one candidate."""

    def __init__(self, resolver: Resolver, kernels: Kernels, family: Family | None = None) -> None:
        self._resolver, self._kernels, self._family = resolver, kernels, family

    def gather(self, roots: Iterable[Piece]) -> Gathered:
        """The closure of some pieces. Raises `InputError` where a file on the way is not Python."""
        found, seen = Gathered(), set[tuple[str, int, bool]]()
        for root in roots:
            self._visit(root, found, seen)
        found.pieces = self._ordered(found.pieces)
        return found

    def needs(self, piece: Piece, reference: Reference) -> tuple[Resolved, list[Piece]]:
        """What a reference stands for, and the pieces that bring it."""
        resolved = self._resolver.resolve(piece.module, reference)
        target = resolved.target
        if not isinstance(target, Definition):
            return resolved, []
        if self._family is not None and target in self._family.classes:
            member = self._family.member(resolved.member)
            return resolved, [*self._family.headers(), *([member] if member is not None else [])]
        module = self._resolver.checkout.module(target.module)
        return resolved, [Piece(module, unit) for unit in module.units(target.name)]

    def is_ours(self, imported: Imported, module: Module) -> bool:
        """Whether an import takes its name from a file of the checkout."""
        return self._resolver.is_ours(imported, module)

    def _visit(self, piece: Piece, found: Gathered, seen: set[tuple[str, int, bool]]) -> None:
        key = _key(piece)
        if key in seen or found.too_large:
            return
        seen.add(key)
        found.too_large = len(seen) > MOST_PIECES
        for reference in piece.references():
            resolved, needed = self.needs(piece, reference)
            if isinstance(resolved.target, Missing) and not reference.through_self:
                found.missing.append(resolved.target.what)
            for one in needed:
                self._visit(one, found, seen)
        found.pieces.append(piece)

    def _ordered(self, pieces: list[Piece]) -> list[Piece]:
        """With circles through bodies of functions broken: what runs at import has what it uses before it."""
        known = {_key(piece): piece for piece in pieces}
        done: dict[tuple[str, int, bool], Piece] = {}

        def place(piece: Piece, above: frozenset[tuple[str, int, bool]]) -> None:
            key = _key(piece)
            if key in done or key in above or key not in known:
                return
            for reference in _evaluated(piece, pieces):
                for needed in self.needs(piece, reference)[1]:
                    if not _later(needed, piece):  # `kernel = triton.jit(kernel)` uses what stands above it
                        place(needed, above | {key})
            done[key] = piece

        for piece in sorted(pieces, key=lambda one: one.header):  # what a class uses reads well above it
            place(piece, frozenset())
        return list(done.values())

    def touches(self, pieces: Iterable[Piece]) -> Touches:
        """What the host code among some pieces does with kernels."""
        touches = [
            self._kernels.touch(piece.module, piece.node, piece.owner)
            for piece in pieces
            if not piece.header and not self._kernels.is_launched(piece.module, piece.node, piece.owner)
        ]
        return Touches(
            reached=any(t.launches for t in touches)
            or (any(t.launches_local for t in touches) and any(t.names for t in touches)),
            outside=next((t.outside for t in touches if t.outside), ""),
        )


@dataclass(frozen=True)
class Touches:
    """Whether code gets to a kernel."""

    reached: bool
    outside: str
    """What it launches from outside of the checkout."""


def _later(one: Piece, other: Piece) -> bool:
    return one.module is other.module and one.node.lineno > other.node.lineno


def _evaluated(piece: Piece, pieces: Iterable[Piece]) -> Iterator[Reference]:
    """What a piece uses at import; of a class, with its members."""
    if not piece.header:
        yield from evaluated_references(piece.node, piece.owner)
        return
    yield from piece.references()
    for member in pieces:
        if member.owner is piece.node:
            yield from evaluated_references(member.node, member.owner)


def _key(piece: Piece) -> tuple[str, int, bool]:
    return piece.module.path, id(piece.node), piece.header
