"""What functions of a launch's arguments say, in expressions of the stub: grids and heuristics, `lambda meta: ...`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from kernel_agent.compiler.free_names import free_names

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

PARAMETER = "kernel_parameter"
"""Attribute of a node: the parameter of the kernel that the function asked for there."""


@dataclass(frozen=True)
class Rule:
    """What decides a constexpr of a kernel at every launch."""

    name: str
    """Of the constexpr."""
    function: Scope | None
    """As the file has it; None where its text was not found."""

    @property
    def names(self) -> list[str]:
        """Names of the module that it reads."""
        if self.function is None:
            return []
        own = [] if isinstance(self.function, ast.Lambda) else [self.function.name]
        return [*own, *free_names(self.function)]

    def over(self, given: Mapping[str, ast.expr]) -> ast.expr | None:
        """What it says of a launch; None where that cannot be written down.

        A function of several statements is called with a dict of what it reads.
        """
        if self.function is None or len(self.function.args.args) != 1:
            return None
        said = applied(self.function, given)
        if said is not None or isinstance(self.function, ast.Lambda):
            return said
        parameter = self.function.args.args[0].arg
        read = _read(self.function, parameter)
        if read is None or not read <= given.keys():
            return None
        names = [name for name in given if name in read]
        table = ast.Dict([ast.Constant(name) for name in names], [copy.deepcopy(given[name]) for name in names])
        return ast.Call(ast.Name(self.function.name, ast.Load()), [table], [])


def applied(function: Scope, given: Mapping[str, ast.expr]) -> ast.expr | None:
    """What a function of one statement returns of a launch's arguments; None where it has more."""
    body, parameters = _returned(function), function.args.args
    if body is None or len(parameters) != 1:
        return None
    found = _Meta(parameters[0].arg, given).visit(copy.deepcopy(body))
    assert isinstance(found, ast.expr)
    return found


def rules(kernel: JITFunction, name: str, tree: ast.Module, module: ModuleType) -> list[Rule]:
    """The heuristics of a kernel in the order in which they decide. `tree` is the text of its module."""
    written = dict(_written(name, tree))
    return [Rule(one, written.get(one)) for one in _deciding(kernel, module)]


def around(kernel: JITFunction, module: ModuleType) -> list[Autotuner | Heuristics]:
    """What decides for a kernel of a module, the outermost first."""
    for value in vars(module).values():
        found: list[Autotuner | Heuristics] = []
        while isinstance(value, (Autotuner, Heuristics)):
            found.append(value)
            value = value.fn
        if value is kernel and found:
            return found
    return []


def _deciding(kernel: JITFunction, module: ModuleType) -> list[str]:
    """The constexprs that heuristics around a kernel decide, the outermost first."""
    heuristics = (one for one in around(kernel, module) if isinstance(one, Heuristics))
    return list(dict.fromkeys(name for one in heuristics for name in one.values))


def _written(name: str, tree: ast.Module) -> Iterator[tuple[str, Scope | None]]:
    """Constexprs with the functions that decorators of a kernel name for them."""
    kernel = next((n for n in reversed(tree.body) if isinstance(n, ast.FunctionDef) and n.name == name), None)
    for node in [] if kernel is None else kernel.decorator_list:
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("heuristics")):
            continue
        for given in (*node.args, *(keyword.value for keyword in node.keywords)):
            table = _bound(given, tree)
            for key, rule in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
                if isinstance(key, ast.Constant):
                    found = _bound(rule, tree)
                    yield str(key.value), found if isinstance(found, (ast.Lambda, ast.FunctionDef)) else None


def _bound(node: ast.expr, tree: ast.Module) -> ast.AST:
    """What a name of the module is bound to, once; any other expression as it is."""
    if not isinstance(node, ast.Name):
        return node
    found = [
        one if isinstance(one, ast.FunctionDef) else one.value
        for one in tree.body
        if (isinstance(one, ast.FunctionDef) and one.name == node.id)
        or (isinstance(one, ast.Assign) and node.id in [ast.unparse(target) for target in one.targets])
    ]
    return found[0] if len(found) == 1 else node


def _read(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: str) -> set[str] | None:
    """The keys that a function reads of its parameter; None where it does anything else with it."""
    inside = [node for statement in function.body for node in ast.walk(statement)]
    names = [node for node in inside if isinstance(node, ast.Name) and node.id == parameter]
    keys = {
        id(node.value): str(node.slice.value)
        for node in inside
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    }
    return {keys[id(node)] for node in names} if all(id(node) in keys for node in names) else None


def _returned(function: Scope) -> ast.expr | None:
    """What a function of one statement returns."""
    if isinstance(function, ast.Lambda):
        return function.body
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


class _Meta(ast.NodeTransformer):
    """Puts a launch's own expressions for what a function reads of its argument."""

    def __init__(self, parameter: str, given: Mapping[str, ast.expr]) -> None:
        self.parameter = parameter
        self.given = given

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`meta["BLOCK"]`."""
        self.generic_visit(node)
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == self.parameter
            and isinstance(node.slice, ast.Constant)
        ):
            found = self.given.get(str(node.slice.value))
            if found is not None:
                shown = copy.deepcopy(found)
                setattr(shown, PARAMETER, str(node.slice.value))
                return shown
        return node
