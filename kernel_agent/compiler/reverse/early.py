"""`early`: what needs a carry of the forward, but no cotangent of a later trip, is added on the way forward.

The adjoint of a recurrence runs its forward again with a tape of what it carries, and goes back over it. Of linear
attention, dq needs the state of its own trip alone, dk and dv need the state's cotangent alone: with dq added by the
loop that has the state in registers, nothing reads the tape, and there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.tapes import tapes
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

FREED = "freed"
"""Attribute of an addition: elements that each trip around it does not keep on a tape any more."""


def early(adjoint: Adjoint) -> Adjoint:
    """The same gradients with fewer tapes; the adjoint as it is where no tape goes."""
    if not adjoint.tapes or adjoint.consumed:
        return adjoint
    moves = _Moves(adjoint.kernel)
    if not moves.of:
        return adjoint
    left = {tape.name for tape in tapes(prune(_Mover(adjoint.kernel, moves, 0).copy()))}
    freed = sum(math.prod(tape.shape) for tape in adjoint.tapes if tape.name not in left)
    if not freed:
        return adjoint
    kernel = prune(_Mover(adjoint.kernel, moves, freed).copy())
    return replace(adjoint, kernel=kernel, tapes=tapes(kernel))


class _Moves:
    """Additions of loops that go back, by the loop that goes forward over the same trips."""

    def __init__(self, kernel: Kernel) -> None:
        self.written = written_to(kernel.body)
        self.of: dict[Op, tuple[Op, list[Op]]] = {}
        """Loop that stores tapes -> the loop that loads them, and what of that is done in the first one."""
        self._block(kernel.body, set(kernel.arguments))

    def _block(self, block: Block, known: set[Value]) -> None:
        """`known`: values of blocks around."""
        here = known | set(block.arguments)
        seen: dict[Op, set[Value]] = {}
        for op in block.ops:
            if op.code is Code.FOR:
                self._loop(op, seen)
                seen[op] = set(here)
            for inner in op.blocks:
                self._block(inner, here)
            here |= set(op.results)

    def _loop(self, back: Op, seen: dict[Op, set[Value]]) -> None:
        """Pair a loop with one of those before it, of which is known what they have in sight."""
        (block,) = back.blocks
        wanted = {op.attributes["tape"] for op in block.ops if op.code is Code.TAPE_LOAD}
        for forth, known in seen.items():
            kept = {op.attributes["tape"] for op in forth.blocks[0].ops if op.code is Code.TAPE_STORE} & wanted
            if not kept or forth.attributes["tape"] != back.attributes["tape"] or forth in self.of:
                continue
            found = [op for op in block.ops if op.code is Code.ATOMIC_ADD and self._is_early(op, back, kept, known)]
            if found:
                self.of[forth] = (back, found)

    def _is_early(self, addition: Op, back: Op, kept: set[str], known: set[Value]) -> bool:
        """Whether an addition needs a tape, and nothing that the loop before does not have or cannot compute."""
        (block,) = back.blocks
        taped, seen, pending = False, set[Value](), list(addition.operands)
        while pending:
            value = pending.pop()
            op = value.producer
            if value in seen or value in known or value is block.arguments[0]:
                continue
            seen.add(value)
            if op is None:
                return False
            if op.code is Code.TAPE_LOAD:
                if op not in block.ops or op.attributes["tape"] not in kept:
                    return False
                taped = True
                continue
            changed = op.code is Code.LOAD and op.base in self.written
            if changed or op.blocks or op.code in EFFECTS:
                return False
            pending += op.operands
        return taped


class _Mover(Copier):
    """Copies additions to where the carries are that their tapes keep."""

    def __init__(self, source: Kernel, moves: _Moves, freed: int) -> None:
        """`freed`: see `FREED`."""
        super().__init__(source)
        self.freed = freed
        self.left = {op for back, _ in moves.of.values() for op in back.blocks[0].ops if op.code is Code.ATOMIC_ADD}
        self.moves = {forth.blocks[0]: (back, found) for forth, (back, found) in moves.of.items()}
        self.moved = {op for _, found in moves.of.values() for op in found}

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """A block; behind a trip that goes forward, what is moved there."""
        yields = super().block(block, kept)
        if block in self.moves:
            back, found = self.moves[block]
            (other,) = back.blocks
            self[other.arguments[0]] = self[block.arguments[0]]
            carries = {op.attributes["tape"]: op.operands[0] for op in block.ops if op.code is Code.TAPE_STORE}
            for op in other.ops:
                if op.code is Code.TAPE_LOAD and op.attributes["tape"] in carries:
                    self[op.result] = self[carries[op.attributes["tape"]]]
            for op in found:
                self._add(op)
        return yields

    def _add(self, op: Op) -> None:
        """An addition of a loop that has fewer tapes."""
        super().effect(Op(op.code, op.operands, (), {**op.attributes, FREED: self.freed}))

    def effect(self, op: Op) -> None:
        """What is moved is not done where it was."""
        if op in self.moved:
            return
        if op in self.left and not self.slicing:
            self._add(op)
        else:
            super().effect(op)
