"""What the names of a file stand for where that can be read: modules, what is imported of them, Python's own functions.

`asks_where` needs it: a name such as `look` may be `getattr`, and `input` is most often a tensor. Names are those of
their own function; what a name is bound to by `=` is followed, whatever the order of the statements.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

LOGGER = ("logging", "getLogger", "")
"""Where a logger comes from, whatever its name."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (*_DEFINITIONS, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Chain = tuple[str, ...]


@dataclass
class _Scope:
    """A function, a comprehension, a class or the file: what is bound there is bound for all of it."""

    above: _Scope | None
    is_certain: bool = True
    """A function's own name is never one further out; in a class and in the file it is, until it is bound."""
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    """Names that are the file's here, by `global`."""
    nonlocals: set[str] = field(default_factory=set)
    origins: dict[str, set[Chain]] = field(default_factory=dict)
    is_class: bool = False


class Origins:
    """The names of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self._top = _Scope(None, is_certain=False)
        self._scopes: dict[ast.AST, _Scope] = {}
        self._bindings: list[tuple[_Scope, str, ast.expr]] = []
        self._enter(tree, self._top, self._top)
        while sum(self._follow(*binding) for binding in self._bindings):
            pass

    def of(self, node: ast.AST) -> tuple[Chain, ...]:
        """What `a.b.c` may stand for: chains that begin with a module, or one with a name of Python's own."""
        if isinstance(node, ast.Attribute):
            return tuple((*chain, node.attr) for chain in self.of(node.value))
        if isinstance(node, ast.Call):
            return (LOGGER,) if LOGGER[:2] in self.of(node.func) else ()
        if not isinstance(node, ast.Name):
            return ()
        found: set[Chain] = set()
        for scope in self._that_bind(node):
            found |= scope.origins.get(node.id, set())
            if scope.is_certain:
                return tuple(sorted(found))
        known = hasattr(builtins, node.id) or is_special(node.id)
        return tuple(sorted(found | {(node.id,)} if known else found))

    def is_of_the_file(self, node: ast.Name) -> bool:
        """Whether a name is one of the file's top level, and no module's or module's part."""
        certain = any(scope.is_certain for scope in self._that_bind(node))
        return not certain and not self._top.origins.get(node.id)

    def is_followed(self, node: ast.expr) -> bool:
        """Whether an expression is the value of a name that is looked up here where it is used."""
        return any(value is node and not scope.is_class for scope, _, value in self._bindings)

    def _that_bind(self, node: ast.Name) -> Iterator[_Scope]:
        """Scopes in which a name may be found, from the innermost on."""
        scope: _Scope | None = self._scopes[node]
        while scope is not None:
            if node.id in scope.globals:
                scope = self._top
            if node.id in scope.bound:
                yield scope
            scope = scope.above

    def _follow(self, scope: _Scope, name: str, value: ast.expr) -> bool:
        known = scope.origins.setdefault(name, set())
        new = {chain for chain in self.of(value) if len(chain) < 16} - known
        known |= new
        return bool(new)

    def _enter(self, node: ast.AST, scope: _Scope, seen_inside: _Scope) -> None:
        """Note a node and all below it; `seen_inside` is the scope that functions in it look into."""
        self._scopes[node] = scope
        for name, value in _bound_by(node):
            for home in self._homes(scope, name):
                if isinstance(value, tuple):
                    home.origins.setdefault(name, set()).add(value)
                elif value is not None:
                    self._bindings.append((home, name, value))
        if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
            self._enter_scope(node, scope, seen_inside)
            return
        for part in ast.iter_child_nodes(node):
            self._enter(part, scope, seen_inside)

    def _enter_scope(self, node: ast.AST, scope: _Scope, seen_inside: _Scope) -> None:
        inner = _Scope(
            seen_inside, is_certain=not isinstance(node, ast.ClassDef), is_class=isinstance(node, ast.ClassDef)
        )
        for part in _without_functions(node):  # before the bindings: these may stand anywhere in a function
            if isinstance(part, ast.Global):
                inner.globals |= {*part.names}
            elif isinstance(part, ast.Nonlocal):
                inner.nonlocals |= {*part.names}
        body = ("body", "args") if isinstance(node, _FUNCTIONS) else ("body",)
        own = {id(part) for name in body for part in _parts(getattr(node, name, ()))}
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.arguments):
                for argument in (*part.posonlyargs, *part.args, *part.kwonlyargs, part.vararg, part.kwarg):
                    if argument is not None:
                        inner.bound.add(argument.arg)
            here = id(part) in own or isinstance(node, _COMPREHENSIONS)
            within = seen_inside if isinstance(node, ast.ClassDef) else inner
            if isinstance(part, ast.arguments):  # their defaults are the surrounding scope's
                self._enter(part, scope, seen_inside)
            elif here:
                self._enter(part, inner, within)
            else:
                self._enter(part, scope, seen_inside)
        self._note_defaults(node, inner)

    def _note_defaults(self, node: ast.AST, inner: _Scope) -> None:
        if not isinstance(node, _FUNCTIONS):
            return
        positional = [*node.args.posonlyargs, *node.args.args]
        given = [*zip(positional[::-1], node.args.defaults[::-1], strict=False)]
        given += [(arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
        self._bindings += [(inner, argument.arg, value) for argument, value in given]

    def _homes(self, scope: _Scope, name: str) -> list[_Scope]:
        """Where a name is bound; by `nonlocal` in any function around that binds it, all of which stand above."""
        if name not in scope.nonlocals:
            home = self._top if name in scope.globals else scope
            home.bound.add(name)
            return [home]
        found = []
        above = scope.above
        while above is not None and above is not self._top:
            found.append(above)
            above = above.above
        return found


def is_special(name: str) -> bool:
    """Whether Python gives a name like this a meaning of its own, as `__name__`; `__2` is anybody's."""
    return name.startswith("__") and name.endswith("__") and len(name) > 4


def _without_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function or a class but what stands in functions in it."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, (*_FUNCTIONS, ast.ClassDef)):
            yield from _without_functions(part)


def _parts(value: object) -> list[ast.AST]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in found if isinstance(part, ast.AST)]


def _bound_by(node: ast.AST) -> Iterator[tuple[str, Chain | ast.expr | None]]:
    """Names that a node itself binds, with what they are bound to where that is plain."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            yield alias.asname or parts[0], tuple(parts if alias.asname else parts[:1])
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, (*str(node.module or "").split("."), alias.name)
    elif isinstance(node, (*_DEFINITIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name, None
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, None
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id, None
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield from _assigned(node.target, node.value)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, given in zip(target.elts, value.elts, strict=True):
            yield from _assigned(one, given)
