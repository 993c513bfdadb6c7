"""Adjoints of torch's products of vectors and matrices."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kernel_agent.compiler.stub.torchcall import TorchCall
from kernel_agent.compiler.stub.torchrules import rule


@rule("matmul", "mm", "bmm")
def _product(call: TorchCall, grad: str, place: int) -> str | None:
    left, right = (one.value for one in call.operands[:2])
    if left.dim() < 2 or right.dim() < 2:
        return _vectors(call, grad, place, left.dim(), right.dim())
    text = f"{grad} @ {call.text(1)}.mT" if place == 0 else f"{call.text(0)}.mT @ {grad}"
    return text if left.dim() == right.dim() == 2 else call.summed(text, place)


@rule("mv", "dot", "inner")
def _of_vectors(call: TorchCall, grad: str, place: int) -> str | None:
    left, right = (one.value.dim() for one in call.operands[:2])
    return _vectors(call, grad, place, left, right) if (left, right) in ((1, 1), (2, 1)) else None


def _vectors(call: TorchCall, grad: str, place: int, left: int, right: int) -> str | None:
    """Where a side is a vector: of a matrix and a vector, and of two vectors."""
    if (left, right) == (1, 1):
        return f"{grad} * {call.text(1 - place)}"
    if (left, right) == (2, 1):
        return f"{grad}.unsqueeze(1) * {call.text(1)}" if place == 0 else f"{call.text(0)}.mT @ {grad}"
    if (left, right) == (1, 2):
        return f"{call.text(1)} @ {grad}" if place == 0 else f"{call.text(0)}.unsqueeze(1) * {grad}"
    return None


@rule("outer")
def _outer(call: TorchCall, grad: str, place: int) -> str:
    return f"{grad} @ {call.text(1)}" if place == 0 else f"{grad}.mT @ {call.text(0)}"


@rule("addmm", "baddbmm")
def _added(call: TorchCall, grad: str, place: int) -> str | None:
    if len(call.operands) != 3 or call.keywords:
        return None  # alpha and beta
    if place == 0:
        return call.summed(grad, 0)
    return f"{grad} @ {call.text(2)}.mT" if place == 1 else f"{call.text(1)}.mT @ {grad}"


@rule("linear")
def _linear(call: TorchCall, grad: str, place: int) -> str:
    if place == 0:
        return f"{grad} @ {call.text(1)}"
    rows = f"{grad}.reshape(-1, {grad}.shape[-1])"
    return f"{rows}.mT @ {call.text(0)}.reshape(-1, {call.text(0)}.shape[-1])" if place == 1 else f"{rows}.sum(0)"


@rule("einsum")
def _einsum(call: TorchCall, grad: str, place: int) -> str | None:
    """The same sum with the result in an operand's place: every index of that must stand in one of the others."""
    equation = call.operands[0].node
    if not (isinstance(equation, ast.Constant) and isinstance(equation.value, str)) or len(call.operands) < 2:
        return None
    terms = _terms(equation.value)
    if terms is None or len(terms) != len(call.operands):
        return None
    *given, result = terms
    mine = given.pop(place - 1)
    others = [call.text(n) for n in range(1, len(call.operands)) if n != place]
    if not set(mine) <= set(result).union(*given):
        return None  # summed by itself
    return f"torch.einsum({','.join([result, *given]) + '->' + mine!r}, {', '.join([grad, *others])})"


def _terms(equation: str) -> Sequence[str] | None:
    """The indices of the operands, then of the result; None where an operand has one twice, or axes without a name."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = [*inputs.split(","), result]
    plain = all(term.isalpha() or not term for term in terms) and all(len(set(term)) == len(term) for term in terms)
    return terms if arrow and plain else None
