"""Elements of adjoints: those of narrow floats are kept in f32, where sums of many parts do not lose them; and where
elements are in a tile."""

from __future__ import annotations

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
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


def last_along(b: Builder, shape: tuple[int, ...], axis: int) -> Value:
    """The index of the last element along an axis."""
    return b.sub(b.extent(shape[axis]), b.const(1))


def moved_along(b: Builder, value: Value, axis: int, by: int) -> Value:
    """The element `by` places further on, or back where that is negative; where there is none, the one at the end."""
    shape = value.shape
    place = b.add(index_along(b, shape, axis), b.const(by))
    bound, code = (b.const(0), Code.MAX) if by < 0 else (last_along(b, shape, axis), Code.MIN)
    index = b.whole(b.elementwise(code, (place, bound), "i32"), shape)
    return b.pure(Code.GATHER, (value, index), value.element, shape, {"axis": axis})
