"""Finds the one stub that `@autodiff` marks, and what the mark says, in a syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.modulework import launching_functions
from kernel_agent.pairs.syntax import Function, ImportedNames, defined_functions, parameter_names

_PATHS = frozenset({"kernel_agent.autodiff", "kernel_agent.autodiff.autodiff"})
_KEYWORDS = ("inputs_require_grad", "nondiff_outputs", "backward", "jit")
_JIT_PATHS = ("triton.jit", "triton.runtime.jit.jit", "triton.runtime.jit")
_IMPORT_REMEDY = (
    "Write `from kernel_agent import autodiff` and put `@autodiff` on the function that launches the kernel."
)


@dataclass(frozen=True)
class MarkedStub:
    """The decorated function and its mark."""

    function: Function
    """The stub's definition."""
    decorator: ast.expr
    """The decorator expression."""
    parameters: tuple[str, ...]
    """Parameter names in order, without `ctx`."""
    inputs_require_grad: tuple[int | str, ...] | None
    """Positions or names as written; None: every floating tensor argument."""
    nondiff_outputs: tuple[int, ...]
    """Positions of outputs without gradient."""


def jit_kernels(tree: ast.Module, imported: ImportedNames) -> tuple[str, ...]:
    """Names of the functions that `@triton.jit` decorates, in file order."""
    return tuple(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_kernel(node, imported)
    )


def find_mark(tree: ast.Module, imported: ImportedNames, path: Path) -> MarkedStub:
    """Find the marked stub of a user's file.

    Raises `InputError` with the line: no mark, two marks, a mark on a kernel, a method or a nested function, a mark
    with arguments that cannot be read, or one that names what the stub does not have.
    """
    marked = [
        (function, decorator)
        for function in ast.walk(tree)
        if isinstance(function, Function)
        for decorator in function.decorator_list
        if is_mark(decorator, imported)
    ]
    if not marked:
        raise _missing(tree, path)
    for function, decorator in marked:
        if _is_kernel(function, imported):
            raise InputError(
                f"@autodiff stands on the kernel `{function.name}`",
                remedy="Put it on the Python function that launches the kernel (the stub).",
                path=path,
                line=decorator.lineno,
            )
    if len(marked) > 1:
        names = ", ".join(f"`{function.name}` (line {function.lineno})" for function, _ in marked)
        raise InputError(
            f"@autodiff marks {len(marked)} stubs: {names}",
            remedy="Mark one stub per file; put the others into files of their own.",
            path=path,
            line=marked[1][1].lineno,
        )
    function, decorator = marked[0]
    if isinstance(function, ast.AsyncFunctionDef) or not any(function is node for node in _top_level(tree)):
        raise InputError(
            f"the marked stub `{function.name}` is no plain module-level function",
            remedy="Move it out of the class or function around it.",
            path=path,
            line=function.lineno,
        )
    return _read_mark(function, decorator, path)


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    return [*tree.body, *(inner for node in tree.body if isinstance(node, (ast.If, ast.Try)) for inner in node.body)]


def _missing(tree: ast.Module, path: Path) -> InputError:
    for function in ast.walk(tree):
        if not isinstance(function, Function):
            continue
        for decorator in function.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if (isinstance(target, ast.Name) and target.id == "autodiff") or ast.unparse(target).endswith(".autodiff"):
                return InputError(
                    f"`@{ast.unparse(target)}` on `{function.name}` is not kernel-agent's autodiff",
                    remedy="Import it: `from kernel_agent import autodiff`.",
                    path=path,
                    line=decorator.lineno,
                )
    functions = defined_functions(tree)
    launching = [functions[name].lineno for name in launching_functions(functions)]
    line = max(launching, default=1)  # a stub stands below what it calls
    return InputError("no function is marked with @autodiff", remedy=_IMPORT_REMEDY, path=path, line=line)


def is_mark(decorator: ast.expr, imported: ImportedNames) -> bool:
    """Whether a decorator is kernel-agent's `autodiff`, under whatever name it was imported."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    if imported.resolve(target) in _PATHS:
        return True
    starred = any(module in ("kernel_agent", "kernel_agent.autodiff") for module in imported.stars)
    return starred and isinstance(target, ast.Name) and target.id == "autodiff"


def _is_kernel(function: Function, imported: ImportedNames) -> bool:
    targets = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(imported.resolve(target) in _JIT_PATHS for target in targets)


def _read_mark(function: Function, decorator: ast.expr, path: Path) -> MarkedStub:
    values: dict[str, object] = {}
    if isinstance(decorator, ast.Call):
        if decorator.args:
            raise InputError(
                "@autodiff takes keyword arguments only",
                remedy="Write `@autodiff(inputs_require_grad=(0, 1))`.",
                path=path,
                line=decorator.lineno,
            )
        values = {_keyword(keyword, path): _literal(keyword, path) for keyword in decorator.keywords}
    parameters = tuple(name for name in parameter_names(function) if name != "ctx")
    wanted = _tuple_of(values.get("inputs_require_grad"), (int, str), "inputs_require_grad", "(0, 1)", decorator, path)
    nondiff = _tuple_of(values.get("nondiff_outputs"), (int,), "nondiff_outputs", "(1, 2)", decorator, path) or ()
    _check_wanted(wanted, function, parameters, decorator, path)
    if any(position < 0 for position in nondiff if isinstance(position, int)):
        raise InputError(
            "nondiff_outputs has a negative position",
            remedy="Count outputs from 0.",
            path=path,
            line=decorator.lineno,
        )
    return MarkedStub(function, decorator, parameters, wanted, tuple(int(position) for position in nondiff))


def _keyword(keyword: ast.keyword, path: Path) -> str:
    if keyword.arg not in _KEYWORDS:
        name = "**" if keyword.arg is None else keyword.arg
        raise InputError(
            f"@autodiff has no argument `{name}`",
            remedy="It takes " + ", ".join(_KEYWORDS) + ".",
            path=path,
            line=keyword.value.lineno,
        )
    return keyword.arg


def _literal(keyword: ast.keyword, path: Path) -> object:
    if keyword.arg in ("backward", "jit"):
        return None  # how to train, which may be computed; it says nothing of the forward
    try:
        return ast.literal_eval(keyword.value)
    except (ValueError, TypeError):
        raise InputError(
            f"@autodiff({keyword.arg}=...) is not literal",
            remedy="Write the positions or names out: the file is read before it is run.",
            path=path,
            line=keyword.value.lineno,
        ) from None


def _tuple_of(
    value: object, types: tuple[type, ...], name: str, example: str, decorator: ast.expr, path: Path
) -> tuple[int | str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, types) and not isinstance(v, bool) for v in value):
        raise InputError(
            f"@autodiff({name}={value!r}) is no tuple of positions" + (" or names" if str in types else ""),
            remedy=f"Write it like {name}={example}; a tuple of one needs its comma: (0,).",
            path=path,
            line=decorator.lineno,
        )
    return tuple(value)


def _check_wanted(
    wanted: tuple[int | str, ...] | None,
    function: Function,
    parameters: tuple[str, ...],
    decorator: ast.expr,
    path: Path,
) -> None:
    if wanted is None:
        return
    has = f"`{function.name}` has {len(parameters)} argument(s): {', '.join(parameters) or 'none'}"
    if not wanted:
        raise InputError(
            "inputs_require_grad is empty: nothing is to be differentiated",
            remedy="Name the arguments that need gradients, or write bare `@autodiff` for every floating tensor.",
            path=path,
            line=decorator.lineno,
        )
    for item in wanted:
        if isinstance(item, int) and not 0 <= item < len(parameters) and not (function.args.vararg and item >= 0):
            raise InputError(
                f"inputs_require_grad names argument {item}, but {has}",
                remedy=f"Positions run from 0 to {len(parameters) - 1}; `ctx` is not counted.",
                path=path,
                line=decorator.lineno,
            )
        if isinstance(item, str) and item not in parameters and function.args.kwarg is None:
            raise InputError(
                f"inputs_require_grad names `{item}`, but {has}",
                remedy="Use the names in the stub's signature.",
                path=path,
                line=decorator.lineno,
            )
