"""`Seen`: where a kernel reads a number of outputs, and which of its lanes are which of the kernel's."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.counted import Counted, Digits
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.lanewise import Lanewise
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


class Seen:
    """Where a kernel reads a number of outputs."""

    def __init__(
        self, values: dict[Value, Digits | None], replaced: dict[Value, Digits], lanes: Lanewise, *, wide: bool
    ) -> None:
        self.wide = wide
        """Whether lanes count, too."""
        self.values = values
        """All integers that depend on it; None of those that do not as a whole."""
        self.replaced = replaced
        """Those that are computed from elements' coordinates."""
        self.lanes = lanes
        """Of all numbers whose lanes are digits of the same."""

    def axis(self, value: Value) -> int:
        """Along which a tile goes with the number; 0 of one that programs count alone."""
        if not self.wide:
            return 0
        if value not in self.lanes.axes:
            raise CannotDerive("an address does not go with the number of the output")
        return self.lanes.axes[value]


def all_seen(source: Kernel, forms: Forms, numbers: Sequence[Counted]) -> list[Seen]:
    """In all of a kernel, of each number."""
    found = [_read(source, forms, number) for number in numbers]
    shared: dict[Value, int] = {}
    for number, (_, replaced) in zip(numbers, found, strict=True):
        if number.part is not None:
            shared |= {v: d.lane for v, d in replaced.items() if d.lane is not None}
    joint = Lanewise(shared)
    return [
        Seen(
            values,
            replaced,
            joint
            if number.part is not None
            else Lanewise({v: d.lane for v, d in replaced.items() if d.lane is not None}),
            wide=number.width != ONE,
        )
        for number, (values, replaced) in zip(numbers, found, strict=True)
    ]


def _read(source: Kernel, forms: Forms, number: Counted) -> tuple[dict[Value, Digits | None], dict[Value, Digits]]:
    values: dict[Value, Digits | None] = {}
    replaced: dict[Value, Digits] = {}
    for op in source.ops:
        for value in op.results:
            if value.is_float or value.element == "i1" or op.blocks or op.code is Code.LOAD:
                continue
            form = forms.of(value)
            if not any(number.concerns(atom) for atom, _ in form.terms):
                continue
            found = number.digits(form)
            values[value] = found
            wide = number.width != ONE
            if found is None or not found.parts or (wide and found.lane is None):
                values[value] = None
                continue
            parsed = [values.get(operand, found) is not None for operand in op.operands]
            pure = not found.rest.terms
            divided = op.code in (Code.FLOORDIV, Code.REM)
            if pure or divided or not all(parsed):
                replaced[value] = found
    return values, replaced
