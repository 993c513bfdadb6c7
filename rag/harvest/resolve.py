"""`Resolver`: what a reference stands for, followed through imports, aliases and re-exports of a checkout."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.errors import InputError
from rag.harvest.checkout import Checkout
from rag.harvest.module import Module
from rag.harvest.scope import Imported, Reference


@dataclass(frozen=True)
class Definition:
    """A module-level name of a file of the checkout, bound by a definition or an assignment."""

    module: str
    name: str


@dataclass(frozen=True)
class External:
    """A name that an import takes from outside of the checkout."""

    dotted: str
    """What the import binds: `triton.language`."""
    module: str = ""
    """The file whose import binds it."""
    name: str = ""
    """The name that is bound there."""


@dataclass(frozen=True)
class Missing:
    """A name that nothing binds, or that only running the code could tell."""

    what: str


@dataclass(frozen=True)
class Resolved:
    """What a reference stands for."""

    target: Definition | External | Missing | None
    """None for a name of Python itself."""
    rest: tuple[str, ...] = ()
    """Attributes after the name."""

    @property
    def outside(self) -> str:
        """The full name of what comes from outside of the checkout: `triton.language.load`; empty for anything else."""
        return ".".join((self.target.dotted, *self.rest)) if isinstance(self.target, External) else ""

    @property
    def member(self) -> str:
        """The first attribute after the name."""
        return self.rest[0] if self.rest else ""


@dataclass(frozen=True)
class _File:
    path: str


_Found = Definition | External | Missing | _File


class Resolver:
    """Follows names. What a file binds twice is taken from the checkout rather than from outside or from a fallback."""

    def __init__(self, checkout: Checkout) -> None:
        self.checkout = checkout

    def resolve(self, module: Module, reference: Reference) -> Resolved:
        """What a reference in a file stands for. Raises `InputError` where a file on the way is not Python."""
        first, *rest = reference.path
        if reference.imported is not None:
            found: _Found | None = self._follow(reference.imported, module, frozenset())
        else:
            found = self._look_up(module, first, frozenset())
        if found is None:
            if hasattr(builtins, first) or first in ("__name__", "__file__", "__doc__"):
                return Resolved(None)
            return Resolved(Missing(f"`{first}` is bound nowhere in {module.path}"))
        if isinstance(found, Missing) and reference.imported is None:
            found, rest = self._deeper(module, reference.path) or (found, rest)
        while isinstance(found, _File):
            if not rest:
                return Resolved(Missing(f"`{'.'.join(reference.path)}` is a module that is used as a value"))
            inner = self._member(found.path, rest[0], frozenset())
            if inner is None:
                return Resolved(Missing(f"`{rest[0]}` is not in {found.path}"))
            found, rest = inner, rest[1:]
        return Resolved(found, tuple(rest))

    def _deeper(self, module: Module, path: tuple[str, ...]) -> tuple[_Found, list[str]] | None:
        """What `a.b.c.name` means after `import a.b.c`, where `a` is a folder without `__init__.py`."""
        whole = any(b.imported is not None and b.imported.whole for b in module.bindings.get(path[0], ()))
        for length in range(len(path) - 1, 1, -1) if whole else ():
            file = self.checkout.absolute(".".join(path[:length]), module.path)
            if file is not None:
                return _File(file), list(path[length:])
        return None

    def definition(self, module: Module, name: str) -> Definition | None:
        """The definition that a module-level name stands for; None for anything else."""
        found = self._look_up(module, name, frozenset())
        return found if isinstance(found, Definition) else None

    def node(self, definition: Definition) -> ast.AST | None:
        """The last function, class or expression that it binds."""
        return self.checkout.module(definition.module).value(definition.name)

    def is_ours(self, imported: Imported, module: Module) -> bool:
        """Whether an import takes its name from a file of the checkout."""
        found = self._follow(imported, module, frozenset())
        return isinstance(found, (Definition, _File)) or (isinstance(found, External) and found.module != module.path)

    def bases(self, definition: Definition) -> Iterator[Resolved]:
        """What the bases of a class stand for."""
        node = self.node(definition)
        if isinstance(node, ast.ClassDef):
            module = self.checkout.module(definition.module)
            for base in node.bases:
                for reference in module.references(base):
                    yield self.resolve(module, reference)
                    break

    def _look_up(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> _Found | None:
        if (module.path, name) in seen:
            return None
        seen = seen | {(module.path, name)}
        outside: External | None = None
        missing: Missing | None = None
        own = False
        for binding in module.bindings.get(name, ()):
            if binding.imported is None:
                own = True
                continue
            found = self._follow(binding.imported, module, seen)
            if isinstance(found, (Definition, _File)):
                return found
            if isinstance(found, External):
                outside = found if found.module else External(found.dotted, module.path, name)
            missing = found if isinstance(found, Missing) else missing
        if outside is not None:
            return outside
        if own:
            return Definition(module.path, name)
        return missing or self._star(module, name, seen)

    def _star(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> _Found | None:
        outside: External | None = None
        for star in module.stars:
            path = self._file(star, module)
            if path is None:
                outside = External(f"{star.module}.{name}", module.path, name)
                continue
            found = self._look_up(self.checkout.module(path), name, seen)
            if found is not None and not isinstance(found, Missing):
                return found
        return None if hasattr(builtins, name) else outside

    def _follow(self, imported: Imported, module: Module, seen: frozenset[tuple[str, str]]) -> _Found | None:
        path = self._file(imported, module)
        if not imported.name:
            if path is not None:
                return _File(path)
            if imported.whole and self.checkout.owns(imported.whole):
                return Missing(f"`import {imported.whole}`: the package has no __init__.py to start from")
            return External(imported.module)
        if path is not None:
            return self._member(path, imported.name, seen) or Missing(f"`{imported.name}` is not in {path}")
        inner = Imported(".".join(part for part in (imported.module, imported.name) if part), imported.level)
        path = self._file(inner, module)
        if path is not None:
            return _File(path)
        dots = "." * imported.level
        if imported.level or self.checkout.owns(imported.module):
            return Missing(f"`from {dots}{imported.module} import {imported.name}` names no file of the checkout")
        return External(f"{imported.module}.{imported.name}")

    def _member(self, path: str, name: str, seen: frozenset[tuple[str, str]]) -> _Found | None:
        """A name of a file, or a submodule of a package."""
        try:
            found = self._look_up(self.checkout.module(path), name, seen)
        except InputError as error:
            return Missing(f"{path} cannot be read: {error.message}")
        if found is None or isinstance(found, Missing):
            inner = self.checkout.inside(path, name)
            return _File(inner) if inner is not None else found
        return found

    def _file(self, imported: Imported, module: Module) -> str | None:
        if imported.level:
            return self.checkout.relative(imported.level, imported.module, module.path)
        return self.checkout.absolute(imported.module, module.path)
