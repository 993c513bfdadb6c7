"""`reloaded`: a loop over rows that loads a row again behind its sums, instead of keeping it in registers meanwhile.

A sum over a row is known only when all of the row was read, and what is computed from both the row and the sum comes
after it: the row waits in registers, with all that was made of it. Where it is longer than those, it is spilled to
memory; the row itself still lies in the caches. A constexpr says whether it is loaded again, and whether sums wait for
each other (see `apart`), so that one kernel serves rows of every length.

Sums over the rows stay in registers from the first row to the last, and so does what all rows are multiplied by. Where
these are too many to leave room for a row, the latter is loaded again for each row and each half of its work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from kernel_agent.compiler.schedule.apart import sum_of, waiting_sums
from kernel_agent.compiler.ssa.code import CONTROL, EFFECTS, ELEMENTWISE, REDUCTIONS, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

ROOM = 2
"""Rows that may stay in registers from trip to trip, where one of such length takes a quarter of them."""
FEW = 4
"""Rows, of those in work and those that stay from trip to trip, that fill the registers where one takes a quarter."""
_MOVES = frozenset((Code.CAST, Code.EXPAND, Code.BROADCAST))
CHEAP = ELEMENTWISE | {Code.EXPAND, Code.BROADCAST, Code.FULL}
"""What is computed again from what was loaded again."""


def reloaded(kernel: Kernel, stages: str, name: str, fetch: str = "") -> Kernel | None:
    """The kernel with a new constexpr `name`: whether rows are loaded again behind their sums; the first time they are
    all loaded before the first sum. None where no tile is kept for what comes after the sums, or one is that cannot be
    had again from loads.

    `stages`: the constexpr of the loop over the rows, which holds no loops or branches. `fetch`: another new one,
    whether each row loads what all share; only where `crowding` names some.
    """
    found = _halves(kernel, stages)
    return None if found is None else _Reloaded(kernel, *found, name, fetch).copy()


def crowding(kernel: Kernel, stages: str) -> tuple[str, ...]:
    """Tensors of which a row stays in registers from the first trip of that loop to the last, with so many sums that
    no room is left for the row that is worked on. None where `reloaded` does nothing."""
    found = _halves(kernel, stages)
    return found[1].tensors() if found is not None and found[1].crowded else ()


def streaming(kernel: Kernel, stages: str) -> tuple[str, ...]:
    """Tensors of which a row is read at every trip of that loop, where they, the rows that are worked on and the sums
    are so few that the registers hold one of each however long it is, if nothing else stays there. None where
    `reloaded` does nothing."""
    found = _halves(kernel, stages)
    return found[1].tensors() if found is not None and found[1].few else ()


def _halves(kernel: Kernel, stages: str) -> tuple[Block, _Halves] | None:
    for op in kernel.body.ops:
        if op.code is Code.FOR and op.attributes.get("num_stages") == stages:
            (block,) = op.blocks
            halves = _Halves(kernel, block)
            return (block, halves) if halves.kept else None
    return None


class _Halves:
    """A loop's body in two: what the sums over a row need, and what comes after them."""

    def __init__(self, kernel: Kernel, block: Block) -> None:
        self.early: list[Op] = []
        self.late: list[Op] = []
        self.kept: list[Value] = []
        """Tiles of the first half that the second reads, in order; none where they cannot be had again."""
        self.again: list[Op] = []
        """The operations of the first half that make them from what is loaded, in order."""
        self.lasting: list[Value] = []
        """What was loaded before the loop and takes registers throughout."""
        self.fetched: list[Op] = []
        """The operations that make it, in order."""
        self.crowded = self.few = False
        """Whether it and the sums leave no room for a row; whether registers hold a row of each and nothing else."""
        if any(op.code in CONTROL for op in block.ops):
            return
        written = {op.base for op in kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC)}
        loads = [op for op in block.ops if op.code is Code.LOAD and op.base not in written]
        self.tile: tuple[int, ...] = max((op.result.shape for op in loads), key=prod, default=())
        sums = [op for op in block.ops if op.code in REDUCTIONS and self._is_of_row(op, block)]
        needed = _needed_by(sums)
        needed |= self._beside(sums, needed, block, written)
        self.apart = {op: terms for op, terms in waiting_sums(block).items() if op in sums}
        """Sums that the first half ends with, and that need not wait for its others."""
        made = _made_from(block, self.apart)
        if made & (set(sums) - set(self.apart)):
            self.apart, made = {}, set()
        self.last = [op for op in block.ops if op in needed & made]
        """Those, and what is as small and made of them."""
        needed -= made
        # Rows that are on their way together take the time of one.
        at_once = _needed_by(op for op in loads if op in needed and not _needed_by((op,)) & set(sums))
        loaded = {value for op in at_once if op.code is Code.LOAD for value in op.results}
        at_once |= {op for op in block.ops if op.code is Code.CAST and op.operands[0] in loaded}
        self.early = sorted((op for op in block.ops if op in needed), key=lambda op: op not in at_once)
        self.late = [op for op in block.ops if op not in needed and op not in self.last]
        if any(op.code in EFFECTS or (op.code is Code.LOAD and op.base in written) for op in self.early):
            return
        of_loads: set[Value] = set()
        for op in self.early:
            if op.code is Code.LOAD or of_loads & set(op.operands):
                of_loads.update(value for value in op.results if value.shape == self.tile)
        read = {value for op in self.late for value in op.operands} | set(block.yields)
        self.small = [value for op in self.last for value in op.results if value in read]
        self.lasting, self.fetched = _lasting(block, self.tile, written)
        held = len(self.lasting) + sum(value.shape[-1:] == self.tile[-1:] for value in block.arguments[1:])
        self.crowded = held > ROOM
        self.few = held + sum(op.result.shape == self.tile for op in loads) <= FEW
        kept = [value for op in self.early for value in op.results if value in read & of_loads]
        again = {value.producer for value in _made_of(kept, of_loads)}
        if all(op is not None and (op.code is Code.LOAD or op.code in CHEAP) for op in again):
            self.kept = kept
            self.again = [op for op in self.early if op in again]

    def tensors(self) -> tuple[str, ...]:
        """What the lasting rows are loaded from."""
        return tuple(dict.fromkeys(op.base.name for op in self.fetched if op.code is Code.LOAD))

    def _beside(self, sums: Sequence[Op], needed: set[Op], block: Block, written: Collection[Value]) -> set[Op]:
        """What is no larger than the sums and made of them, of loads and of what they need: it need not wait."""
        largest = max((prod(op.result.shape) for op in sums), default=0)
        waiting = {value for op in block.ops if op not in needed for value in op.results}
        found = set()
        for op in block.ops:
            plain = op.code in CHEAP or (op.code is Code.LOAD and op.base not in written)
            small = plain and prod(op.result.shape) <= largest
            if small and not any(value in waiting or value.shape == self.tile for value in op.operands):
                found.add(op)
                waiting.discard(op.result)
        return found

    def _is_of_row(self, total: Op, block: Block) -> bool:
        """Whether a sum of a tile goes into a tile again: others sum over rows."""
        if total.operands[0].shape != self.tile:
            return False
        changed = {total.result}
        for op in block.ops:
            if changed & set(op.operands):
                changed.update(op.results)
        return any(value.shape == self.tile for value in changed)


def _lasting(block: Block, tile: tuple[int, ...], written: Collection[Value]) -> tuple[list[Value], list[Op]]:
    """Rows that a loop reads and that were loaded before it, with the operations that make them."""
    values: list[Value] = []
    ops: dict[Op, None] = {}
    for value in captured([block]):
        chain: list[Op] = []
        op = value.producer
        while op is not None and op.code in _MOVES:
            chain.append(op)
            op = op.operands[0].producer
        if op is not None and op.code is Code.LOAD and value.shape[-1:] == tile[-1:] and op.base not in written:
            values.append(value)
            ops |= dict.fromkeys([op, *reversed(chain)])
    return values, list(ops)


def _made_of(values: Iterable[Value], among: Collection[Value]) -> set[Value]:
    """Values and what they are made of, as far as it is `among` some."""
    found: set[Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in among and value not in found:
            found.add(value)
            pending += value.producer.operands if value.producer is not None else ()
    return found


def _made_from(block: Block, ops: Collection[Op]) -> set[Op]:
    """Operations of a block that some are, or depend on."""
    found = set(ops)
    for op in block.ops:
        if any(value.producer in found for value in op.operands):
            found.add(op)
    return found


def _needed_by(ops: Iterable[Op]) -> set[Op]:
    """Operations and all that they depend on."""
    found: set[Op] = set()
    pending = list(ops)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            read = (*op.operands, *captured(op.blocks))
            pending += [value.producer for value in read if value.producer is not None]
    return found


class _Reloaded(Copier):
    """Copies a kernel, with a branch between the halves of its loop."""

    def __init__(self, source: Kernel, body: Block, halves: _Halves, name: str, fetch: str) -> None:
        super().__init__(source)
        self.body = body
        self.halves = halves
        self.name = name
        self.fetch = fetch
        self.lasting = halves.lasting if fetch else []
        self.anew = self.lasting if halves.crowded else []
        """Of them, what is loaded again with the rows."""
        self.b.kernel.constants |= dict.fromkeys((name, fetch) if self.lasting else (name,), True)

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """The loop's body by halves."""
        if block is not self.body:
            return super().block(block, kept)
        if self.lasting:
            self.b.hint = ""
            found = self.b.branch(self.b.setting(self.fetch), lambda: self._fetched({}), lambda: self.all(self.lasting))
            for old, new in zip(self.lasting, found, strict=True):
                self[old] = new
        for op in self.halves.early:
            self.op(op)
        held = [*self.halves.small, *self.halves.kept, *self.anew]
        self.b.hint = ""
        found = self.b.branch(self.b.setting(self.name), self._anew, self._held)
        for old, new in zip(held, found, strict=True):
            self[old] = new
        for op in self.halves.late:
            self.op(op)
        return self.all(block.yields if kept is None else [block.yields[place] for place in kept])

    def _held(self) -> Sequence[Value]:
        """The sums that wait, and what is kept."""
        for op in self.halves.last:
            super().op(op)
        return self.all([*self.halves.small, *self.halves.kept, *self.anew])

    def _fetched(self, hints: Mapping[str, Any]) -> Sequence[Value]:
        """What all rows share, from memory."""
        for op in self.halves.fetched:
            if op.code is Code.LOAD:
                self._load_again(op, **hints)
            else:
                super().op(op)
        return self.all(self.lasting)

    def _load_again(self, op: Op, **hints: Any) -> None:
        rest = [self[value] for value in op.operands[1:]]
        mask = rest[0] if op.mask is not None else None
        other = rest[1] if op.other is not None else None
        self[op.result] = self.b.load(op.base, self[op.offset], mask, other, op.result.name, again=True, **hints)

    def _anew(self) -> Sequence[Value]:
        """Those sums without waiting; and what is kept once more from memory, which nobody reads after that."""
        for op in self.halves.last:
            if op in self.halves.apart:
                self[op.result] = sum_of(self, op, self.halves.apart[op])
            else:
                super().op(op)
        # Two loads alike, with no store between them, Triton would make one of, and hold what it loads.
        lasting = self._fetched({"eviction_policy": "evict_last"}) if self.anew else ()
        for op in self.halves.again:
            if op.code is Code.LOAD:
                self._load_again(op, eviction_policy="evict_first")
            else:
                super().op(op)
        return [*self.all([*self.halves.small, *self.halves.kept]), *lasting]
