"""`sometimes_bound`: locals of a stub that only one side of its branches binds, so that not every return has them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kernel_agent.compiler.free_names import assigned_names, free_names
from kernel_agent.compiler.stub.forward import Kept


def sometimes_bound(function: ast.FunctionDef) -> frozenset[str]:
    """Names that some way to the end of a function binds and another one does not. Loops and the like count as run."""
    always = _bound_behind(function.body)
    return frozenset() if always is None else frozenset(assigned_names(function) - always)


def _bound_behind(body: Sequence[ast.stmt]) -> set[str] | None:
    """What statements bind whatever way they go; None where none of their ways goes on."""
    found: set[str] = set()
    for one in body:
        if isinstance(one, ast.Raise):
            return None
        if isinstance(one, ast.If):
            sides = [side for side in (_bound_behind(one.body), _bound_behind(one.orelse)) if side is not None]
            if not sides:
                return None
            found |= set.intersection(*sides)
        else:
            found |= assigned_names(one)
    return found


def none_where_unbound(saved: Sequence[Kept], names: frozenset[str]) -> tuple[tuple[Kept, ...], tuple[str, ...]]:
    """What is saved, None in calls that have none of it, and statements for the start of the forward."""
    kept: list[Kept] = []
    lacking: dict[str, None] = {}
    for one in saved:
        read = [name for name in free_names(ast.parse(one.expression, mode="eval")) if name in names]
        lacking.update(dict.fromkeys(read))
        there = " and ".join(f"{name} is not None" for name in read)
        whole = not read or one.expression in names
        kept.append(one if whole else Kept(one.name, f"{one.expression} if {there} else None"))
    return tuple(kept), tuple(f"{name} = None" for name in lacking)
