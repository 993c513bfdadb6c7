"""What a piece of code refers to outside of itself: names that no scope in it binds, with the attributes after them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.pairs.syntax import Function


@dataclass(frozen=True)
class Imported:
    """What an import binds a name to."""

    module: str
    """Dotted name after the dots; of `import a.b`, the first part."""
    level: int = 0
    """Dots of a relative import."""
    name: str = ""
    """The name that is taken out of the module; empty for the module itself."""
    whole: str = ""
    """Of `import a.b` without `as`: all of it."""

    @classmethod
    def of_import(cls, alias: ast.alias) -> tuple[str, Imported]:
        """The name that `import a.b` or `import a.b as c` binds, and to what."""
        if alias.asname:
            return alias.asname, cls(alias.name)
        top = alias.name.partition(".")[0]
        return top, cls(top, whole=alias.name)


@dataclass(frozen=True, eq=False)
class Reference:
    """A use of a name that is bound elsewhere."""

    path: tuple[str, ...]
    """The name and the attributes after it: `kernels.forward` is `("kernels", "forward")`."""
    node: ast.expr
    """The name with its attributes."""
    imported: Imported | None = None
    """Where the name is bound by an import inside of a function."""
    through_self: bool = False
    """Written as an attribute of `self` or `cls`, or as a bare name in the class; the path starts with the class."""


@dataclass
class _Scope:
    names: dict[str, Imported | None]
    is_class: bool = False
    owner: str = ""
    """Of a class: its name."""


def references(node: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[Reference]:
    """References of a statement or expression at module level, or of a member of the class `owner`, in source order."""
    return _Finder().find(node, _class_scopes(owner))


def evaluated_references(node: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[Reference]:
    """Those references that are evaluated when a statement runs: no bodies of functions."""
    return _Finder(bodies=False).find(node, _class_scopes(owner))


def _class_scopes(owner: ast.ClassDef | None) -> list[_Scope]:
    return [] if owner is None else [_Scope(dict.fromkeys(class_names(owner)), is_class=True, owner=owner.name)]


def local_names(node: ast.AST) -> frozenset[str]:
    """All names that functions below a node bind."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found |= _bound_in(inner).keys()
    return frozenset(found)


class _Finder:
    def __init__(self, *, bodies: bool = True) -> None:
        self._bodies = bodies

    def find(self, node: ast.AST, scopes: list[_Scope]) -> Iterator[Reference]:
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield from self._chain(node, scopes)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from self._all(node.decorator_list, scopes)
            yield from self._signature(node.args, scopes)
            if node.returns is not None:
                yield from self.find(node.returns, scopes)
            if self._bodies:
                yield from self._all(node.body, [*scopes, _function_scope(node, scopes)])
        elif isinstance(node, ast.Lambda):
            yield from self._signature(node.args, scopes)
            if self._bodies:
                yield from self.find(node.body, [*scopes, _Scope(_bound_in(node))])
        elif isinstance(node, ast.ClassDef):
            yield from self._all([*node.decorator_list, *node.bases, *(k.value for k in node.keywords)], scopes)
            inner = _Scope(dict.fromkeys(class_names(node)), is_class=True, owner=node.name)
            yield from self._all(node.body, [*scopes, inner])
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = _Scope({n.id: None for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)})
            yield from self._all(list(ast.iter_child_nodes(node)), [*scopes, inner])
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self._all(list(ast.iter_child_nodes(node)), scopes)

    def _all(self, nodes: list[ast.AST] | list[ast.expr] | list[ast.stmt], scopes: list[_Scope]) -> Iterator[Reference]:
        for node in nodes:
            yield from self.find(node, scopes)

    def _signature(self, arguments: ast.arguments, scopes: list[_Scope]) -> Iterator[Reference]:
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        for one in named:
            if one.annotation is not None:
                yield from self.find(one.annotation, scopes)
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                yield from self.find(default, scopes)

    def _chain(self, node: ast.Name | ast.Attribute, scopes: list[_Scope]) -> Iterator[Reference]:
        path: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            path.append(root.attr)
            root = root.value
        if not isinstance(root, ast.Name):
            yield from self.find(root, scopes)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return
        whole = (root.id, *reversed(path))
        at = _binder(root.id, scopes)
        if at is None:
            yield Reference(whole, node)
            return
        scope = scopes[at]
        imported = scope.names[root.id]
        if imported is not None:
            yield Reference(whole, node, imported)
        elif scope.is_class:
            yield Reference((scope.owner, *whole), node, through_self=True)
        elif scope.owner and root.id in ("self", "cls") and len(whole) > 1:
            yield Reference((scope.owner, *whole[1:]), node, through_self=True)


def _binder(name: str, scopes: list[_Scope]) -> int | None:
    """The innermost scope that binds a name; a class's names are seen in its own body alone."""
    for place in range(len(scopes) - 1, -1, -1):
        if name in scopes[place].names and not (scopes[place].is_class and place != len(scopes) - 1):
            return place
    return None


def _function_scope(node: Function, scopes: list[_Scope]) -> _Scope:
    """A function's names; that of `self` and `cls` in a method stands for the class."""
    names = _bound_in(node)
    arguments = [*node.args.posonlyargs, *node.args.args]
    if scopes and scopes[-1].is_class and arguments and arguments[0].arg in ("self", "cls"):
        return _Scope(names, owner=scopes[-1].owner)
    return _Scope(names)


def _bound_in(node: Function | ast.Lambda) -> dict[str, Imported | None]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    names: dict[str, Imported | None] = {one.arg: None for one in named}
    declared: set[str] = set()
    stack: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while stack:
        inner = stack.pop()
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.setdefault(inner.name, None)
            continue
        if isinstance(inner, (ast.Lambda, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            continue
        if isinstance(inner, ast.Global):
            declared |= set(inner.names)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names[inner.id] = None
        elif isinstance(inner, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and inner.name:
            names[inner.name] = None
        elif isinstance(inner, ast.Import):
            names.update(Imported.of_import(alias) for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            for alias in inner.names:
                names[alias.asname or alias.name] = Imported(inner.module or "", inner.level, alias.name)
        stack.extend(ast.iter_child_nodes(inner))
    return {name: imported for name, imported in names.items() if name not in declared}


def class_names(node: ast.ClassDef) -> set[str]:
    """Names that the body of a class binds."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        else:
            names |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names
