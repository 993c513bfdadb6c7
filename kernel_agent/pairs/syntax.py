"""The syntax tree of a user's file, and what its names stand for: all that may be known without executing the file."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import InputError

Function = ast.FunctionDef | ast.AsyncFunctionDef

_TRIES = 5


def parse(source: str, path: Path | None = None) -> ast.Module:
    """Parse a file. Raises `InputError` with path and line where it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return _tree(source)
    except SyntaxError as error:
        raise InputError(
            f"this is not valid Python: {error.msg}", remedy="Correct the syntax.", path=path, line=error.lineno
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"this is not valid Python: {error}", remedy="Correct the syntax.", path=path) from None


def _tree(source: str) -> ast.Module:
    """Parse. CPython 3.11 counts how deep it is in the trees of all threads together, so that two which parse at once
    may find the count wrong at the end of a sound tree."""
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def line_nested_deeper(tree: ast.Module, levels: int) -> int | None:
    """The line of a node that stands more than so many levels deep; None where there is none.

    Python parses deeper trees than functions that call themselves for every level can walk.
    """
    stack: list[_Standing] = [_Standing(tree, 0, 1)]
    while stack:
        here = stack.pop()
        if here.level > levels:
            return here.line
        for node in ast.iter_child_nodes(here.node):
            stack.append(_Standing(node, here.level + 1, getattr(node, "lineno", here.line)))
    return None


@dataclass(frozen=True)
class _Standing:
    """A node of a tree and where it stands."""

    node: ast.AST
    level: int
    line: int


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` for an attribute chain on a name, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


class ImportedNames:
    """What the names bound by a file's module-level imports stand for, so that aliases are seen through."""

    def __init__(self, tree: ast.Module, *, everywhere: bool = False) -> None:
        """`everywhere`: imports within functions as well."""
        self._full: dict[str, str] = {}
        self.stars: list[str] = []
        for node in ast.walk(tree) if everywhere else module_level(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    top = name.name.partition(".")[0]
                    self._full[name.asname or top] = name.name if name.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    if name.name == "*":
                        self.stars.append(node.module)
                    else:
                        self._full[name.asname or name.name] = f"{node.module}.{name.name}"

    def resolve(self, node: ast.expr) -> str | None:
        """The full dotted path of an expression such as `ka.autodiff`, or None if it does not start at an import."""
        path = dotted(node)
        if path is None:
            return None
        first, dot, rest = path.partition(".")
        return self._full[first] + dot + rest if first in self._full else None

    def bound(self) -> frozenset[str]:
        """Names that imports bind."""
        return frozenset(self._full)


def is_main_guard(node: ast.AST) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    sides = [node.test.left, *node.test.comparators]
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that importing the file evaluates: no bodies of functions or lambdas, no `__main__` block."""
    stack: list[ast.AST] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        if is_main_guard(node):
            assert isinstance(node, ast.If)
            stack.extend(reversed(node.orelse))
            continue
        yield node
        if isinstance(node, Function):
            evaluated = [
                *node.decorator_list,
                *node.args.defaults,
                *(d for d in node.args.kw_defaults if d is not None),
            ]
            stack.extend(reversed(evaluated))
        elif not isinstance(node, ast.Lambda):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def defined_functions(tree: ast.Module) -> dict[str, Function]:
    """Functions defined at module level, also inside `if` and `try`, by name; the last definition wins."""
    return {node.name: node for node in _statements(tree.body) if isinstance(node, Function)}


def assigned_values(tree: ast.Module, name: str) -> list[ast.expr]:
    """The expressions assigned to a module-level name, in file order."""
    values: list[ast.expr] = []
    for node in _statements(tree.body):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            values.append(value)
    return values


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Module-level statements, with the blocks of `if`, `try` and `with` opened and `__main__` left out."""
    for node in body:
        if is_main_guard(node):
            continue
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def called_names(function: Function) -> set[str]:
    """Names that a function calls."""
    return {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def accepts(function: Function, keyword: str) -> bool:
    """Whether a parameter has this name and may be given by it; `**kwargs` promises nothing about a name."""
    return any(argument.arg == keyword for argument in (*function.args.args, *function.args.kwonlyargs))


def parameter_names(function: Function) -> tuple[str, ...]:
    """Names of a function's parameters in order: positional, `*args`, keyword-only; `**kwargs` is left out."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        names.append(arguments.vararg.arg)
    return (*names, *(a.arg for a in arguments.kwonlyargs))
