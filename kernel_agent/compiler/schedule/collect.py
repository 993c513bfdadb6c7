"""`collected`: a sum of products with factors in common as a product with a sum: a c + b c = (a + b) c.

Adjoints are sums of such products, since every use of a value adds one. Written as one product they take fewer
multiplications, and where they nearly cancel the difference is exact: a softmax's gradient is y (dy - sum) then. And
constants are multiplied with what has fewer elements: s (2 x) = (2 s) x.
"""

from __future__ import annotations

from math import prod

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant


def collected(kernel: Kernel) -> Kernel:
    """A kernel that multiplies with common factors once, and with constants where that is least work."""
    return prune(_Collector(kernel).copy())


class _Collector(Copier):
    """Writes sums anew."""

    def __init__(self, source: Kernel) -> None:
        super().__init__(source)
        self.uses = Uses.of(source)

    def pure(self, op: Op) -> None:
        """Sums of two products, and products with a constant in one factor."""
        if op.code is Code.MUL and op.result.is_float and self.lighter(op):
            return
        if op.code not in (Code.ADD, Code.SUB) or not op.result.is_float or not op.result.shape:
            super().pure(op)
            return
        left, right = (self.factors(operand) for operand in op.operands)
        common = _common(left, right)
        rests = [_without(side, common) for side in (left, right)]
        if not common or any(_element(side) != op.result.element for side in (left, right)):
            super().pure(op)
            return
        b = self.b
        one, other = (self.product(rest, op.result) for rest in rests)
        total = b.add(one, other) if op.code is Code.ADD else b.sub(one, other)
        for factor in common:
            total = b.mul(total, self[factor])
        self[op.result] = total

    def lighter(self, op: Op) -> bool:
        """Copy s (k x) as (k s) x where s has fewer elements; whether that is so."""
        b = self.b
        for few, many in (op.operands, op.operands[::-1]):
            inner = many.producer
            if inner is None or inner.code is not Code.MUL or self.uses.count(many) != 1:
                continue
            if prod(few.shape) >= prod(many.shape) or constant(few) is not None:
                continue
            for number, rest in (inner.operands, inner.operands[::-1]):
                if constant(number) is not None and rest.element == few.element:
                    self[op.result] = b.mul(self[rest], b.mul(self[few], self[number]))
                    return True
        return False

    def factors(self, value: Value) -> list[Value]:
        """What a value is the product of, where nobody else reads the parts of that."""
        op = value.producer
        if op is None or op.code is not Code.MUL or self.uses.count(value) != 1:
            return [value]
        return [factor for operand in op.operands for factor in self.factors(operand)]

    def product(self, factors: list[Value], like: Value) -> Value:
        """Of copies; 1 of none."""
        b = self.b
        total = b.const(1.0, like.element)
        for factor in factors:
            total = b.mul(total, self[factor])
        return total


def _common(left: list[Value], right: list[Value]) -> list[Value]:
    """Factors of both products, each as often as both have it."""
    rest, found = list(right), []
    for factor in left:
        if factor in rest:
            rest.remove(factor)
            found.append(factor)
    return found


def _without(factors: list[Value], common: list[Value]) -> list[Value]:
    """What is left of factors, each of the common ones taken away once."""
    left = list(factors)
    for factor in common:
        left.remove(factor)
    return left


def _element(factors: list[Value]) -> str:
    """The one element of factors; empty where there are several."""
    elements = {factor.element for factor in factors}
    return elements.pop() if len(elements) == 1 else ""
