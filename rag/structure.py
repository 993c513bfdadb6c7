"""Structure of code with every name taken away: what is left to compare when two authors share no words."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_CALL_ROOTS = ("tl", "triton", "libdevice")

_LANGUAGE = (
    "abs arange argmax argmin associative_scan atomic_add atomic_max atomic_min cat clamp cos cumprod cumsum dot erf "
    "exp exp2 fdiv floor full gather histogram join load log log2 make_block_ptr max maximum min minimum permute "
    "program_id rand randint randn ravel reduce reshape rsqrt sigmoid sin softmax sort split sqrt store sum tanh topk "
    "trans where xor_sum zeros zeros_like"
)
LANGUAGE = frozenset(f"tl.{name}" for name in _LANGUAGE.split())
"""Operations of Triton that are known by their name alone: imported by name, given another, or called on a tensor."""


def operations(node: ast.AST) -> Iterator[str]:
    """Yield the operations below a node in source order: `tl.load`, `.to`, `Add`, `For`, ...; no names, no numbers."""
    if isinstance(node, ast.Call):
        if (called := operation_of(node.func)) is not None:
            yield called
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.BoolOp)):
        yield type(node.op).__name__
    elif isinstance(node, ast.Compare):
        yield from (type(op).__name__ for op in node.ops)
    elif isinstance(node, (ast.For, ast.While, ast.If, ast.IfExp, ast.Return, ast.Subscript)):
        yield type(node).__name__
    for child in ast.iter_child_nodes(node):
        yield from operations(child)


def operation_of(function: ast.expr) -> str | None:
    """The operation a call is of: `tl.exp`, a method as `.to`; None for a function that only its author knows."""
    if isinstance(function, ast.Name):
        if function.id in ("range", "min", "max", "abs", "sum"):
            return function.id
        return f"tl.{function.id}" if f"tl.{function.id}" in LANGUAGE else None
    if isinstance(function, ast.Attribute):
        root = function.value
        while isinstance(root, ast.Attribute):
            root = root.value
        language = isinstance(root, ast.Name) and root.id in _CALL_ROOTS
        return ("tl." if language else ".") + function.attr
    return None


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
