"""`slice_of`: a stub with all that it needs, as one text that stands by itself.

A live function knows what its names mean: kernels and helpers are taken with their source, wherever they are defined,
libraries are imported, plain values written out. A training script, a notebook or a package is thereby as good as a
file with one forward.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.literals import literal
from kernel_agent.jit.names import free_names

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "triton", "numpy", "einops", "packaging", "kernel_agent"})
"""Packages whose functions are imported; functions of all others are taken with their source."""
_MARKS = ("kernel_agent.autodiff", "kernel_agent.jit.operator")
"""Modules whose decorators are left out: the slice gets a mark of its own."""
_PURE = tuple(Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib"))


@dataclass(frozen=True)
class Piece:
    """Source that was taken from a file of the user."""

    text: str
    file: str
    line: int
    """Where it begins in the file."""


@dataclass(frozen=True)
class Slice:
    """A stub that stands by itself."""

    stub: str
    imports: tuple[str, ...]
    pieces: tuple[Piece, ...]
    """Values, kernels and helpers, each after what it needs; the stub last, without `@autodiff`."""
    watched: tuple[tuple[Mapping[str, Any], str, Any], ...]
    """Plain values that were written out: where they are bound, their name, and what they were."""

    def text(self, decorator: str) -> str:
        """The file, with a decorator on the stub."""
        *first, stub = [piece.text.strip("\n") for piece in self.pieces]
        return "\n".join(self.imports) + "\n\n\n" + "\n\n\n".join([*first, f"{decorator}\n{stub}"]) + "\n"

    def place(self, line: int, decorator: str) -> tuple[str, int] | None:
        """File and line of the user's for a line of the text; None for one that is ours."""
        at = len(self.imports) + 3
        for piece in self.pieces:
            if piece is self.pieces[-1]:
                at += decorator.count("\n") + 1
            length = piece.text.strip("\n").count("\n") + 1
            if at <= line < at + length and piece.line:
                return piece.file, piece.line + line - at
            at += length + 2
        return None

    @property
    def branches(self) -> bool:
        """Whether the stub asks anything."""
        tests = (ast.If, ast.IfExp, ast.While, ast.Match)
        return any(isinstance(node, tests) for node in ast.walk(ast.parse(self.pieces[-1].text)))

    def stale(self) -> bool:
        """Whether a value that was written out is another one by now."""
        return any(scope.get(name) is not value and scope.get(name) != value for scope, name, value in self.watched)


def slice_of(function: Callable[..., Any]) -> Slice:
    """Take a stub out of its surroundings. Raises `CannotTrain` where something it needs cannot be written down."""
    return _Slicer().take(function)


def installed(module: str) -> bool:
    """Whether a module is one of the libraries that a slice imports."""
    return module.partition(".")[0] in _LIBRARIES


class _Slicer:
    """Collects what one stub needs."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.pieces: list[Piece] = []
        self.bound: dict[str, Any] = {}
        self.watched: list[tuple[Mapping[str, Any], str, Any]] = []
        self.future = False

    def take(self, function: Callable[..., Any]) -> Slice:
        """The slice of a stub."""
        plain = inspect.unwrap(function)
        if not isinstance(plain, types.FunctionType) or plain.__name__ == "<lambda>":
            kind = "lambda" if getattr(plain, "__name__", "") == "<lambda>" else type(plain).__name__
            raise CannotTrain(
                f"a stub is a plain function, and this is a {kind}",
                remedy="Give the function, defined with `def`, that launches the kernels.",
            )
        self.bound[plain.__name__] = plain
        self._function(plain, plain.__name__)
        future = ["from __future__ import annotations"] if self.future else []
        imports = [*future, "import torch", "import triton", "import triton.language as tl"]
        imports.append("from kernel_agent import autodiff")
        imports += [line for line in self.imports if line not in imports]
        return Slice(plain.__name__, tuple(imports), tuple(self.pieces), tuple(self.watched))

    # --- pieces

    def _function(self, function: types.FunctionType, name: str) -> None:
        """The source of a function or kernel, after what it needs."""
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            raise CannotTrain(
                f"the source of `{name}` cannot be read",
                remedy="Define it in a file or a notebook cell: Triton needs its source, too.",
            ) from error
        text = textwrap.dedent("".join(lines))
        scope = _scope(function)
        if function.__code__.co_flags & annotations.compiler_flag:
            self.future = True
        text, dropped = _unmarked(text, scope)
        self._needs(text, scope, function.__code__.co_filename, own=function.__name__)
        if "." in function.__qualname__ and function.__qualname__.rpartition(".")[0].rpartition(".")[2] != "<locals>":
            raise CannotTrain(
                f"`{function.__qualname__}` is a member of a class",
                remedy="Move it to module level.",
                path=Path(function.__code__.co_filename),
                line=first,
            )
        self.pieces.append(Piece(text, function.__code__.co_filename, first + dropped))
        if name != function.__name__:
            self.pieces.append(Piece(f"{name} = {function.__name__}", "", 0))

    def _class(self, value: type, name: str, file: str) -> None:
        """The source of a class of the user's, such as a named tuple of results, after what it needs."""
        try:
            lines, first = inspect.getsourcelines(value)
            text = textwrap.dedent("".join(lines))
            ast.parse(text)
        except (OSError, TypeError, SyntaxError) as error:
            raise CannotTrain(
                f"the source of the class `{name}` cannot be read",
                remedy="Define it in a file by a `class` statement, or pass the stub what it takes of it.",
                path=Path(file),
            ) from error
        home = sys.modules[value.__module__]
        self._needs(text, vars(home), inspect.getfile(value), own=value.__name__)
        self.pieces.append(Piece(text, inspect.getfile(value), first))
        if name != value.__name__:
            self.pieces.append(Piece(f"{name} = {value.__name__}", "", 0))

    def _needs(self, text: str, scope: Mapping[str, Any], file: str, own: str = "") -> None:
        """Everything that a piece of source refers to."""
        for name in free_names(text):
            if name != own and (name in scope or not hasattr(builtins, name)) and name in scope:
                self._bind(name, scope[name], scope, file)

    def _bind(self, name: str, value: Any, scope: Mapping[str, Any], file: str) -> None:
        if name in self.bound:
            if self.bound[name] is not value and self.bound[name] != value:
                raise CannotTrain(
                    f"`{name}` means different things in the files that the stub's code comes from",
                    remedy="Rename one of them.",
                    path=Path(file),
                )
            return
        self.bound[name] = value
        kernel = _kernel(value)
        if isinstance(value, types.ModuleType):
            self._module(name, value, file)
        elif kernel is not None and not installed(kernel.__module__):
            if _wrappers(value) > _decorators(kernel, ("autotune", "heuristics")):
                self._bind(kernel.__name__, _innermost(value), scope, file)
                self._statement(name, value, scope, file)
            else:
                self._function(kernel, name)
        elif isinstance(value, types.FunctionType) and not installed(value.__module__) and value.__name__ != "<lambda>":
            self._function(value, name)
        elif isinstance(value, type) and not installed(value.__module__) and _is_users(value):
            self._class(value, name, file)
        elif (text := literal(value)) is not None:
            self.watched.append((scope, name, value))
            self._statement(name, value, scope, file, text)
        elif _importable(value):
            self.imports[_import(value, name)] = None
        else:
            self._statement(name, value, scope, file)

    def _module(self, name: str, module: types.ModuleType, file: str) -> None:
        full = module.__name__
        if not installed(full) and not _in_site_packages(module):
            raise CannotTrain(
                f"the stub takes names from the module `{full}` of yours",
                remedy=f"Import what it uses by name: `from {full} import ...`.",
                path=Path(file),
            )
        self.imports[f"import {full}" if name == full else f"import {full} as {name}"] = None

    def _statement(self, name: str, value: Any, scope: Mapping[str, Any], file: str, written: str = "") -> None:
        """The statement at module level that binds a name, where there is one; else its value, written out."""
        found = _binding(name, scope, file)
        if found is not None and (not written or _same(found.text, name, value)):
            self._needs(found.text, scope, file, own=name)
            self.pieces.append(found)
        elif written:
            self.pieces.append(Piece(f"{name} = {written}", "", 0))
        else:
            raise CannotTrain(
                f"the stub needs `{name}`, a {type(value).__name__} that cannot be written down",
                remedy="Bind it once at the top of its file, or pass it to the stub.",
                path=Path(file),
            )


def _scope(function: types.FunctionType) -> Mapping[str, Any]:
    """What the names in a function mean: its closure before its globals."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {}
    for name, cell in cells:
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # bound later, or never
            continue
    return {**function.__globals__, **closed} if closed else function.__globals__


def _innermost(value: Any) -> Any:
    while isinstance(value, (Autotuner, Heuristics)):
        value = value.fn
    return value


def _kernel(value: Any) -> Any:
    """The Python function of a kernel, seen through tuners; None for what is none."""
    value = _innermost(value)
    return value.fn if isinstance(value, (JITFunction, InterpretedFunction)) else None


def _is_users(value: type) -> bool:
    """Whether a class is defined in a file that is not installed."""
    module = sys.modules.get(value.__module__)
    return module is not None and getattr(module, "__file__", None) is not None and not _in_site_packages(module)


def _wrappers(value: Any) -> int:
    count = 0
    while isinstance(value, (Autotuner, Heuristics)):
        value, count = value.fn, count + 1
    return count


def _decorators(function: types.FunctionType, names: tuple[str, ...]) -> int:
    lines, _ = inspect.getsourcelines(function)
    node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return sum(
        any(name in ast.unparse(decorator).partition("(")[0] for name in names) for decorator in node.decorator_list
    )


def _unmarked(text: str, scope: Mapping[str, Any]) -> tuple[str, int]:
    """A function's source without our decorators, and how many lines were dropped from its top."""
    node = ast.parse(text).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    lines = text.split("\n")
    gone: set[int] = set()
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        try:
            value = eval(compile(ast.Expression(target), "<decorator>", "eval"), dict(scope))
        except Exception:  # a decorator that cannot be looked at is not one of ours
            continue
        if getattr(value, "__module__", "") in _MARKS:
            gone |= set(range(decorator.lineno, (decorator.end_lineno or decorator.lineno) + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in gone]
    return "\n".join(kept), len(gone)


def _importable(value: Any) -> bool:
    """Whether a value is what an import of a library's module gives."""
    module, name = (
        getattr(value, "__module__", None),
        getattr(value, "__qualname__", None) or getattr(value, "__name__", None),
    )
    if isinstance(value, JITFunction):
        module, name = value.fn.__module__, value.fn.__name__
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or "." in name:
        return False
    found = getattr(sys.modules.get(module), name, None)
    return found is value and (installed(module) or not isinstance(value, types.FunctionType))


def _import(value: Any, name: str) -> str:
    function = value.fn if isinstance(value, JITFunction) else value
    module, own = function.__module__, getattr(function, "__qualname__", function.__name__)
    return f"from {module} import {own}" + ("" if own == name else f" as {name}")


def _in_site_packages(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(folder) for folder in _PURE)


def _binding(name: str, scope: Mapping[str, Any], file: str) -> Piece | None:
    """The one statement of a file that binds a name at module level."""
    tree, lines = _parsed(file, tuple(linecache.getlines(file, dict(scope))))
    if tree is None:
        return None
    found = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if name in names:
            found.append(node)
    if len(found) != 1:
        return None
    (node,) = found
    return Piece("".join(lines[node.lineno - 1 : node.end_lineno]).rstrip("\n"), file, node.lineno)


@functools.lru_cache(maxsize=32)
def _parsed(_file: str, lines: tuple[str, ...]) -> tuple[ast.Module | None, tuple[str, ...]]:
    try:
        return ast.parse("".join(lines)) if lines else None, lines
    except SyntaxError:
        return None, lines


def _same(text: str, name: str, value: Any) -> bool:
    """Whether a statement binds a name to a literal of this value: it may have been bound again since."""
    node = ast.parse(text).body[0]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        given: ast.expr = node.value
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
        given = node.value
    else:
        return False
    plain = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(given, ast.Call) and isinstance(value, tl.constexpr) and len(given.args) == 1:
        given = given.args[0]
    try:
        return bool(ast.literal_eval(given) == plain)
    except (ValueError, TypeError):
        return False
