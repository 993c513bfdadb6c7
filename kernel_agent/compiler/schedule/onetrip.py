"""`one_trip`: loops over a row that make a single trip where a tile takes the whole row, as a constexpr says.

Triton then has no loop at all, and takes what two of them load for one load where both ask the caches for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.revisit import GONE, KEPT
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant

NAME = "ONCE"
LONGEST = 16384
"""Elements of a row that registers keep until it is asked for again: of a longer one, most still is in the caches."""


@dataclass(frozen=True)
class OneTrip:
    """A kernel whose loops over a row may make one trip."""

    kernel: Kernel
    condition: str
    """Expression of when they do."""


def one_trip(kernel: Kernel, launch: Launch, name: str) -> OneTrip | None:
    """The kernel with a constexpr `name`, for loops of which a later one loads tiles of an earlier one again (see
    `revisit`); None where it has none that step through a row from its beginning, or several rows."""
    loops = [op for op in kernel.ops if op.code is Code.FOR]
    again = [loop for loop in loops if any(op.attributes.get("eviction_policy") == GONE for op in loop.blocks[0].ops)]
    if not again or any(loop not in kernel.body.ops or loop.operands[:3] != again[0].operands[:3] for loop in loops):
        return None
    start, stop, step = again[0].operands[:3]
    size = step.producer
    if not is_constant(start, 0) or size is None or size.code is not Code.CONST or step.element != stop.element:
        return None
    tile, length = size.attributes["symbol"], Forms(kernel, launch).of(stop).invariant
    if tile not in kernel.constants or length is None or not length.printable:
        return None
    held = f"{name} and {tile} <= {LONGEST}"
    return OneTrip(_Shortened(kernel, name, held).copy(), f"{length.text()} > 0 and {length.text()} <= {tile}")


class _Shortened(Copier):
    """Copies a kernel, with the length of a tile for that of a row, and loads that are the same ones where it is so."""

    def __init__(self, source: Kernel, name: str, held: str) -> None:
        """`held`: of constexprs, whether registers keep a row until it is asked for again."""
        super().__init__(source)
        self.name = name
        self.held = held
        self.b.kernel.constants[name] = False
        self.end: Value | None = None

    def bounds(self, op: Op) -> Sequence[Value]:
        """Of a FOR."""
        start, stop, step = self.all(op.operands[:3])
        if self.end is None:
            hint, self.b.hint = self.b.hint, "end"
            (self.end,) = self.b.branch(self.b.setting(self.name, value=False), lambda: (step,), lambda: (stop,))
            self.b.hint = hint
        return start, self.end, step

    def load(self, op: Op) -> None:
        """A LOAD."""
        super().load(op)
        made = self[op.result].producer
        if made is not None and made.attributes.get("eviction_policy") in (KEPT, GONE):
            made.attributes["once"] = (self.held, KEPT)
