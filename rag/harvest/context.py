"""What a Function keeps in `ctx`, and which gradients its backward returns, read off its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.pairs.syntax import Function

TORCH_ATTRIBUTES = frozenset({"saved_tensors", "needs_input_grad", "saved_for_forward", "to_save"})


def kept_attributes(functions: list[ast.FunctionDef]) -> tuple[str, ...]:
    """Names set as `ctx.name = ...` where `ctx` is the first parameter, in order."""
    names: dict[str, None] = {}
    for function in functions:
        first = first_parameter(function)
        for node in ast.walk(function):
            own = (
                isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
            )
            if own and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == first:
                names[node.attr] = None
    return tuple(name for name in names if name not in TORCH_ATTRIBUTES)


def first_parameter(function: ast.FunctionDef) -> str:
    """Name of the first parameter, empty without one."""
    named = [*function.args.posonlyargs, *function.args.args]
    return named[0].arg if named else ""


def returned(function: ast.FunctionDef) -> tuple[bool, ...] | None:
    """Per position of what a backward returns, whether it is a gradient rather than None; None where it cannot be read.

    Of several returns, a position counts where any of them gives something.
    """
    found: list[list[bool]] = []
    for node in _own_returns(function):
        given = _elements(node.value, function)
        if given is None:
            return None
        found.append(given)
    if not found or len({len(one) for one in found}) != 1:
        return None
    return tuple(any(column) for column in zip(*found, strict=True))


def _own_returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, (Function, ast.Lambda, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def _elements(value: ast.expr | None, function: ast.FunctionDef) -> list[bool] | None:
    if isinstance(value, (ast.Tuple, ast.List)):
        found: list[bool] = []
        for element in value.elts:
            inner = _sequence(element.value, function) if isinstance(element, ast.Starred) else [_is_gradient(element)]
            if inner is None:
                return None
            found += inner
        return found
    sequence = _sequence(value, function)
    if sequence is not None:
        return sequence
    return None if isinstance(value, ast.Call) else [_is_gradient(value)]


def _sequence(value: ast.expr | None, function: ast.FunctionDef) -> list[bool] | None:
    """Elements of `(dx,) + (None,) * 3`, and of a name that is bound to a tuple once."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return _elements(value, function)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = _sequence(value.left, function), _sequence(value.right, function)
        return None if left is None or right is None else left + right
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and isinstance(value.right, ast.Constant):
        times = value.right.value
        inner = _sequence(value.left, function)
        return inner * times if inner is not None and isinstance(times, int) else None
    if isinstance(value, ast.Name):
        bound = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
        ]
        return _sequence(bound[0], function) if len(bound) == 1 and isinstance(bound[0], ast.Tuple) else None
    return None


def _is_gradient(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def raises_only(function: ast.FunctionDef) -> bool:
    """Whether a function does nothing but raise."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return bool(body) and all(isinstance(node, (ast.Raise, ast.Pass)) for node in body)
