"""Expressions for what is in a tuple or a dict that a stub takes apart at a launch: `*x.stride()`, `**options`."""

from __future__ import annotations

import ast


def element_of_tuple(node: ast.expr, place: int) -> ast.expr:
    """`x.stride(0)` of `x.stride()`; an element of a tuple that is written out; a subscript of anything else."""
    if isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(one, ast.Starred) for one in node.elts):
        return node.elts[place]
    plain = isinstance(node, ast.Call) and not node.args and not node.keywords
    if plain and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("stride", "size"):
            return ast.Call(node.func, [ast.Constant(place)], [])
        return ast.Subscript(node, ast.Constant(place), ast.Load())
    return ast.Subscript(node, ast.Constant(place), ast.Load())


def item_of_dict(node: ast.expr, key: str) -> ast.expr:
    """A value of a dict."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        for keyword in node.keywords:
            if keyword.arg == key:
                return keyword.value
    if isinstance(node, ast.Dict):
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                return value
    return ast.Subscript(node, ast.Constant(key), ast.Load())
