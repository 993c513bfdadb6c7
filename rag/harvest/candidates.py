"""What in a checkout might be a pair: Functions of autograd, operators of torch.library, functions named as halves.

A candidate names its halves as pieces of code. Whether they reach kernels and are whole is asked later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.errors import InputError
from rag.harvest.closure import OPERATORS, Family, Piece
from rag.harvest.kernels import Kernels
from rag.harvest.module import Module
from rag.harvest.report import Kind, Reason, Skipped
from rag.harvest.resolve import Definition, Resolver
from rag.harvest.scope import Reference

DEEPEST = 8
"""Bases above a class that are looked at."""
_TELLING = re.compile(r"\bFunction\b|\bctx\b|triton_op|custom_op|register_autograd")
_HALVES = re.compile(r"def \w*(fwd|bwd|forward|backward|grad)\w*\(", re.IGNORECASE)
_LAUNCH = re.compile(r"\]\s*\(")
_FORWARD = re.compile(r"(?<![a-z])(fwd|forward)(?![a-z])|(?<=[a-z])(Fwd|Forward)(?![a-z])", re.IGNORECASE)
_BACKWARD = ("bwd", "backward", "grad")


@dataclass(frozen=True)
class Candidate:
    """A forward and a backward, found by how they are written."""

    kind: Kind
    name: str
    module: Module
    line: int
    forward: tuple[Piece, ...]
    """Roots of the forward: the function, of a class its members."""
    setup: tuple[Piece, ...]
    """What saves, where that is a function of its own."""
    backward: tuple[Piece, ...]
    """Roots of the backward; empty where there is none."""
    forward_function: ast.FunctionDef | None
    """What is called with the inputs."""
    setup_function: ast.FunctionDef | None
    backward_function: ast.FunctionDef | None
    family: Family | None = None
    """Of an `autograd.Function`: its class and bases."""
    backward_module: Module | None = None
    """Where the backward function stands."""


class Finder:
    """Finds candidates. Files that cannot be read are skipped with a reason, once."""

    def __init__(self, resolver: Resolver, kernels: Kernels) -> None:
        self._resolver, self._kernels = resolver, kernels
        self.skipped: list[Skipped] = []
        self.modules = [module for file in resolver.checkout.files if (module := self._read(file)) is not None]

    def _read(self, file: str) -> Module | None:
        checkout = self._resolver.checkout
        try:
            text = checkout.text(file)
            couple = _HALVES.search(text) and _LAUNCH.search(text)
            return checkout.module(file) if couple or _TELLING.search(text) else None
        except InputError as error:
            left = Skipped(reason=Reason.NOT_PYTHON, name="", file=file, line=error.line or 0, detail=error.message)
            self.skipped.append(left)
            return None

    def functions(self) -> Iterator[Candidate]:
        """Subclasses of `torch.autograd.Function`."""
        found: list[Candidate] = []
        bases: set[Definition] = set()
        for module in self.modules:
            for node, top in module.classes():
                if not self._is_function(module, node):
                    continue
                if not top:
                    left = Skipped(reason=Reason.LOCAL, name=node.name, file=module.path, line=node.lineno)
                    self.skipped.append(left)
                    continue
                definition = Definition(module.path, node.name)
                if module.value(node.name) is not node:
                    continue  # bound again, as where something is not installed
                family = Family(self._resolver, definition)
                bases |= family.classes.keys() - {definition}
                found.append(self._function(module, node, family))
        for one in found:
            half = one.forward_function is None or one.backward_function is None
            if not (half and Definition(one.module.path, one.name) in bases):
                yield one

    def _function(self, module: Module, node: ast.ClassDef, family: Family) -> Candidate:
        forward, setup, backward = (family.member(name) for name in ("forward", "setup_context", "backward"))
        functions = [family.function(self._resolver, name) for name in ("forward", "setup_context", "backward")]
        return Candidate(
            kind=Kind.FUNCTION,
            name=node.name,
            module=module,
            line=node.lineno,
            forward=() if forward is None else (*family.headers(), forward),
            setup=() if setup is None else (setup,),
            backward=() if backward is None else (backward,),
            forward_function=None if functions[0] is None else functions[0][1],
            setup_function=None if functions[1] is None else functions[1][1],
            backward_function=None if functions[2] is None else functions[2][1],
            family=family,
            backward_module=None if functions[2] is None else functions[2][0],
        )

    def _is_function(self, module: Module, node: ast.ClassDef, depth: int = 0) -> bool:
        for base in node.bases:
            for reference in module.references(base):
                if reference.node is not base:
                    continue
                resolved = self._resolver.resolve(module, reference)
                if resolved.outside.startswith("torch.autograd") and resolved.outside.endswith("Function"):
                    return True
                target = resolved.target
                if not isinstance(target, Definition) or depth == DEEPEST:
                    continue
                above, home = self._resolver.node(target), self._resolver.checkout.module(target.module)
                if isinstance(above, ast.ClassDef) and self._is_function(home, above, depth + 1):
                    return True
        return False

    def operators(self) -> Iterator[Candidate]:
        """Operators of torch.library, with what is registered as their backward anywhere in the checkout."""
        registered: dict[object, tuple[Module, ast.Call]] = {}
        for module in self.modules:
            for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr == "register_autograd":
                    for key in self._registered(module, call):
                        registered[key] = (module, call)
        for module in self.modules:
            for home, function, key, name in self._operators_of(module):
                registration = registered.get(Definition(module.path, key)) or registered.get(name)
                yield self._operator(home, function, key, registration)

    def _registered(self, module: Module, call: ast.Call) -> Iterator[object]:
        """What a call of `register_autograd` speaks of: a definition, or the operator's full name."""
        assert isinstance(call.func, ast.Attribute)
        for reference in module.references(call.func):
            if reference.node is not call.func:
                continue
            resolved = self._resolver.resolve(module, reference)
            if isinstance(resolved.target, Definition):
                yield resolved.target
            elif resolved.outside.startswith("torch.") and call.args:
                first = call.args[0]
                name = self._string(module, first)
                if name:
                    yield name
                yield from (t for r in module.references(first) if isinstance(t := self._target(module, r), Definition))

    def _operators_of(self, module: Module) -> Iterator[tuple[Module, ast.FunctionDef, str, str]]:
        """Operators of a file: where the function stands, the name it is bound to, the operator's full name."""
        for function in module.functions():
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and self._makes_operator(module, decorator.func):
                    name = self._string(module, decorator.args[0]) if decorator.args else ""
                    yield module, function, function.name, name
        for bound, bindings in list(module.bindings.items()):
            for call in (binding.node for binding in bindings):
                if not isinstance(call, ast.Call):
                    continue
                made = call.func if isinstance(call.func, ast.Call) else call
                implementation = call.args if made is not call else call.args[1:]
                if not (self._makes_operator(module, made.func) and made.args and implementation):
                    continue
                found = self._function_at(module, implementation[0])
                if found is not None:
                    yield *found, bound, self._string(module, made.args[0])

    def _operator(
        self, module: Module, function: ast.FunctionDef, bound: str, registration: tuple[Module, ast.Call] | None
    ) -> Candidate:
        backward = setup = None
        if registration is not None:
            where, call = registration
            by_keyword = {keyword.arg: keyword.value for keyword in call.keywords}
            given = call.args[1:] if call.args and self._string_or_operator(where, call) else call.args
            backward = self._function_at(where, by_keyword.get("backward", given[0] if given else None))
            setup = self._function_at(where, by_keyword.get("setup_context"))
        return Candidate(
            kind=Kind.OPERATOR,
            name=bound,
            module=module,
            line=function.lineno,
            forward=(Piece(module, function),),
            setup=() if setup is None else (Piece(*setup),),
            backward=() if backward is None else (Piece(*backward),),
            forward_function=function,
            setup_function=None if setup is None else setup[1],
            backward_function=None if backward is None else backward[1],
            backward_module=None if backward is None else backward[0],
        )

    def _string_or_operator(self, module: Module, call: ast.Call) -> bool:
        """Whether the first argument of a registration is the operator: it is called on torch.library."""
        for reference in module.references(call.func):
            if reference.node is call.func:
                return bool(self._resolver.resolve(module, reference).outside)
        return False

    def _function_at(self, module: Module, node: ast.expr | None) -> tuple[Module, ast.FunctionDef] | None:
        for reference in module.references(node) if node is not None else ():
            target = self._target(module, reference)
            found = self._resolver.node(target) if isinstance(target, Definition) else None
            if isinstance(target, Definition) and isinstance(found, ast.FunctionDef):
                return self._resolver.checkout.module(target.module), found
        return None

    def _target(self, module: Module, reference: Reference) -> object:
        return self._resolver.resolve(module, reference).target

    def _makes_operator(self, module: Module, node: ast.expr) -> bool:
        for reference in module.references(node):
            outside = self._resolver.resolve(module, reference).outside
            if reference.node is node and outside.startswith("torch.") and outside.rpartition(".")[2] in OPERATORS:
                return True
        return False

    def _string(self, module: Module, node: ast.expr) -> str:
        """The text of a literal, or of a name that is bound to one."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        for reference in module.references(node) if isinstance(node, ast.Name) else ():
            target = self._target(module, reference)
            value = self._resolver.node(target) if isinstance(target, Definition) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
        return ""

    def couples(self) -> Iterator[Candidate]:
        """Host functions of which one is named as the other's backward, in one file or in one folder."""
        named: dict[str, list[tuple[Module, ast.FunctionDef]]] = {}
        for module in self.modules:
            for function in module.functions():
                if not self._kernels.is_kernel_node(module, function):
                    named.setdefault(function.name, []).append((module, function))
        for name, places in named.items():
            for module, function in places:
                backward = self._partner(module, name, named)
                if backward is not None:
                    yield Candidate(
                        kind=Kind.FUNCTIONS,
                        name=name,
                        module=module,
                        line=function.lineno,
                        forward=(Piece(module, function),),
                        setup=(),
                        backward=(Piece(*backward),),
                        forward_function=function,
                        setup_function=None,
                        backward_function=backward[1],
                        backward_module=backward[0],
                    )

    def _partner(
        self, module: Module, name: str, named: dict[str, list[tuple[Module, ast.FunctionDef]]]
    ) -> tuple[Module, ast.FunctionDef] | None:
        for other in backward_names(name):
            places = named.get(other, [])
            same = [place for place in places if place[0] is module]
            near = same or [place for place in places if _folder(place[0]) == _folder(module)]
            if len(near) == 1:
                return near[0]
        return None


def backward_names(name: str) -> tuple[str, ...]:
    """What the backward of a function might be called; none for what is named as a backward itself."""
    if any(part in name.lower() for part in ("bwd", "backward")):
        return ()
    match = _FORWARD.search(name)
    if match is None:
        return tuple(f"{name}_{ending}" for ending in _BACKWARD)
    said = match.group()
    words = {"fwd": "bwd", "forward": "backward"}
    one = words[said.lower()]
    others = [one, *(word for word in words.values() if word != one)]
    cased = [other.capitalize() if said[0].isupper() else other for other in others]
    return tuple(name[: match.start()] + other + name[match.end() :] for other in cased)


def _folder(module: Module) -> str:
    return module.path.rpartition("/")[0]
