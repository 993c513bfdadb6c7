"""The text of a stub: which expression every parameter of a launch is given, and where names are bound."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.trace import LaunchSeen, Site

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

PARAMETER = "kernel_parameter"
"""Attribute of a node of a grid: the parameter that the grid function asked for there."""


@dataclass(frozen=True)
class LaunchText:
    """One launch as the stub writes it, in expressions over the stub's names."""

    arguments: Mapping[str, ast.expr]
    """By parameter; constants where a tuned configuration or a default decides, or a heuristic that cannot be read."""
    options: Mapping[str, ast.expr]
    """`num_warps` and the like."""
    grid: tuple[ast.expr, ...]
    line: int
    """Last line of the launch."""


class StubSource:
    """The function that launches, as its author wrote it."""

    def __init__(self, source: str, name: str, module: ModuleType) -> None:
        """`source` is the text of the file that `module` was imported from."""
        self.text = source
        self.lines = source.split("\n")
        self.tree = ast.parse(source)
        self.module = module
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if not found:
            raise CannotDerive(
                f"the stub `{name}` is no plain function of the file", remedy="Define it with `def` at module level."
            )
        self.function = found[-1]

    # --- launches

    def launch(self, seen: LaunchSeen) -> LaunchText:
        """The text of a launch that was seen. Raises `CannotDerive` where it stands in a helper, a loop or a branch."""
        call = self._call(seen)
        values = self._bound(call, seen)
        given = {name: value for name, value in values.items() if name in seen.values}
        given |= {name: ast.Name(clone.local, ast.Load()) for name, clone in seen.clones.items()}
        for name, value in seen.values.items():
            if name not in given:
                given[name] = self._constant(value, name, seen)
        for name, rule in self._heuristics(seen):  # one may read what another has decided
            node = self._ruled(name, rule, given, seen)
            given |= {} if node is None else {name: node}
        options = {name: values.get(name) or self._constant(value, name, seen) for name, value in seen.options.items()}
        assert isinstance(call.func, ast.Subscript)
        return LaunchText(given, options, self._grid(call.func.slice, seen, given), call.end_lineno or call.lineno)

    def _call(self, seen: LaunchSeen) -> ast.Call:
        site = seen.site
        if site.function != self.function.name:
            raise CannotDerive(
                f"the launch of `{seen.name}` (line {site.line}) stands in the helper `{site.function}`",
                remedy=f"Launch the kernel in `{self.function.name}` itself.",
                line=site.line or None,
            )
        around: list[ast.AST] = []
        found: list[tuple[ast.Call, list[ast.AST]]] = []

        def visit(node: ast.AST) -> None:
            here = isinstance(node, ast.Call) and node.lineno <= site.line <= (node.end_lineno or node.lineno)
            if here and isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found.append((node, list(around)))
            around.append(node)
            for child in ast.iter_child_nodes(node):
                visit(child)
            around.pop()

        visit(self.function)
        if not found:
            raise CannotDerive(
                f"the launch of `{seen.name}` (line {site.line}) is not written as `kernel[grid](...)`",
                remedy="Write it out in the stub.",
                line=site.line or None,
            )
        call, path = found[-1]
        for node in path:
            if isinstance(node, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)):
                raise CannotDerive(
                    f"the launch of `{seen.name}` (line {site.line}) stands in a loop",
                    remedy="Launch once, with the loop as an axis of the grid.",
                    line=site.line,
                )
        return call

    def _bound(self, call: ast.Call, seen: LaunchSeen) -> dict[str, ast.expr]:
        """Expressions by parameter or option, stars taken apart."""
        names = list(seen.kernel.arg_names)
        positional: list[ast.expr] = []
        for argument in call.args:
            if isinstance(argument, ast.Starred):
                count = len(self.value(argument.value, seen.site.names))
                positional += [_element(argument.value, place) for place in range(count)]
            else:
                positional.append(argument)
        found = dict(zip(names, positional, strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
            else:
                for key in self.value(keyword.value, seen.site.names):
                    found[str(key)] = _item(keyword.value, str(key))
        return found

    def _heuristics(self, seen: LaunchSeen) -> Iterator[tuple[str, ast.Lambda]]:
        """What decides a constexpr of a kernel of this file, as its decorator has it: `{"EVEN": lambda args: ...}`."""
        kernel = next((n for n in self.tree.body if isinstance(n, ast.FunctionDef) and n.name == seen.name), None)
        for node in [] if kernel is None else kernel.decorator_list:
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("heuristics")):
                continue
            for table in (*node.args, *(keyword.value for keyword in node.keywords)):
                for key, rule in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
                    if isinstance(key, ast.Constant) and isinstance(rule, ast.Lambda) and len(rule.args.args) == 1:
                        yield str(key.value), rule

    def _ruled(self, name: str, rule: ast.Lambda, given: Mapping[str, ast.expr], seen: LaunchSeen) -> ast.expr | None:
        """A heuristic over the stub's names; None where it is not what the launch was given."""
        if any(self.bindings(one) or one in self.parameters for one in free_names(rule)):
            return None  # a name of the module that is another one here
        node: ast.expr = _Meta(rule.args.args[0].arg, given).visit(copy.deepcopy(rule.body))
        try:
            known = self.value(node, seen.site.names)
        except (NameError, TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError):
            return None
        return node if type(known) is type(seen.values.get(name)) and known == seen.values[name] else None

    def _constant(self, value: Any, name: str, seen: LaunchSeen) -> ast.expr:
        if value is None or isinstance(value, (bool, int, float, str)):
            return ast.Constant(value)
        raise CannotDerive(
            f"parameter `{name}` of kernel `{seen.name}` gets a {type(value).__name__} that the launch does not name",
            remedy=f"Pass `{name}` at the launch.",
            line=seen.site.line,
        )

    def _grid(self, node: ast.expr, seen: LaunchSeen, given: Mapping[str, ast.expr]) -> tuple[ast.expr, ...]:
        """One expression per axis; of a grid that cannot be read, its elements."""
        function: Scope | None = None
        if isinstance(node, ast.Name):
            definition = self.definition(node.id)
            if isinstance(definition, (ast.Lambda, ast.FunctionDef)):
                function = definition
            elif isinstance(definition, (ast.Tuple, ast.List)):
                node = definition
        elif isinstance(node, ast.Lambda):
            function = node
        if function is not None:
            body = _returned(function)
            parameters = function.args.args
            if body is not None and len(parameters) == 1:
                node = _Meta(parameters[0].arg, given).visit(copy.deepcopy(body))
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(node.elts)
        value = self.value(node, seen.site.names)
        if callable(value):
            raise CannotDerive(
                f"the grid of `{seen.name}` (line {seen.site.line}) is a function that cannot be read",
                remedy="Write it as `lambda meta: (...)` or as a tuple.",
                line=seen.site.line,
            )
        if isinstance(value, (tuple, list)):
            return tuple(_element(node, place) for place in range(len(value)))
        return (node,)

    def expression(self, site: Site) -> ast.expr | None:
        """The expression of the stub that called; None where that is not known, or stands in another function."""
        if site.span is None or site.function != self.function.name:
            return None
        for node in ast.walk(self.function):
            if (
                isinstance(node, ast.expr)
                and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == site.span
            ):
                return node
        return None

    # --- names

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """What an expression of the stub is, given its locals."""
        code = compile(ast.fix_missing_locations(ast.Expression(copy.deepcopy(node))), "<stub>", "eval")
        return eval(code, {**vars(self.module), **names})

    def bindings(self, name: str) -> list[ast.AST]:
        """Nodes of the stub's own scope that bind a name, parameters aside, in the order of the text."""
        found: list[ast.AST] = []
        for node in own_nodes(self.function):
            if (isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)) and node.id == name) or (
                isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
            ):
                found.append(node)
        return found

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the stub's parameters."""
        arguments = self.function.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        extra = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        return tuple(argument.arg for argument in (*listed, *extra))

    def is_unconditional(self, name: str) -> bool:
        """Whether every call binds a local by the same expression: once, under no condition."""
        bound = self.bindings(name)
        plain = [
            statement
            for statement in self.function.body
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            and not any(isinstance(node, (ast.IfExp, ast.BoolOp)) for node in ast.walk(statement))
        ]
        return len(bound) == 1 and any(node is bound[0] for statement in plain for node in ast.walk(statement))

    def is_local(self, name: str) -> bool:
        """Whether a name is one of the stub's own, not the module's."""
        return name in self.parameters or bool(self.bindings(name))

    def kept_after(self, name: str, line: int) -> bool:
        """Whether a local has the same value at the end as after `line`."""
        return all(getattr(node, "lineno", 0) <= line for node in self.bindings(name))

    def is_known(self, name: str) -> bool:
        """Whether the backward sees a name as the stub does."""
        return not self.is_local(name) and (hasattr(builtins, name) or hasattr(self.module, name))

    def is_constant(self, text: str) -> bool:
        """Whether an expression has one value in every call: a literal, a local that is one, a name of the module."""
        node = ast.parse(text, mode="eval").body
        return all(self.is_known(name) or isinstance(self.definition(name), ast.Constant) for name in free_names(node))

    def is_size(self, node: ast.expr) -> bool:
        """Whether an expression is an extent of a tensor: `x.shape[0]`, `x.size(0)`, a local that is bound to one."""
        if isinstance(node, ast.Name):
            bound = self.bindings(node.id)
            if len(bound) != 1 or node.id in self.parameters:
                return False
            value = self.definition(node.id)
            if value is not None:
                return isinstance(value, ast.expr) and self.is_size(value)
            unpacked = (
                one.value
                for one in own_nodes(self.function)
                if isinstance(one, ast.Assign)
                and any(isinstance(target, (ast.Tuple, ast.List)) and bound[0] in target.elts for target in one.targets)
            )
            return any(isinstance(value, ast.Attribute) and value.attr == "shape" for value in unpacked)
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size"

    def definition(self, name: str) -> ast.AST | None:
        """The only thing that a local is bound to: an expression or a function."""
        bound = self.bindings(name)
        if len(bound) != 1 or name in self.parameters:
            return None
        if isinstance(bound[0], ast.FunctionDef):
            return bound[0]
        for node in own_nodes(self.function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.targets[0] is bound[0]:
                return node.value
        return None


def own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """Every node of a function's own scope: no bodies of functions or lambdas in it."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        found.append(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in function.body:
        visit(statement)
    return found


def free_names(node: ast.AST) -> list[str]:
    """Names that an expression reads, each once, in order; what its own lambdas and comprehensions bind is not."""
    bound = {
        inner.arg if isinstance(inner, ast.arg) else inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.arg) or (isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store))
    }
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id not in bound]
    ordered = sorted(names, key=lambda name: (getattr(name, "lineno", 0), getattr(name, "col_offset", 0)))
    return list(dict.fromkeys(name.id for name in ordered))


class _Meta(ast.NodeTransformer):
    """Puts a launch's own expressions for what a grid function reads of its argument."""

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


def _returned(function: Scope) -> ast.expr | None:
    """What a function of one statement returns."""
    if isinstance(function, ast.Lambda):
        return function.body
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


def _element(node: ast.expr, place: int) -> ast.expr:
    """`x.stride(0)` of `x.stride()`; an element of a tuple that is written out; a subscript of anything else."""
    if isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(one, ast.Starred) for one in node.elts):
        return node.elts[place]
    plain = isinstance(node, ast.Call) and not node.args and not node.keywords
    if plain and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("stride", "size"):
            return ast.Call(node.func, [ast.Constant(place)], [])
        return ast.Subscript(node, ast.Constant(place), ast.Load())
    return ast.Subscript(node, ast.Constant(place), ast.Load())


def _item(node: ast.expr, key: str) -> ast.expr:
    """A value of a dict."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        for keyword in node.keywords:
            if keyword.arg == key:
                return keyword.value
    if isinstance(node, ast.Dict):
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                return value
    return ast.Subscript(node, ast.Constant(key), ast.Load())
