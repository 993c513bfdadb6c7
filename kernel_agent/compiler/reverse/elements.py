"""Elements of adjoints: those of narrow floats are kept in f32, where sums of many parts do not lose them; and where
elements are in a tile."""

from __future__ import annotations

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import NARROW, Value


def adjoint_element(element: str) -> str:
    """Of the cotangent of a float."""
    return "f32" if element in NARROW else element


def widened(b: Builder, value: Value) -> Value:
    """A float in the element of its adjoint, to compute with as precisely."""
    return b.cast(value, adjoint_element(value.element))


def index_along(b: Builder, shape: tuple[int, ...], axis: int) -> Value:
    """Indices along an axis of a tile, i32, of extent 1 along the others."""
    index = b.arange(0, shape[axis])
    for other in range(len(shape)):
        if other != axis:
            index = b.expand(index, other)
    return index
