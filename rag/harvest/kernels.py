"""`Kernels`: which names of a checkout are Triton kernels, however they were made, and what launches them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rag.harvest.module import Module
from rag.harvest.resolve import Definition, Resolved, Resolver
from rag.harvest.scope import Reference


@dataclass(frozen=True)
class Touch:
    """What a piece of host code does with kernels."""

    names: bool = False
    """It names a kernel of the checkout."""
    launches: bool = False
    """It launches a kernel by its name."""
    launches_local: bool = False
    """It launches a local value, such as a parameter."""
    outside: str = ""
    """What it launches from outside of the checkout."""


class Kernels:
    """Answers are kept. Raises `InputError` where a file on the way is not Python."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._known: dict[tuple[Definition, str], bool] = {}
        self._makers: dict[Definition, bool] = {}

    def is_kernel(self, definition: Definition, member: str = "") -> bool:
        """Whether a name, or a member of the class of this name, is a kernel or a table of kernels."""
        key = (definition, member)
        if key not in self._known:
            self._known[key] = False  # of itself
            self._known[key] = self._look(definition, member)
        return self._known[key]

    def is_kernel_node(self, module: Module, node: ast.AST, owner: ast.ClassDef | None = None) -> bool:
        """Whether a function or an assigned expression is a kernel."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(self._makes(module, decorator, owner) for decorator in node.decorator_list)
        if isinstance(node, ast.expr):
            return self._holds(module, node, owner)
        return False

    def touch(self, module: Module, node: ast.AST, owner: ast.ClassDef | None = None) -> Touch:
        """What a piece of host code does with kernels."""
        launches_local = False
        outside = ""
        resolved = {id(r.node): self._resolver.resolve(module, r) for r in module.references(node, owner)}
        names = any(self._is_kernel(found) for found in resolved.values()) or self._makes_inside(module, node)
        called = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        wrapped = (resolved[id(one)].target for one in called if id(one) in resolved)
        launches = any(isinstance(target, Definition) and self._is_wrapped(target) for target in wrapped)
        for launched in _launched(node):
            found = resolved.get(id(launched))
            if found is None or (isinstance(found.target, Definition) and self._is_function(found.target)):
                launches_local = True
            elif self._is_kernel(found):
                launches = True
            elif found.outside and found.outside.partition(".")[0] not in ("torch", "typing"):
                outside = found.outside
        return Touch(names, launches, launches_local, outside)

    def is_launched(self, module: Module, node: ast.AST, owner: ast.ClassDef | None = None) -> bool:
        """Whether a piece is a kernel itself, rather than host code that may bind one to its arguments."""
        return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self.is_kernel_node(module, node, owner)

    def _is_wrapped(self, definition: Definition) -> bool:
        """Whether a decorator above triton's makes a kernel a function that host code calls without a grid."""
        node = self._resolver.node(definition)
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list or not self.is_kernel(definition):
            return False
        module, outer = self._resolver.checkout.module(definition.module), node.decorator_list[0]
        outer = outer.func if isinstance(outer, ast.Call) else outer
        found = [self._resolver.resolve(module, r) for r in module.references(outer) if r.node is outer]
        return bool(found) and not found[0].outside.startswith("triton")

    def _makes_inside(self, module: Module, node: ast.AST) -> bool:
        """Whether a host function makes a kernel, by a decorated function in it or by a call."""
        inner = [one for one in ast.walk(node) if one is not node]
        made = (isinstance(one, ast.Call) and self._makes_of(module, one) for one in inner)
        return any(made) or any(
            self.is_kernel_node(module, one)
            for one in inner
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
        )

    def _is_function(self, definition: Definition) -> bool:
        """`make_kernel(dtype)[grid](...)`: a function of the checkout gives the kernel."""
        return isinstance(self._resolver.node(definition), ast.FunctionDef) and not self.is_kernel(definition)

    def _is_kernel(self, resolved: Resolved) -> bool:
        return isinstance(resolved.target, Definition) and self.is_kernel(resolved.target, resolved.member)

    def _look(self, definition: Definition, member: str) -> bool:
        module = self._resolver.checkout.module(definition.module)
        for binding in module.bindings.get(definition.name, ()):
            node = binding.node
            if isinstance(node, ast.ClassDef):
                if member and self._member_is_kernel(module, node, definition, member):
                    return True
            elif node is not None and self.is_kernel_node(module, node):
                return True
        return False

    def _member_is_kernel(self, module: Module, node: ast.ClassDef, definition: Definition, member: str) -> bool:
        for name, inner in class_members(node):
            if name == member:
                value = inner.value if isinstance(inner, (ast.Assign, ast.AnnAssign)) else inner
                return value is not None and self.is_kernel_node(module, value, node)
        bases = (base.target for base in self._resolver.bases(definition))
        return any(isinstance(base, Definition) and self.is_kernel(base, member) for base in bases)

    def _makes(self, module: Module, maker: ast.expr, owner: ast.ClassDef | None = None) -> bool:
        """Whether a decorator or something called makes kernels: `triton.jit`, an alias, or a function over it."""
        if isinstance(maker, ast.Call):
            partial = isinstance(maker.func, (ast.Name, ast.Attribute)) and last_name(maker.func) == "partial"
            return self._makes(module, maker.args[0] if partial and maker.args else maker.func, owner)
        for reference in module.references(maker, owner):
            if reference.node is not maker:
                continue
            resolved = self._resolver.resolve(module, reference)
            target = resolved.target
            if resolved.outside:
                return _is_jit(resolved.outside)
            if isinstance(target, Definition) and target not in self._makers:
                self._makers[target] = False
                self._makers[target] = self._is_maker(target)
            return isinstance(target, Definition) and self._makers[target]
        return False

    def _is_maker(self, definition: Definition) -> bool:
        module = self._resolver.checkout.module(definition.module)
        node = self._resolver.node(definition)
        if isinstance(node, ast.FunctionDef):
            if self.is_kernel(definition):
                return False
            return any(self._refers_to_maker(module, reference) for reference in module.references(node))
        if isinstance(node, ast.Call):
            return self._makes(module, node) and not self._makes_of(module, node)
        return isinstance(node, (ast.Name, ast.Attribute)) and self._makes(module, node)

    def _refers_to_maker(self, module: Module, reference: Reference) -> bool:
        return _is_jit(self._resolver.resolve(module, reference).outside)

    def _makes_of(self, module: Module, node: ast.Call) -> bool:
        """Whether a call gives a maker a function: `triton.jit(fn)`, not `partial(triton.jit, debug=True)`."""
        functions = [a for a in node.args if isinstance(a, (ast.Name, ast.Attribute, ast.Lambda))]
        return self._makes(module, node.func) and bool(functions) and last_name(node.func) != "partial"

    def _holds(self, module: Module, value: ast.expr, owner: ast.ClassDef | None) -> bool:
        """Whether an expression is or holds a kernel: a wrapped function, an alias, a table."""
        for inner in ast.walk(value):
            if isinstance(inner, ast.Call) and self._makes_of(module, inner):
                return True
        for reference in module.references(value, owner):
            if self._is_kernel(self._resolver.resolve(module, reference)):
                return True
        return False


def class_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Names that the body of a class binds by statements of its own, in order."""
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement


def _launched(node: ast.AST) -> Iterator[ast.expr]:
    """What is launched: `K` of `K[grid](...)` and of `K.run(..., grid=...)`."""
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Call):
            continue
        if isinstance(inner.func, ast.Subscript):
            yield _bare(inner.func.value)
        elif isinstance(inner.func, ast.Attribute) and inner.func.attr == "run" and "grid" in _keywords(inner):
            yield inner.func


def _keywords(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


def _bare(value: ast.expr) -> ast.expr:
    """`K` of `wrap_triton(K)`: what is called with one thing and gives it back fit for launching."""
    while isinstance(value, ast.Call) and last_name(value.func) in ("wrap_triton", "capture_triton") and value.args:
        value = value.args[0]
    return value.func if isinstance(value, ast.Call) else value


def last_name(node: ast.expr) -> str:
    """The last part of `a.b.c`; empty for what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_jit(dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    return first == "triton" and rest.rpartition(".")[2] == "jit"
