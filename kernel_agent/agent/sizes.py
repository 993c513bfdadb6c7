"""Sizes written with the dims of SWEEP, such as `B*H` or `cdiv(T, 64)`: checked and worked out, never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import TypeGuard

from kernel_agent.pairs.spec import Dim

LARGEST = 2**48
"""Beyond this no tensor has so many elements."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
}


class BadSize(ValueError):
    """A size that cannot be worked out; the message says why."""


def size_of(size: int | str, dims: Mapping[str, Dim]) -> int:
    """The number that a size stands for at the dims of one SWEEP entry.

    Numbers, names of dims, `+ - * //`, brackets and `cdiv(a, b)` are understood. Raises `BadSize`.
    """
    if isinstance(size, int):
        return _checked(size, str(size))
    try:
        tree = ast.parse(size.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadSize(f"`{size:.60}` is no size") from None
    return _checked(_value(tree.body, dims, size), size)


def _checked(value: int, size: str) -> int:
    if not 0 <= value <= LARGEST:
        raise BadSize(f"`{size:.60}` is {value:,}, which is no size")
    return value


def _value(node: ast.expr, dims: Mapping[str, Dim], size: str) -> int:
    if isinstance(node, ast.Constant) and _whole(node.value):
        return _checked(node.value, size)
    if isinstance(node, ast.Name):
        value = dims.get(node.id)
        if not _whole(value):
            known = ", ".join(name for name, dim in dims.items() if _whole(dim))
            raise BadSize(f"`{node.id}` in `{size:.60}` is no dim of SWEEP ({known})")
        return value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, dims, size), _value(node.right, dims, size)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise BadSize(f"`{size:.60}` divides by zero")
        return _checked(_OPERATORS[type(node.op)](left, right), size)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "cdiv"
        and len(node.args) == 2
    ):
        left, right = (_value(argument, dims, size) for argument in node.args)
        if right == 0:
            raise BadSize(f"`{size:.60}` divides by zero")
        return -(-left // right)
    raise BadSize(f"`{size:.60}` holds more than dims, numbers, + - * // and cdiv(a, b)")


def _whole(value: object) -> TypeGuard[int]:
    return type(value) is int
