"""`by_lanes`: what a loop adds up of the sums of its tiles, added up lane by lane and summed once behind the loop.

A sum over a tile has the warps of a program wait for each other; in a loop it keeps the loads of the next trip waiting,
too. Lanes wait for nobody, and their sums are rounded no more often.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.order import adds_up
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

MOST = 2
"""Tiles that a loop keeps in registers for its sums."""


def by_lanes(kernel: Kernel) -> Kernel:
    """The kernel whose loops over tiles of a row add up numbers of the row behind them.

    Loops of products stay as they are, since those fill the registers, and so do loops around others.
    """
    uses = Uses.of(kernel)
    found = {op: sums for op in kernel.ops if op.code is Code.FOR and 0 < len(sums := _sums(op, uses)) <= MOST}
    return _ByLanes(kernel, found).copy() if found else kernel


def _sums(loop: Op, uses: Uses) -> dict[int, Op]:
    """By place, the carries of a loop that are numbers and add up the sum of one tile in each trip."""
    (block,) = loop.blocks
    if any(op.code in CONTROL or op.code is Code.DOT for op in block.ops):
        return {}
    found = {}
    for place, carry in enumerate(block.arguments[1:]):
        last = block.yields[place].producer
        if carry.shape or not carry.is_float or last is None or carry not in last.operands:
            continue
        if last.code not in (Code.ADD, Code.SUB) or not adds_up(uses, loop, place):
            continue
        (term,) = [value for value in last.operands if value is not carry] or [carry]
        total = term.producer
        if total is not None and total in block.ops and _is_sum(total, carry) and uses.count(term) == 1:
            found[place] = total
    return found


def _is_sum(total: Op, carry: Value) -> bool:
    """Whether an operation sums a row of the carry's type."""
    return total.code is Code.SUM and len(total.operands[0].shape) == 1 and total.operands[0].element == carry.element


class _ByLanes(Copier):
    """Copies a kernel, with tiles for the sums of loops."""

    def __init__(self, source: Kernel, sums: Mapping[Op, Mapping[int, Op]]) -> None:
        super().__init__(source)
        self.sums = sums
        self.totals = {total for one in sums.values() for total in one.values()}

    def pure(self, op: Op) -> None:
        """The tile in the place of its sum."""
        if op in self.totals:
            self[op.result] = self.whole(op.operands[0])
        else:
            super().pure(op)

    def loop(self, op: Op) -> None:
        """A FOR."""
        sums = self.sums.get(op)
        if sums is None:
            super().loop(op)
            return
        (block,) = op.blocks
        b = self.b
        starts = [self.whole(value) for value in op.operands[3:]]
        carries = list(starts)
        names = [value.name for value in block.arguments[1:]]
        for place, total in sums.items():
            tile = total.operands[0]
            carries[place] = b.whole(b.const(0.0, tile.element), tile.shape)
            names[place] = f"{names[place] or 'sum'}_lanes"

        def body(index: Value, inner: list[Value]) -> list[Value]:
            self.enter(block.arguments, (index, *inner))
            return self.block(block)

        start, stop, step = self.all(op.operands[:3])
        index_name = block.arguments[0].name
        found = list(b.loop((start, stop, step), carries, body, index_name=index_name, names=names, **op.attributes))
        for place, total in sums.items():
            b.hint = op.results[place].name
            found[place] = b.add(starts[place], b.sum(found[place], total.attributes["axis"]))
        self.results(op, found)
