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
    given = {one.arg for one in function.args.args}
    found: dict[str, None] = {}
    for wanted in _choices(flags):
        _Way(assigned_names(function) - given, wanted, found).follow(function.body, set())
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


class _Way:
    """One choice of flags through a function."""

    def __init__(self, local: Collection[str], wanted: Mapping[str, bool], found: dict[str, None]) -> None:
        self.local = local
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
                bound |= assigned_names(one.target)
                self.follow([*one.body, *one.orelse], bound)  # the first trip
            elif isinstance(one, (ast.While, ast.With)):
                bound |= assigned_names(one)
                self.read(one, bound)
            else:
                self.read(one, bound)
                bound |= assigned_names(one)

    def read(self, node: ast.AST, bound: Collection[str]) -> None:
        """Note what an expression reads unbound; sides of conditions that are not taken are not read."""
        if isinstance(node, ast.IfExp) and self.value(node.test) is not None:
            self.read(node.body if self.value(node.test) else node.orelse, bound)
            return
        read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.local
        if read and isinstance(node, ast.Name) and node.id not in bound:
            self.found[node.id] = None
        if isinstance(node, (ast.Lambda, ast.comprehension, ast.GeneratorExp, ast.ListComp)):
            return
        for child in ast.iter_child_nodes(node):
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
