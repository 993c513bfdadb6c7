"""Mistakes in what is computed: terms, factors, functions and axes of the kernels of a backward."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.gate.mutants.edit import Edit
from kernel_agent.gate.mutants.flow import SUMS, BackwardFlow, KernelFlow
from kernel_agent.gate.mutants.trees import calls, keyword, names, parameters, text

_FUNCTIONS = {
    "exp": "exp2",
    "exp2": "exp",
    "log": "log2",
    "log2": "log",
    "sin": "cos",
    "cos": "sin",
    "rsqrt": "sqrt",
    "sqrt": "rsqrt",
    "maximum": "minimum",
    "minimum": "maximum",
    "sigmoid": "exp",
}
"""Functions that are taken for one another."""


def dropped_term(backward: BackwardFlow) -> Iterator[Edit]:
    """One of two summands that both carry the cotangent, or of several accumulations into one variable."""
    for node, minus in _sums(backward):
        left, right = text(node.left), text(node.right)
        yield Edit(node, left)
        yield Edit(node, f"(-{right})" if minus else right)
    for value in _accumulated(backward):
        yield Edit(value, f"0.0 * {text(value)}")


def doubled_term(backward: BackwardFlow) -> Iterator[Edit]:
    """As `dropped_term`, with one summand counted twice."""
    for node, minus in _sums(backward):
        yield Edit(node, f"({text(node.left)} {'-' if minus else '+'} 2.0 * {text(node.right)})")
    for value in _accumulated(backward):
        yield Edit(value, f"2.0 * {text(value)}")


def sign_of_a_term(backward: BackwardFlow) -> Iterator[Edit]:
    """As `dropped_term`, with plus and minus exchanged."""
    for node, minus in _sums(backward):
        yield Edit(node, f"({text(node.left)} {'+' if minus else '-'} {text(node.right)})")
    for value in _accumulated(backward):
        yield Edit(value, f"-{text(value)}")


def dropped_factor(backward: BackwardFlow) -> Iterator[Edit]:
    """A factor on what carries the cotangent."""
    for node in _products(backward):
        if not _is_one_plus(node.right):
            yield Edit(node, text(node.left))


def dropped_one_plus(backward: BackwardFlow) -> Iterator[Edit]:
    """A factor 1 + t left out: the summand t is missing, and all else is as it was."""
    for node in _products(backward):
        if _is_one_plus(node.right):
            yield Edit(node, text(node.left))


def squared_factor(backward: BackwardFlow) -> Iterator[Edit]:
    """A factor that stands twice."""
    for node in _products(backward):
        yield Edit(node, f"({text(node.left)} * {text(node.right)} * {text(node.right)})")


def sum_for_product(backward: BackwardFlow) -> Iterator[Edit]:
    """A sum where a product should stand."""
    for node in _products(backward):
        yield Edit(node, f"({text(node.left)} + {text(node.right)})")


def wrong_scale(backward: BackwardFlow) -> Iterator[Edit]:
    """What is stored, doubled; or without a factor that the kernel was given as a number."""
    for kernel in backward.kernels.values():
        for call in kernel.stores():
            value = call.args[1]
            if kernel.is_linear(value):
                yield Edit(value, f"2.0 * {text(value)}")
            for node in ast.walk(value):
                if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
                    left, right = node.left, node.right
                    if kernel.is_linear(left) and isinstance(right, ast.Name) and right.id in parameters(kernel.node):
                        yield Edit(node, text(left))


def wrong_sign(backward: BackwardFlow) -> Iterator[Edit]:
    """What is stored, negated."""
    for kernel in backward.kernels.values():
        for call in kernel.stores():
            if kernel.is_linear(call.args[1]):
                yield Edit(call.args[1], f"-{text(call.args[1])}")


def wrong_constant(backward: BackwardFlow) -> Iterator[Edit]:
    """A number of a formula, half as large again. Zeros stay: they are what masks and accumulators begin with."""
    for kernel in backward.kernels.values():
        left_out = {id(keyword(call, "other")) for call in calls(kernel.node, "load")}
        for node in ast.walk(kernel.node):
            if isinstance(node, ast.Constant) and type(node.value) is float and node.value and id(node) not in left_out:
                yield Edit(node, f"{1.5 * node.value!r}")


def wrong_function(backward: BackwardFlow) -> Iterator[Edit]:
    """A function taken for a like one: exp2 for exp, sqrt for rsqrt, minimum for maximum."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, *_FUNCTIONS):
            if isinstance(call.func, ast.Attribute):
                yield Edit(call.func, f"{text(call.func.value)}.{_FUNCTIONS[call.func.attr]}")


def wrong_axis_of_a_sum(backward: BackwardFlow) -> Iterator[Edit]:
    """A sum or maximum in a kernel along the other axis of its tile."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "sum", "max", "cumsum"):
            axis = keyword(call, "axis") or (call.args[1] if len(call.args) > 1 else None)
            if isinstance(axis, ast.Constant) and axis.value in (0, 1):
                yield Edit(axis, str(1 - axis.value))


def dropped_transpose(backward: BackwardFlow) -> Iterator[Edit]:
    """A tile of a product as it was loaded, not transposed."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "trans"):
            if len(call.args) == 1:
                yield Edit(call, text(call.args[0]))


def narrow_product(backward: BackwardFlow) -> Iterator[Edit]:
    """A product, with what is accumulated before it, rounded to bfloat16."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "dot"):
            yield Edit(call, f"{ast.unparse(call)}.to(tl.bfloat16).to(tl.float32)")


def narrow_summand(backward: BackwardFlow) -> Iterator[Edit]:
    """What is summed up in a kernel, rounded to bfloat16 before."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "sum"):
            if call.args and kernel.is_float(call.args[0]):
                yield Edit(call.args[0], f"{text(call.args[0])}.to(tl.bfloat16).to(tl.float32)")


def narrow_operand(backward: BackwardFlow) -> Iterator[Edit]:
    """What is loaded, computed with in bfloat16."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "to"):
            if call.args and ast.unparse(call.args[0]) == "tl.float32":
                yield Edit(call, f"{ast.unparse(call)}.to(tl.bfloat16).to(tl.float32)")


def _sums(backward: BackwardFlow) -> Iterator[tuple[ast.BinOp, bool]]:
    """Sums of two summands that both carry the cotangent; true for a difference."""
    for kernel in backward.kernels.values():
        for node in ast.walk(kernel.node):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, SUMS)):
                continue
            if kernel.is_linear(node.left) and kernel.is_linear(node.right):
                yield node, isinstance(node.op, ast.Sub)


def _accumulated(backward: BackwardFlow) -> Iterator[ast.expr]:
    """What is accumulated where another accumulation into the same variable stands beside it."""
    for kernel in backward.kernels.values():
        for statement in ast.walk(kernel.node):
            if isinstance(statement, ast.AugAssign) and _one_of_several(kernel, statement):
                yield statement.value


def _one_of_several(kernel: KernelFlow, statement: ast.AugAssign) -> bool:
    if not (isinstance(statement.op, SUMS) and kernel.is_linear(statement.value)):
        return False
    return any(
        isinstance(node, (ast.Assign, ast.AugAssign))
        and node is not statement
        and names(node.targets[0] if isinstance(node, ast.Assign) else node.target) == names(statement.target)
        and kernel.is_linear(node.value)
        for node in ast.walk(kernel.node)
    )


def _products(backward: BackwardFlow) -> Iterator[ast.BinOp]:
    """What carries the cotangent times a tile or number that does not."""
    for kernel in backward.kernels.values():
        for node in ast.walk(kernel.node):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            if kernel.is_linear(node.left) and not kernel.is_linear(node.right) and kernel.is_float(node.right):
                yield node


def _is_one_plus(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, SUMS)
        and any(isinstance(part, ast.Constant) and part.value == 1 for part in (node.left, node.right))
    )
