"""Structure of code with every name taken away: what is left to compare when two authors share no words."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_CALL_ROOTS = ("tl", "triton", "libdevice")


def operations(node: ast.AST) -> Iterator[str]:
    """Yield the operations below a node in source order: `tl.load`, `.to`, `Add`, `For`, ...; no names, no numbers."""
    if isinstance(node, ast.Call):
        yield from _called(node.func)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.BoolOp)):
        yield type(node.op).__name__
    elif isinstance(node, ast.Compare):
        yield from (type(op).__name__ for op in node.ops)
    elif isinstance(node, (ast.For, ast.While, ast.If, ast.IfExp, ast.Return, ast.Subscript)):
        yield type(node).__name__
    for child in ast.iter_child_nodes(node):
        yield from operations(child)


def _called(function: ast.expr) -> Iterator[str]:
    if isinstance(function, ast.Name):
        if function.id in ("range", "min", "max", "abs", "sum"):
            yield function.id
    elif isinstance(function, ast.Attribute):
        root = function.value
        while isinstance(root, ast.Attribute):
            root = root.value
        language = isinstance(root, ast.Name) and root.id in _CALL_ROOTS
        yield ("tl." if language else ".") + function.attr


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether a function is compiled by Triton: one of its decorators ends in `jit`."""
    decorators = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any((d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "")) == "jit" for d in decorators)


def body_operations(functions: Iterable[ast.FunctionDef]) -> list[list[str]]:
    """`operations` of each function's body; its signature and decorators are left out."""
    return [[name for statement in function.body for name in operations(statement)] for function in functions]


def count_grams(bodies: Iterable[list[str]]) -> Counter[str]:
    """Count runs of three operations, joined by blanks, within each body."""
    grams: Counter[str] = Counter()
    for body in bodies:
        grams.update(" ".join(run) for run in zip(body, body[1:], body[2:], strict=False))
    return grams


def cosine(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    """Cosine of two count vectors after log(1 + count); 0 if either is empty. In [0, 1]."""
    if not left or not right:
        return 0.0
    a = {key: math.log1p(count) for key, count in left.items()}
    b = {key: math.log1p(count) for key, count in right.items()}
    dot = sum(value * b[key] for key, value in a.items() if key in b)
    return dot / math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))


def overlap(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    """Jaccard similarity of two multisets: 1 for equal ones, 0 if they share nothing or one is empty."""
    if not left or not right:
        return 0.0
    keys = left.keys() | right.keys()
    shared = sum(min(left.get(key, 0), right.get(key, 0)) for key in keys)
    return shared / sum(max(left.get(key, 0), right.get(key, 0)) for key in keys)
