"""`free_names` of expressions, names that statements bind, assign and read, and all `words` in a text; `free_name` for
what the compiler adds beside names that the user or another pass has chosen."""

from __future__ import annotations

import ast
import re
from collections import deque

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def free_name(name: str, taken: set[str]) -> str:
    """The name, or one with a number behind it where it is taken; it is taken then."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found


def words(text: str) -> frozenset[str]:
    """Names in the text of an expression, those of attributes and keywords among them."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


def bound_names(node: ast.AST) -> list[str]:
    """Names that a statement binds or deletes, each once, in the order of the tree. A function or class binds its own
    name alone: what is bound within it is another scope's."""
    found: dict[str, None] = {}
    pending = deque([node])
    while pending:
        inner = pending.popleft()
        if isinstance(inner, _SCOPES):
            found[inner.name] = None
            continue
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            found[inner.id] = None
        pending.extend(ast.iter_child_nodes(inner))
    return list(found)


def assigned_names(node: ast.AST) -> set[str]:
    """Names that are given a value anywhere in a tree; none that are only deleted: those are unbound behind it."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def read_names(node: ast.AST) -> set[str]:
    """Names that are read anywhere in a tree, whoever bound them."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


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
