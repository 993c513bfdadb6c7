"""`rowwise`: choices of zero by rows, made for a number of the row instead of every element.

where(row < M, g * (x * s), 0) is g * (x * where(row < M, s, 0)), where s is one number of each row and g and x are
numbers: what is left for the tile is a product and a sum, which are one operation.
"""

from __future__ import annotations

from kernel_agent.compiler.schedule.unmask import finite
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant, unspread


def rowwise(kernel: Kernel) -> Kernel:
    """The kernel whose choices by rows cost as little as they can."""
    uses = Uses.of(kernel)
    factors = {op: factor for op in kernel.ops if (factor := _row_factor(op, uses)) is not None}
    return _Rowwise(kernel, factors).copy() if factors else kernel


def _row_factor(choice: Op, uses: Uses) -> Value | None:
    """A factor of what is chosen, or else zero, that has an element for each of the condition's, which are fewer than
    the tile's; all other factors are numbers, so that the product is zero where this one is."""
    if choice.code is not Code.SELECT or not choice.result.is_float:
        return None
    condition, chosen, other = choice.operands
    if not is_constant(unspread(other), 0) or not condition.shape or condition.shape == choice.result.shape:
        return None
    product = _factors(chosen, uses)
    for factor in product:
        if factor.shape == condition.shape and all(finite(rest) for rest in product if rest is not factor):
            return factor
    return None


def _factors(value: Value, uses: Uses) -> list[Value]:
    """Of a product that is read once, in order; another value is its own."""
    op = value.producer
    if op is None or op.code is not Code.MUL or uses.count(value) != 1:
        return [value]
    return [factor for operand in op.operands for factor in _factors(operand, uses)]


class _Rowwise(Copier):
    """Makes choices for factors."""

    def __init__(self, source: Kernel, factors: dict[Op, Value]) -> None:
        super().__init__(source)
        self.factors = factors

    def pure(self, op: Op) -> None:
        """Choices."""
        if op not in self.factors:
            super().pure(op)
            return
        self[op.result] = self.b.whole(self._chosen(op.operands[1], op), op.result.shape)

    def _chosen(self, value: Value, choice: Op) -> Value:
        """A product with the choice made for one factor."""
        condition, _, other = choice.operands
        op, factor = value.producer, self.factors[choice]
        if value is factor:
            return self.b.select(self[condition], self[factor], self[unspread(other)])
        if op is None or op.code is not Code.MUL or factor not in _made_of(value):
            return self[value]
        left, right = op.operands
        return self.b.mul(self._chosen(left, choice), self._chosen(right, choice))


def _made_of(value: Value) -> list[Value]:
    """Factors of a product, and factors of these."""
    op = value.producer
    inner = op.operands if op is not None and op.code is Code.MUL else ()
    return [value, *(found for operand in inner for found in _made_of(operand))]
