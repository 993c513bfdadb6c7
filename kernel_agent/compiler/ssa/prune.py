"""`prune`: a kernel without what nobody reads: values, carries, tapes, loops and branches that have neither result nor
effect."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


def prune(kernel: Kernel) -> Kernel:
    """The same kernel for whoever looks at memory: itself where there is nothing to drop. Arguments stay, used or not.

    A carry that stays what it was is replaced by what it was, and what both sides of a branch yield by that. A tape is
    kept where it is loaded. A loop that may not end is dropped like any other.
    """
    size = _size(kernel)
    life = _Life(kernel)
    while not life.is_whole(kernel):
        kernel = _Pruner(kernel, life).copy()
        before, size = size, _size(kernel)
        if size == before:
            return kernel
        life = _Life(kernel)
    return kernel


def _size(kernel: Kernel) -> int:
    return sum(1 + len(op.results) for op in kernel.ops)


class _Life:
    """What effects of a kernel depend on."""

    def __init__(self, kernel: Kernel) -> None:
        self.values: set[Value] = set()
        self.ops: set[Op] = set()
        self._around: dict[Op, Op] = {}
        """The operation whose block an operation is in."""
        self._argument_of: dict[Value, tuple[Op, int]] = {}
        """Whose block's argument a value is, and which."""
        self._stores: dict[str, list[Op]] = {}
        """Of each tape."""
        self._pending: list[Value | Op] = []
        self._find(kernel.body, None)
        while self._pending:
            found = self._pending.pop()
            if isinstance(found, Op):
                self._op(found)
            else:
                self._value(found)

    def is_whole(self, kernel: Kernel) -> bool:
        """Whether all of a kernel is needed: no operation, carry or result of a branch goes."""
        return all(
            (op in self.ops or op.code is Code.BARRIER)
            and (op.code not in (Code.FOR, Code.IF) or len(self.kept(op)) == len(op.results))
            for op in kernel.ops
        )

    def kept(self, op: Op) -> list[int]:
        """Which results of a FOR or an IF somebody reads, and are not what they were without it."""
        known = _stays if op.code is Code.FOR else _agree
        return [place for place, result in enumerate(op.results) if result in self.values and not known(op, place)]

    def _find(self, block: Block, around: Op | None) -> None:
        """Note where things are. What has an effect lives, and with it what it is nested in; a barrier does not."""
        for op in block.ops:
            if around is not None:
                self._around[op] = around
            if op.code is Code.TAPE_STORE:
                self._stores.setdefault(op.attributes["tape"], []).append(op)
            elif op.code in EFFECTS and (op.code is not Code.BARRIER or around is None):
                self._pending.append(op)
            for inner in op.blocks:
                self._argument_of.update({value: (op, place) for place, value in enumerate(inner.arguments)})
                self._find(inner, op)

    def _op(self, op: Op) -> None:
        if op in self.ops:
            return
        self.ops.add(op)
        if op in self._around:
            self._pending.append(self._around[op])
        if op.code is Code.FOR:
            self._pending.extend(op.operands[:3])
            return
        self._pending.extend(op.operands)
        if op.code is Code.TAPE_LOAD:
            self._pending.extend(self._stores.get(op.attributes["tape"], ()))
        elif op.code is not Code.IF:
            for block in op.blocks:  # of a WHILE all carries live, of a REDUCE or SCAN the whole combine
                self._pending.extend(block.yields)

    def _value(self, value: Value) -> None:
        if value in self.values:
            return
        self.values.add(value)
        if value.producer is None:
            if value in self._argument_of:
                around, place = self._argument_of[value]
                if around.code is Code.FOR and place > 0:
                    self._pending.append(around.results[place - 1])
            return
        op = value.producer
        place = op.results.index(value)
        if op.code is Code.FOR and _stays(op, place):
            self._pending.append(op.operands[3 + place])
            return
        if op.code is Code.IF and _agree(op, place):
            self._pending.append(op.blocks[0].yields[place])
            return
        self._pending.append(op)
        if op.code is Code.FOR:
            self._carry(op, place)
        elif op.code is Code.IF:
            self._pending.extend(block.yields[place] for block in op.blocks)

    def _carry(self, op: Op, place: int) -> None:
        """One carry of a FOR: as it starts and as it goes on."""
        self._pending.append(op.operands[3 + place])
        self._pending.append(op.blocks[0].yields[place])


class _Pruner(Copier):
    def __init__(self, kernel: Kernel, life: _Life) -> None:
        super().__init__(kernel)
        self.life = life

    def op(self, op: Op) -> None:
        if op.code is Code.FOR:
            for place, result in enumerate(op.results):
                if result in self.life.values and _stays(op, place):
                    self[result] = self[op.blocks[0].arguments[1 + place]] = self.whole(op.operands[3 + place])
        if op.code is Code.IF:
            for place, result in enumerate(op.results):
                if result in self.life.values and _agree(op, place):
                    self[result] = self[op.blocks[0].yields[place]]
        if op in self.life.ops or op.code is Code.BARRIER:
            super().op(op)

    def kept(self, op: Op) -> Sequence[int]:
        return self.life.kept(op)


def _stays(op: Op, place: int) -> bool:
    """Whether a carry of a FOR is what it was after every trip."""
    (block,) = op.blocks
    return block.yields[place] is block.arguments[1 + place]


def _agree(op: Op, place: int) -> bool:
    """Whether both sides of an IF yield the same value."""
    then, other = op.blocks
    return then.yields[place] is other.yields[place]
