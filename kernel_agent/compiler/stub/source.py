"""The text of a stub: which expression every parameter of a launch is given, and where names are bound."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.descriptors import block_names, described
from kernel_agent.compiler.stub.elements import element_of_tuple, item_of_dict
from kernel_agent.compiler.stub.hooks import hooked_tiles
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.meta import Rule, Scope, applied, rules
from kernel_agent.compiler.stub.trace import LaunchSeen, Site


@dataclass(frozen=True)
class LaunchText:
    """One launch as the stub writes it, in expressions over the stub's names."""

    arguments: Mapping[str, ast.expr]
    """By parameter; constants where a tuned configuration or a default decides."""
    options: Mapping[str, ast.expr]
    """`num_warps` and the like."""
    grid: tuple[ast.expr, ...]
    line: int
    """Last line of the launch."""


class StubSource:
    """The function that launches, as its author wrote it."""

    def __init__(
        self, source: str, name: str, module: ModuleType, loops: Sequence[Loop] = (), looped: str | None = None
    ) -> None:
        """`source` is the text of the file that `module` was imported from. `loops`: of the stub, which has their first
        trips in `source` and all of them in the text `looped`, in the same lines."""
        self.text = source
        self.loops = loops
        self.looped = source if looped is None else looped
        self.lines = source.split("\n")
        self.tree = ast.parse(source)
        self.module = module
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if not found:
            raise CannotDerive(
                f"the stub `{name}` is no plain function of the file", remedy="Define it with `def` at module level."
            )
        self.function = found[-1]

    @cached_property
    def whole(self) -> StubSource:
        """The stub with its loops."""
        return StubSource(self.looped, self.function.name, self.module) if self.loops else self

    def loop_at(self, line: int) -> Loop | None:
        """The loop that a line is one of."""
        return next((loop for loop in self.loops if loop.has(line)), None)

    def of_trips(self, node: ast.AST) -> list[str]:
        """Names in an expression that trips of loops bind."""
        return [name for name in free_names(node) if any(name in loop.bound for loop in self.loops)]

    # --- launches

    def launch(self, seen: LaunchSeen) -> LaunchText:
        """The text of a launch that was seen. Raises `CannotDerive` where it stands in a helper, a loop or a branch."""
        call = self._call(seen)
        values = self._bound(call, seen)
        values |= self._described(values, seen)
        given = {name: value for name, value in values.items() if name in seen.values}
        given |= {name: ast.Name(clone.local, ast.Load()) for name, clone in seen.clones.items()}
        for name, value in seen.values.items():
            if name not in given:
                given[name] = self._constant(value, name, seen)
        for rule in rules(seen.kernel, seen.name, self.tree, self.module):  # one may read what another has decided
            given |= {rule.name: self._ruled(rule, given, seen)} if rule.name in seen.values else {}
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
                positional += [element_of_tuple(argument.value, place) for place in range(count)]
            else:
                positional.append(argument)
        found = dict(zip(names, positional, strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
            else:
                for key in self.value(keyword.value, seen.site.names):
                    found[str(key)] = item_of_dict(keyword.value, str(key))
        return found

    def _described(self, values: Mapping[str, ast.expr], seen: LaunchSeen) -> dict[str, ast.expr]:
        """Arguments that a launch has for its descriptors. Raises `CannotDerive` where the text does not tell them."""
        found: dict[str, ast.expr] = {}
        hooked = hooked_tiles(seen, self.module)
        for name, node in values.items():
            if name not in seen.descriptors or name not in seen.tensors:
                continue
            apart = described(node, seen.descriptors[name], self._binding)
            arguments = {} if apart is None else apart.arguments(name)
            arguments |= {
                block: values.get(constexpr) or self._constant(seen.values[constexpr], constexpr, seen)
                for block, constexpr in hooked.items()
                if block in arguments
            }
            if not arguments or not all(self._gives(one, seen, key) for key, one in arguments.items()):
                raise CannotDerive(
                    f"the launch of `{seen.name}` (line {seen.site.line}) is given a tensor descriptor for `{name}` "
                    "that cannot be read",
                    remedy="Give the tensor a name, and write `TensorDescriptor.from_tensor(name, [...])`.",
                    line=seen.site.line or None,
                )
            found |= arguments
        return found

    def tiles(self, seen: LaunchSeen) -> dict[str, str]:
        """Extents of the tiles of a launch's descriptors that the stub writes as it writes a constexpr of the launch:
        `x_block_0` -> `BLOCK`."""
        if not seen.descriptors:
            return {}
        text = self.launch(seen).arguments
        given = {ast.unparse(text[name]): name for name in seen.constants if name in text}
        found = hooked_tiles(seen, self.module)
        for block in block_names(seen.descriptors):
            constexpr = given.get(ast.unparse(text[block]), "")
            changing = any(len(self.bindings(name)) > 1 for name in free_names(text[block]))
            if constexpr and not changing and type(seen.values[constexpr]) is int and free_names(text[block]):
                found[block] = constexpr
        return found

    def changing_floats(self, seen: LaunchSeen) -> frozenset[str]:
        """Floats that a launch is compiled with and that are not the same in every call."""
        text = self.launch(seen).arguments
        floats = (name for name in seen.constants if type(seen.values.get(name)) is float and name in text)
        return frozenset(name for name in floats if not self.is_constant(ast.unparse(text[name])))

    def _binding(self, name: str) -> ast.AST | None:
        """What a local is bound to, also where a tuple is unpacked."""
        found = self.definition(name)
        bound = self.bindings(name)
        if found is not None or len(bound) != 1 or name in self.parameters:
            return found
        for node in self._own_nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            if isinstance(node, ast.Assign) and isinstance(target, ast.Tuple) and bound[0] in target.elts:
                place = [one is bound[0] for one in target.elts].index(True)
                return ast.Subscript(node.value, ast.Constant(place), ast.Load())
        return None

    def _ruled(self, rule: Rule, given: Mapping[str, ast.expr], seen: LaunchSeen) -> ast.expr:
        """A heuristic over the stub's names. Raises `CannotDerive` where that is not what the launch was given."""
        node = rule.over(given)
        if node is not None and not any(map(self.is_local, rule.names)) and self._gives(node, seen, rule.name):
            return node
        raise CannotDerive(
            f"a heuristic of kernel `{seen.name}` decides `{rule.name}` and cannot be read",
            remedy=f"Write it as a lambda at the decorator, or as a function of this file that only reads `args[...]`; "
            f"or compute `{rule.name}` in the stub.",
            line=seen.site.line,
        )

    def _gives(self, node: ast.expr, seen: LaunchSeen, name: str) -> bool:
        """Whether an expression is what a launch was given."""
        try:
            known = self.value(node, seen.site.names)
        except (NameError, TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError):
            return False
        wanted = seen.values[name]
        if isinstance(wanted, Tensor):
            return known is wanted
        return type(known) is type(wanted) and bool(known == wanted)

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
            node = applied(function, given) or node
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
            return tuple(element_of_tuple(node, place) for place in range(len(value)))
        return (node,)

    def expression(self, site: Site) -> ast.expr | None:
        """The expression of the stub that called, `a * b` where that is `a *= b`; None where that is not known, or
        stands in another function."""
        if site.span is None or site.function != self.function.name:
            return None
        for node in ast.walk(self.function):
            if (
                isinstance(node, (ast.expr, ast.AugAssign))
                and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == site.span
            ):
                return node if isinstance(node, ast.expr) else _as_expression(node)
        return None

    # --- names

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """What an expression of the stub is, given its locals."""
        code = compile(ast.fix_missing_locations(ast.Expression(copy.deepcopy(node))), "<stub>", "eval")
        return eval(code, {**vars(self.module), **names})

    def bindings(self, name: str) -> list[ast.AST]:
        """Nodes of the stub's own scope that bind a name, parameters aside, in the order of the text."""
        return self._bindings.get(name, [])

    @cached_property
    def _bindings(self) -> dict[str, list[ast.AST]]:
        """By name; each name is asked for many times."""
        found: dict[str, list[ast.AST]] = {}
        for node in self._own_nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found.setdefault(node.id, []).append(node)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def _own_nodes(self) -> list[ast.AST]:
        """See `own_nodes`."""
        return own_nodes(self.function)

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
                for one in self._own_nodes
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
        for node in self._own_nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.targets[0] is bound[0]:
                return node.value
        return None


def _as_expression(node: ast.AugAssign) -> ast.expr:
    """`a * b` of `a *= b`."""
    target = copy.deepcopy(node.target)
    target.ctx = ast.Load()
    return ast.copy_location(ast.BinOp(target, node.op, node.value), node)


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
