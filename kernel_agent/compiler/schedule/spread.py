"""`spread`: a grid whose programs take turns at tiles, as a grid with a program for each tile.

A persistent kernel has as many programs as run at once, and each walks every n-th tile. Which program has which tile
does not matter for what is computed: where nothing is carried from one tile to the next, tiles are the grid. Owners
of gradients are cut from a grid of tiles alone.
"""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op

_STAYS = frozenset((Code.TAPE_STORE, Code.TAPE_LOAD, Code.LEAVE_IF, Code.STORE, Code.BARRIER, Code.WHILE))
"""What is of one program, or has an order."""


def spread(kernel: Kernel, launch: Launch) -> tuple[Kernel, Launch]:
    """The kernel with a program for each trip of its loop over tiles, and its launch; as given where it has none."""
    forms = Forms(kernel, launch)
    loop = next((op for op in kernel.body.ops if op.code is Code.FOR), None)
    axis = None if loop is None else _axis(forms, loop)
    if loop is None or axis is None:
        return kernel, launch
    found = prune(_Spreader(kernel, loop, axis).copy())
    tiles = forms.of(loop.operands[1]).base
    grid = tuple(tiles if place == axis else extent for place, extent in enumerate(launch.grid))
    return found, replace(launch, grid=grid)


def _axis(forms: Forms, loop: Op) -> int | None:
    """The axis of the grid whose programs take turns at the trips of a loop, which are all that they do."""
    kernel = forms.kernel
    start, stop, step = (forms.of(value) for value in loop.operands[:3])
    if len(loop.operands) > 3 or stop.invariant is None or not stop.base.printable:
        return None
    others = [op for op in kernel.body.ops if op is not loop]
    if any(op.blocks or op.code in EFFECTS for op in others) or any(op.code in _STAYS for op in kernel.ops):
        return None
    for axis, programs in enumerate(forms.launch.grid):
        if start == Form.of({forms.program(axis): ONE}) and step == Form(base=programs):
            asked = [op for op in kernel.ops if op.attributes.get("axis") == axis and op.code in _OF_PROGRAMS]
            within = {op for op in asked if op.result not in loop.operands}
            return None if within else axis
    return None


_OF_PROGRAMS = frozenset((Code.PROGRAM_ID, Code.NUM_PROGRAMS))


class _Spreader(Copier):
    """Puts the program in the place of the trip."""

    def __init__(self, source: Kernel, taken: Op, axis: int) -> None:
        super().__init__(source)
        self.taken = taken
        self.axis = axis

    def loop(self, op: Op) -> None:
        """A FOR."""
        if op is not self.taken:
            super().loop(op)
            return
        (block,) = op.blocks
        (index,) = block.arguments
        self[index] = self.b.cast(self.b.program_id(self.axis, index.name), index.element)
        self.block(block)
