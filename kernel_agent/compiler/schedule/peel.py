"""`peel`: what can be done to a sum once rather than to everything that is summed: transposing it, scaling it.

`sum(c * x) = c * sum(x)` leaves a multiplication less in the loop, and an accumulator that is not transposed can take a
product as it comes out of the dot.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Op, Value


@dataclass(frozen=True)
class Peeled:
    """A value as linear operations on another one."""

    value: Value
    """What is summed."""
    layers: tuple[Op, ...] = ()
    """The operations, the outermost first."""

    def rebuilt(self, copier: Copier, total: Value) -> Value:
        """The operations on a sum; `copier` knows what they scale by."""
        b = copier.b
        inner = self.value
        for op in reversed(self.layers):
            operands = [total if operand is inner else copier[operand] for operand in op.operands]
            found = b.again(op, operands)
            assert isinstance(found, Value)
            total, inner = found, op.result
        return total


def peel(forms: Forms, value: Value, moving: frozenset[Atom]) -> Peeled:
    """The innermost value of which `value` is linear with coefficients that do not depend on the `moving` indices.

    Scaling is only peeled off by what has no more lanes than what it scales, so that sums do not shrink and grow.
    """
    layers: list[Op] = []
    while (op := value.producer) is not None:
        inner = _linear(forms, op, moving)
        if inner is None or inner.element != value.element:
            break
        layers.append(op)
        value = inner
    return Peeled(value, tuple(layers))


def _linear(forms: Forms, op: Op, moving: frozenset[Atom]) -> Value | None:
    """The operand that an operation is linear in."""
    if op.code in (Code.NEG, Code.TRANS):
        return op.operands[0]
    if op.code in (Code.MUL, Code.DIV):
        left, right = op.operands
        if left is right:
            return None
        if forms.reads(right).isdisjoint(moving) and left.shape == op.result.shape:
            return left
        if op.code is Code.MUL and forms.reads(left).isdisjoint(moving) and right.shape == op.result.shape:
            return right
    return None
