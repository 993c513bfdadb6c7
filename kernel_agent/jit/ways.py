"""The way of a call through its stub: which branches it takes and which kernels it launches.

A backward is derived for the way that small stand-ins take. A call that takes another one would get the gradient of
other kernels: its way is noted while the forward runs, and compared with those that were proven.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from kernel_agent.pairs.sections import split_sections

Way = tuple[str, ...]
"""Sorted: `forward:2 yes` for the third test of the forward that held, `launch add_kernel` for a launch."""

_ASKED, _COUNTED = "_kernel_agent_asked", "_kernel_agent_counted"


_LAUNCH = "launch "


class _Notes(threading.local):
    """What is being noted on this thread."""

    def __init__(self) -> None:
        self.stack: list[set[str]] = []


_NOTES = _Notes()


@contextmanager
def noted() -> Iterator[set[str]]:
    """Note the way of what runs inside of the block."""
    notes: set[str] = set()
    _NOTES.stack.append(notes)
    try:
        yield notes
    finally:
        _NOTES.stack.pop()


def way_of(notes: Iterable[str]) -> Way:
    """Notes as a way that compares."""
    return tuple(sorted(notes))


def tests_of(way: Way) -> Way:
    """A way without its launches: `torch.compile` makes those itself, and no kernel of ours hears of them."""
    return tuple(note for note in way if not note.startswith(_LAUNCH))


def _note(text: str) -> None:
    if _NOTES.stack:
        _NOTES.stack[-1].add(text)


def _asked(place: str, test: Any) -> bool:
    taken = bool(test)
    _note(f"{place} {'yes' if taken else 'no'}")
    return taken


def _counted(place: str, items: Iterable[Any]) -> Iterator[Any]:
    count = 0
    for item in items:
        count += 1
        yield item
    _note(f"{place} {count} times")


def watch(module: ModuleType, source: str) -> None:
    """Have the forward section of a pair's module note its way. `source` is the text of the module."""
    forward = split_sections(source)
    last = forward.backward_line
    tree = ast.parse(source)
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.lineno < last
        and isinstance(getattr(module, node.name, None), Callable)  # type: ignore[arg-type]
        and not isinstance(getattr(module, node.name), JITFunction)
        and not node.decorator_list
    ]
    vars(module).update({_ASKED: _asked, _COUNTED: _counted})
    for function in functions:
        _Noting(function.name).visit(function)
    body = ast.Module(body=list[ast.stmt](functions), type_ignores=[])
    exec(compile(ast.fix_missing_locations(body), str(module.__file__), "exec"), vars(module))
    for value in list(vars(module).values()):
        kernel = value
        while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
            kernel = kernel.fn
        if isinstance(kernel, JITFunction):
            kernel.add_pre_run_hook(_launched(kernel.fn.__name__))


def _launched(name: str) -> Callable[..., None]:
    def hook(*_: Any, **__: Any) -> None:
        _note(_LAUNCH + name)

    return hook


class _Noting(ast.NodeTransformer):
    """Puts a note around every test and loop of one function."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.count = 0

    def _place(self) -> ast.Constant:
        self.count += 1
        return ast.Constant(f"{self.function}:{self.count}")

    def _wrapped(self, test: ast.expr, called: str) -> ast.expr:
        place = self._place()
        inner = self.visit(test)
        return ast.copy_location(ast.Call(ast.Name(called, ast.Load()), [place, inner], []), test)

    def _tested(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        node.test = self._wrapped(node.test, _ASKED)
        for name in ("body", "orelse"):
            part = getattr(node, name)
            setattr(node, name, [self.visit(one) for one in part] if isinstance(part, list) else self.visit(part))
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        """`if test:`"""
        return self._tested(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """`a if test else b`"""
        return self._tested(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        """`while test:`"""
        return self._tested(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        """`for item in items:`"""
        node.iter = self._wrapped(node.iter, _COUNTED)
        node.body = [self.visit(one) for one in node.body]
        node.orelse = [self.visit(one) for one in node.orelse]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """A grid is computed at the launch, or not at all: what it asks is no branch of the stub."""
        return node
