"""`is_own_share`: whether each trip of a loop takes a part of a tensor that no other trip takes, as the stub writes it.

`x[first : first + chunk]` in a loop over `range(0, n, chunk)`, `x[i]` in one over `range(n)`.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping

from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.substitution import Substitution

Definition = Callable[[str], ast.AST | None]
"""What a local of the stub is bound to."""
_POINTS = 8
"""At which two polynomials are compared: of integers so large two that differ agree at none, all but surely."""


def is_own_share(part: ast.expr | None, loop: Loop, definition: Definition) -> bool:
    """Whether an expression takes, along some axis, what is the trip's alone. `part`: a subscript of a tensor."""
    if not isinstance(part, ast.Subscript):
        return False
    places = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
    return any(_is_own(place, loop, definition) for place in places)


def _is_own(place: ast.expr, loop: Loop, definition: Definition) -> bool:
    if not isinstance(place, ast.Slice):
        return counted(place, loop) is not None
    if not (loop.rises_from_zero and _rises(loop.step)):  # a place below zero counts from the end
        return False
    if place.lower is None or place.upper is None or place.step is not None:
        return False
    begin, end = (_spelt(one, loop, definition) for one in (place.lower, place.upper))
    if not _rises(begin) or (loop.bound - {loop.target}) & {*free_names(begin)}:
        return False
    later = ast.BinOp(ast.Name(loop.target, ast.Load()), ast.Add(), loop.step)
    following = Substitution({loop.target: later}).of(begin)
    return any(_same(one, following) for one in _no_more_than(end))


def counted(place: ast.expr, loop: Loop) -> int | None:
    """How far behind the number of each trip a place is, where that is the same for all, no place is below zero, and
    those of later trips lie behind those of earlier ones; None of another one."""
    first = loop.least
    if isinstance(place, ast.Slice) or free_names(place) != [loop.target] or first is None or not _rises(loop.step):
        return None
    more = _value(place, {loop.target: 0})
    shifted = ast.BinOp(ast.Name(loop.target, ast.Load()), ast.Add(), ast.Constant(more))
    if more is None or not _same(place, shifted) or first + more < 0:
        return None
    return more


def _rises(node: ast.expr) -> bool:
    """Whether nothing is taken from anything in an expression: of numbers that are not below zero it is none itself,
    and falls with none of them."""
    return not any(isinstance(one, (ast.Sub, ast.USub)) for one in ast.walk(node))


def _spelt(node: ast.expr, loop: Loop, definition: Definition) -> ast.expr:
    """An expression with what the trip's names are bound to in their place."""
    found: dict[str, ast.expr] = {}
    for name in free_names(node):
        value = definition(name) if name in loop.bound and name != loop.target else None
        if isinstance(value, ast.expr):
            found[name] = _spelt(value, loop, definition)
    return Substitution(found).of(node)


def _no_more_than(node: ast.expr) -> list[ast.expr]:
    """Expressions that one is never above: itself, and what a `min` is of."""
    least = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "min"
    return [node, *node.args] if least and isinstance(node, ast.Call) and not node.keywords else [node]


def _same(one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are one polynomial."""
    names = sorted({*free_names(one), *free_names(other)})
    chance = random.Random(0)
    for _ in range(_POINTS):
        point = {name: chance.randrange(1 << 64) for name in names}
        first, second = _value(one, point), _value(other, point)
        if first is None or first != second:
            return False
    return True


def _value(node: ast.expr, point: Mapping[str, int]) -> int | None:
    """What a polynomial is at a point; None of another expression."""
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.Name(name):
            return point[name]
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() as operator, right):
            first, second = _value(left, point), _value(right, point)
            if first is None or second is None:
                return None
            if isinstance(operator, ast.Mult):
                return first * second
            return first + second if isinstance(operator, ast.Add) else first - second
    return None
