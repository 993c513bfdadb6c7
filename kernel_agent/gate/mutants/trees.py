"""Small questions to a syntax tree of Python and Triton that several classes of mutants ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.pairs.modulework import is_launch


def calls(function: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of functions or methods of these names; of all without a name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and (not names or called(node) in names):
            yield node


def launches(function: ast.FunctionDef) -> list[ast.Call]:
    """Calls `kernel[grid](...)`, in order of their lines."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call) and is_launch(node)]
    return sorted(found, key=lambda call: call.lineno)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of parameters, those by keyword last."""
    return [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]


def names(node: ast.AST) -> set[str]:
    """Every name in a tree."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def called(node: ast.Call) -> str:
    """The last part of the name of what is called; empty for anything else."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def text(node: ast.AST) -> str:
    """An expression that can stand beside any operator."""
    written = ast.unparse(node)
    return f"({written})" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp)) else written


def first(call: ast.Call) -> str:
    """The text of the first positional argument; empty without one."""
    return ast.unparse(call.args[0]) if call.args else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def without_keyword(call: ast.Call, *left_out: str) -> str:
    """The call as text without some of its keywords."""
    kept = [k for k in call.keywords if k.arg not in left_out]
    return ast.unparse(ast.Call(func=call.func, args=call.args, keywords=kept))


def is_number(node: ast.expr) -> bool:
    """Whether it is a stride or a count of elements: a number on the host whoever's it is."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("stride", "numel")
