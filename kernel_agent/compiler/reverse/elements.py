"""Elements of adjoints: those of narrow floats are kept in f32, where sums of many parts do not lose them."""

from __future__ import annotations

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import NARROW, Value


def adjoint_element(element: str) -> str:
    """Of the cotangent of a float."""
    return "f32" if element in NARROW else element


def widened(b: Builder, value: Value) -> Value:
    """A float in the element of its adjoint, to compute with as precisely."""
    return b.cast(value, adjoint_element(value.element))
