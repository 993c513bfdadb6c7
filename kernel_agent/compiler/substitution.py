"""`Substitution`: other expressions for names of the stub.

Helpers are written into the stub, loops are unrolled and names are told apart by it. Functions within keep the names
that are theirs: a lambda whose parameter is called like a local of the stub must not come to read something else.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import overload

from kernel_agent.compiler.free_names import bound_names


class Substitution(ast.NodeTransformer):
    """Expressions for names that are read, and names for those that are bound or deleted."""

    def __init__(self, read: Mapping[str, ast.expr], bound: Mapping[str, ast.expr] | None = None) -> None:
        self.read = read
        self.bound = bound or {}

    @overload
    def of(self, node: ast.expr) -> ast.expr: ...

    @overload
    def of(self, node: ast.stmt) -> ast.stmt: ...

    def of(self, node: ast.expr | ast.stmt) -> ast.expr | ast.stmt:
        """A copy of a node with them; the node itself stays as it is."""
        found: ast.expr | ast.stmt = self.visit(copy.deepcopy(node))
        return found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A name."""
        found = (self.read if isinstance(node.ctx, ast.Load) else self.bound).get(node.id)
        if isinstance(found, ast.Name):
            return ast.Name(found.id, node.ctx)
        return node if found is None else copy.deepcopy(found)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """A function of one expression."""
        self._around(node.args)
        node.body = self._within(node.args, [node.body]).visit(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function of the stub."""
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        self._around(node.args)
        inner = self._within(node.args, node.body)
        node.body = [inner.visit(one) for one in node.body]
        return node

    def _around(self, arguments: ast.arguments) -> None:
        """Defaults, which are computed where the function stands."""
        arguments.defaults = [self.visit(one) for one in arguments.defaults]
        arguments.kw_defaults = [one and self.visit(one) for one in arguments.kw_defaults]

    def _within(self, arguments: ast.arguments, body: list[ast.expr] | list[ast.stmt]) -> Substitution:
        """The same of names that a function has not of its own."""
        own = {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
        own |= {name for one in body for name in bound_names(one)}
        inner = copy.copy(self)
        inner.read = {name: value for name, value in self.read.items() if name not in own}
        inner.bound = {name: value for name, value in self.bound.items() if name not in own}
        return inner
