"""`RULES`: the adjoint of every operation that has one.

A rule gets the builder of the adjoint kernel, an operation of the forward, an accessor from values of the forward to
their recomputed selves, and the cotangents of the operation's results. It returns one cotangent per operand, or None
for an operand without. Cotangents broadcast as values do: one may be smaller than what it belongs to, which stands for
equal elements. For operations whose operands broadcast, it belongs to the broadcast operand, and the caller sums it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.reverse.lanes import Lanes
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@dataclass(frozen=True)
class Primal:
    """The forward, recomputed."""

    value: Callable[[Value], Value]
    lanes: Lanes

    def __call__(self, value: Value) -> Value:
        """What a value of the forward is in the adjoint kernel."""
        return self.value(value)


Found = Sequence[Value | None]
Rule = Callable[[Builder, Op, Primal, tuple[Value | None, ...]], Found]
Simple = Callable[[Builder, Op, Primal, Value], Found]

RULES: dict[Code, Rule] = {}
MIXING: set[Code] = set()
"""Operations whose adjoint lets one lane's cotangent reach another lane: masked lanes must be zero before."""
CONSTANT: set[Code] = {
    Code.CONST, Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.ARANGE, Code.FLOORDIV, Code.FLOOR, Code.CEIL, Code.AND,
    Code.OR, Code.XOR, Code.SHL, Code.SHR, Code.MULHI, Code.CMP, Code.ARG_MAX, Code.ARG_MIN,
}  # fmt: skip
"""Operations whose derivative is zero wherever it exists."""


def rule(*codes: Code, mixes: bool = False) -> Callable[[Simple], Simple]:
    """Register the adjoint of operations with one result."""

    def register(function: Simple) -> Simple:
        def adapted(b: Builder, op: Op, primal: Primal, cotangents: tuple[Value | None, ...]) -> Found:
            (g,) = cotangents
            assert g is not None
            return function(b, op, primal, g)

        for code in codes:
            RULES[code] = adapted
        if mixes:
            MIXING.update(codes)
        return function

    return register


def rule_of_many(*codes: Code, mixes: bool = False) -> Callable[[Rule], Rule]:
    """Register the adjoint of operations with several results, some of whose cotangents may be None."""

    def register(function: Rule) -> Rule:
        for code in codes:
            RULES[code] = function
        if mixes:
            MIXING.update(codes)
        return function

    return register
