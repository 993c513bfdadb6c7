"""`sunk`: additions of several loops to the same addresses, all done by the last of the loops.

The gradient of a row that three loops read is three additions to it. Once the last loop does them all, they are one,
which may be a plain store; what the earlier loops added is computed there again.
"""

from __future__ import annotations

from kernel_agent.compiler.saved.alike import alike, inside, same_trips
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

_DEAR = CONTROL | {Code.DOT, Code.CUMSUM, Code.SCAN, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE, Code.REDUCE}
"""What is not done twice to save an addition."""


def sunk(kernel: Kernel) -> Kernel:
    """A kernel in which loops over the same trips do not add to the same addresses of one buffer."""
    moves: dict[Op, Op] = {}
    homes: dict[Op, Op] = {}
    blocks = [kernel.body, *(block for op in kernel.ops for block in op.blocks)]
    loaded = {op.base for op in kernel.ops if op.code is Code.LOAD}
    for block in blocks:
        loops = [op for op in block.ops if op.code is Code.FOR]
        homes.update({op: loop for loop in loops for op in loop.blocks[0].ops})
        for number, loop in enumerate(loops):
            for write in _additions(loop.blocks[0]):
                if write.base in loaded:
                    continue
                for later in reversed(loops[number + 1 :]):
                    target = _target(loop, later, write)
                    if target is not None:
                        moves[write] = target
                        break
    return _Sunk(kernel, moves, homes).copy() if moves else kernel


def _additions(block: Block) -> list[Op]:
    return [op for op in block.ops if op.code is Code.ATOMIC_ADD]


def _target(loop: Op, later: Op, write: Op) -> Op | None:
    """The addition of a later loop that goes where `write` of this loop goes, if `write` can be done there."""
    if not same_trips(loop, later) or not _movable(loop, write):
        return None
    stands = {loop.blocks[0].arguments[0]: later.blocks[0].arguments[0]}
    for other in _additions(later.blocks[0]):
        if other.base is write.base and alike(write.offset, other.offset, stands):
            return other
    return None


def _movable(loop: Op, write: Op) -> bool:
    """Whether what is written depends on the loop's index alone, among what the loop changes, and is cheap."""
    own = inside(loop)
    carries = set(loop.blocks[0].arguments[1:])
    seen: set[Value] = set()
    stack = list(write.operands)
    while stack:
        value = stack.pop()
        if value in seen or value not in own:
            continue
        seen.add(value)
        op = value.producer
        if value in carries or (op is None and value is not loop.blocks[0].arguments[0]):
            return False
        if op is not None:
            if op.code in _DEAR or op.code is Code.TAPE_LOAD:
                return False
            stack.extend((*op.operands, *captured(op.blocks)))
    return True


class _Sunk(Copier):
    """Moves additions next to those they meet."""

    def __init__(self, source: Kernel, moves: dict[Op, Op], homes: dict[Op, Op]) -> None:
        super().__init__(source)
        self.moves = moves
        self.homes = homes
        self.guests: dict[Op, list[Op]] = {}
        for write, target in moves.items():
            self.guests.setdefault(target, []).append(write)

    def effect(self, op: Op) -> None:
        if self.slicing:
            super().effect(op)
            return
        for guest in self.guests.get(op, ()):
            mine, other = (self.homes[write].blocks[0].arguments[0] for write in (op, guest))
            self[other] = self[mine]
            self._add(guest)
        if op not in self.moves:
            super().effect(op)

    def _add(self, op: Op) -> None:
        mask = None if op.mask is None else self[op.mask]
        self.b.store(self[op.base], self.whole(op.offset), self[op.stored], mask, Code.ATOMIC_ADD)
