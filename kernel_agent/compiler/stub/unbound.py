"""`unbound`: names that a backward reads where no way to that place has bound them.

Statements of a backward are moved, shared and put under conditions by several passes. A name that is read too early
shows only in calls that come by, which the gate's cases may not: so every text is asked before it is given out.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from kernel_agent.compiler.free_names import assigned_names

_MOST = 6
"""Flags of which every combination is tried; of more, all together and each alone."""


def unbound(text: str, flags: Sequence[str]) -> list[str]:
    """Names that the last function of a text reads unbound, in order; its other functions and its module's names are
    none of its locals. `flags`: locals that tell which gradients are wanted, any of which may hold in a call.

    What a condition over other things decides may have been decided the same way before: a name that one side of an
    earlier condition binds passes for bound.
    """
    function = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)][-1]
    names = _Names(assigned_names(function) - {one.arg for one in function.args.args})
    found: dict[str, None] = {}
    for wanted in _choices(flags):
        _Way(names, wanted, found).follow(function.body, set())
    return list(found)


def _choices(flags: Sequence[str]) -> Iterator[Mapping[str, bool]]:
    if len(flags) <= _MOST:
        chosen: Iterator[Collection[str]] = (
            some for count in range(1, len(flags) + 1) for some in itertools.combinations(flags, count)
        )
    else:
        chosen = iter([flags, *((flag,) for flag in flags)])
    for some in chosen if flags else [()]:
        yield {flag: flag in some for flag in flags}


class _Names:
    """What each piece of a function reads and binds: asked once, however many ways lead through it."""

    def __init__(self, local: Collection[str]) -> None:
        self.local = local
        self._assigned: dict[ast.AST, set[str]] = {}
        self._read: dict[ast.AST, tuple[str, ...] | None] = {}

    def assigned(self, node: ast.AST) -> set[str]:
        """Names that a piece binds."""
        if node not in self._assigned:
            self._assigned[node] = assigned_names(node)
        return self._assigned[node]

    def read(self, node: ast.AST) -> tuple[str, ...] | None:
        """Locals that a piece reads, in order; None of one with a choice in it."""
        if node not in self._read:
            parts = list(_evaluated(node))
            names = [one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
            choice = any(isinstance(one, ast.IfExp) for one in parts)
            self._read[node] = None if choice else tuple(name for name in names if name in self.local)
        return self._read[node]


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """A tree, without what lambdas and comprehensions evaluate in a scope of their own."""
    yield node
    if not isinstance(node, (ast.Lambda, ast.comprehension, ast.GeneratorExp, ast.ListComp)):
        for child in ast.iter_child_nodes(node):
            yield from _evaluated(child)


class _Way:
    """One choice of flags through a function."""

    def __init__(self, names: _Names, wanted: Mapping[str, bool], found: dict[str, None]) -> None:
        self.names = names
        self.wanted = wanted
        self.found = found

    def follow(self, body: Sequence[ast.stmt], bound: set[str]) -> None:
        """Read statements one after another; `bound` grows with what they bind."""
        for one in body:
            if isinstance(one, ast.If):
                self.read(one.test, bound)
                known = self.value(one.test)
                sides = [one.body, one.orelse] if known is None else [one.body if known else one.orelse]
                before = set(bound)
                for side in sides:
                    inner = set(before)
                    self.follow(side, inner)
                    bound |= inner
            elif isinstance(one, ast.For):
                self.read(one.iter, bound)
                bound |= self.names.assigned(one.target)
                self.follow([*one.body, *one.orelse], bound)  # the first trip
            elif isinstance(one, (ast.While, ast.With)):
                bound |= self.names.assigned(one)
                self.read(one, bound)
            else:
                self.read(one, bound)
                bound |= self.names.assigned(one)

    def read(self, node: ast.AST, bound: Collection[str]) -> None:
        """Note what an expression reads unbound; sides of conditions that are not taken are not read."""
        read = self.names.read(node)
        if read is not None:
            self.found.update((name, None) for name in read if name not in bound)
            return
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.IfExp) and (taken := self.value(node.test)) is not None:
            children = [node.body if taken else node.orelse]
        for child in children:
            self.read(child, bound)

    def value(self, test: ast.expr) -> bool | None:
        """What a condition over flags alone is; None of any other."""
        if isinstance(test, ast.Name):
            return self.wanted.get(test.id)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.value(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self.value(part) for part in test.values]
            if None in parts:
                return None
            return any(parts) if isinstance(test.op, ast.Or) else all(parts)
        return None
