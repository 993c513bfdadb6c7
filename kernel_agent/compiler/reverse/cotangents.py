"""`Cotangents`: what reverse mode knows so far of the derivatives of the outputs by every value."""

from __future__ import annotations

from kernel_agent.compiler.reverse.activity import Activity
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.reverse.lanes import Lanes
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Value, is_constant


class Cotangents:
    """Of the values of one block of the forward, and of what the block takes from outside."""

    def __init__(self, b: Builder, lanes: Lanes, activity: Activity) -> None:
        self.b = b
        self.lanes = lanes
        self.activity = activity
        self.found: dict[Value, Value] = {}
        """By value of the forward. Of its shape, or smaller where all elements are equal."""

    def get(self, value: Value) -> Value | None:
        """None where it is zero."""
        return self.found.get(value)

    def add(self, value: Value, part: Value | None, spread: tuple[int, ...] | None = None) -> None:
        """Add a part to the cotangent of a value that has derivatives; a larger part is summed to the value's shape.

        `spread`: the shape that the value was broadcast to, which `part` belongs to; its own by default.
        """
        if part is None or value not in self.activity or is_constant(part, 0):
            return
        b = self.b
        b.hint = f"d_{value.name}" if value.name else ""
        if spread is not None:
            part = self._counted(part, value.shape, spread)
        if not fits(part.shape, value.shape):
            part = b.sum_to(self.lanes.settled(part), value.shape)
        part = b.cast(part, adjoint_element(value.element))
        known = self.found.get(value)
        self.found[value] = part if known is None else self.lanes.sum(known, part)

    def _counted(self, part: Value, shape: tuple[int, ...], spread: tuple[int, ...]) -> Value:
        """A part that is equal along axes in which the value was broadcast counts as often as it was."""
        b, ones = self.b, (1,) * len(spread)
        mine, own = part.shape or ones, shape or ones
        times = b.const(1)
        for extent, held, wanted in zip(spread, mine, own, strict=True):
            if held == 1 and wanted == 1:
                times = b.mul(times, b.extent(extent))
        return b.mul(part, b.cast(times, part.element))


def fits(smaller: tuple[int, ...], larger: tuple[int, ...]) -> bool:
    """Whether one shape broadcasts to another."""
    if smaller == ():
        return True
    return len(smaller) == len(larger) and all(
        mine in (1, wanted) for mine, wanted in zip(smaller, larger, strict=True)
    )
