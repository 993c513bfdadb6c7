"""`Places`: which values stand inside the expressions that read them, and where in the text every value is read.

Places are numbers in the order of the text: an operation has one, the end of a block has one, after all in it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from kernel_agent.compiler.ssa.code import CONTROL, EFFECTS, ELEMENTWISE, MEMORY, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant

LARGEST = 5
"""Operations in an expression that is not given a name of its own."""
_DEAR = {
    Code.LOAD: LARGEST,
    Code.DESCRIPTOR: LARGEST + 1,
    Code.BLOCK_POINTER: LARGEST + 1,
    Code.LOAD_BLOCK: LARGEST + 1,
    Code.DOT: 3,
    Code.SUM: 2,
    Code.REDUCE_MAX: 2,
    Code.REDUCE_MIN: 2,
    Code.CUMSUM: 3,
    Code.CALL: 2,
}
_TOTALS = frozenset((Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN))
_STATEMENTS = frozenset((Code.SPLIT, Code.REDUCE, Code.SCAN, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE))
"""Never inside an expression."""


@dataclass(frozen=True)
class Use:
    """A value is read: by an operation, or by the end of a block that yields it."""

    op: Op | None
    block: Block
    """Where the operation stands, or the block that ends."""
    place: int


class Places:
    """The text of a kernel, in order."""

    def __init__(self, kernel: Kernel, forced: Collection[Value] = ()) -> None:
        """`forced`: values that get a name of their own however small they are."""
        self.at: dict[Op, int] = {}
        self.end: dict[Block, int] = {}
        self.block_of: dict[Value, Block] = {}
        self.owner: dict[Block, tuple[Op, Block]] = {}
        """Block -> the operation it belongs to, and the block that stands in."""
        self.uses: dict[Value, list[Use]] = defaultdict(list)
        self.order: list[Op] = []
        self._control: dict[Block, list[Op]] = defaultdict(list)
        """Loops and branches that stand in a block: few of its operations."""
        self._readers: dict[Value, list[Use]] = {}
        self._number(kernel.body)
        self.needed = self._needed()
        self._stepped = {op.result for op in self.order if op.code is Code.ADD and self._steps(op)}
        self._once, self._repeated = self._counted()
        self._decide(frozenset(forced))

    def forcing(self, forced: Collection[Value]) -> Places:
        """The same text, where these values get a name of their own: what is asked anew when lines turn out to be too
        long."""
        found = copy.copy(self)
        found._decide(frozenset(forced))
        return found

    # --- numbering

    def _number(self, block: Block) -> None:
        for value in block.arguments:
            self.block_of[value] = block
        for op in block.ops:
            self.at[op] = len(self.at) + len(self.end)
            self.order.append(op)
            for value in op.results:
                self.block_of[value] = block
            for value in op.operands:
                self.uses[value].append(Use(op, block, self.at[op]))
            if op.code in CONTROL:
                self._control[block].append(op)
            for inner in op.blocks if op.code in CONTROL else ():
                self.owner[inner] = (op, block)
                self._number(inner)
        self.end[block] = len(self.at) + len(self.end)
        for value in block.yields:
            self.uses[value].append(Use(None, block, self.end[block]))

    def _needed(self) -> set[Op]:
        """Operations whose results someone reads in the end, and those with effects."""
        needed: set[Op] = set()
        for op in reversed(self.order):
            kept = not op.results or op.code in CONTROL
            if kept or any(self._live(value, needed) for value in op.results):
                needed.add(op)
        return needed

    def _live(self, value: Value, needed: set[Op]) -> bool:
        return any(use.op is None or use.op in needed for use in self.uses[value])

    def readers(self, value: Value) -> list[Use]:
        """Who reads a value, but for what is not printed."""
        if value not in self._readers:
            self._readers[value] = [use for use in self.uses[value] if use.op is None or use.op in self.needed]
        return self._readers[value]

    def origin(self, value: Value) -> Value:
        """What a carry is in the first trip of all loops around."""
        while value.producer is None and value in self.block_of:
            block = self.block_of[value]
            op, _ = self.owner[block]
            place = block.arguments.index(value)
            if op.code is Code.FOR and place == 0:
                break
            value = op.operands[place + 2] if op.code is Code.FOR else op.operands[place]
        return value

    # --- what stands inside expressions

    def free(self, value: Value) -> bool:
        """Whether a value is so small that it may be printed wherever it is read."""
        op = value.producer
        if op is None:
            return False
        if op.code is Code.FULL:
            return constant(op.operands[0]) is not None
        if op.code is Code.NEG:
            return op.operands[0].producer is None and op.operands[0] not in self.block_of
        return op.code in (Code.CONST, Code.EXPAND) or value in self._stepped

    def _steps(self, total: Op) -> bool:
        """Whether a sum is where a row in flight begins, in 64 bits, and where in it something lies, in 32, and only
        pointers are moved by it: they take one step after the other then. As a tile of offsets of 64 bits it held two
        registers of each lane, and rows of 16,384 elements were spilled."""
        result, readers = total.result, self.readers(total.result)
        loop = self.owner.get(self.block_of[result])
        if loop is None or "num_stages" not in loop[0].attributes or result.element != "i64":
            return False
        begins = any(one.element == "i64" and prod(one.shape) < prod(result.shape) for one in total.operands)
        within = any(one.element == "i32" for one in total.operands)
        moved = (use.op for use in readers)
        return begins and within and all(op is not None and op.code in MEMORY and op.offset is result for op in moved)

    def loops_around(self, block: Block, outer: Block) -> bool:
        """Whether a loop, or its condition, lies between a block and one around it."""
        while block is not outer:
            op, block = self.owner[block]
            if op.code is not Code.IF:
                return True
        return False

    def _counted(self) -> tuple[set[Value], set[Value]]:
        """Values that are read once, as the text shows, and those read in loops that they stand before."""
        count: dict[Value, int] = defaultdict(int)
        repeated: set[Value] = set()
        spots: dict[Value, set[Block]] = defaultdict(set)
        for op in reversed(self.order):
            for value in op.results:
                for use in self.readers(value):
                    through = use.op.results[0] if use.op is not None and use.op.results else None
                    if use.op is not None and through is not None and self.free(through):
                        count[value] += count[through]
                        spots[value] |= spots[through]
                    else:
                        count[value] += 1
                        spots[value].add(use.block)
                if any(self.loops_around(spot, self.block_of[value]) for spot in spots[value]):
                    repeated.add(value)
        return {value for value, reads in count.items() if reads == 1}, repeated

    def _decide(self, forced: frozenset[Value]) -> None:
        self.inlined: set[Value] = set()
        self.weights: dict[Value, int] = {}
        totals: set[Value] = set()
        for op in self.order:
            weight = _DEAR.get(op.code, 0 if op.code in (Code.CONST, Code.EXPAND, Code.TRANS) else 1)
            weight += sum(self.weights[value] for value in op.operands if value in self.inlined)
            total = op.code in _TOTALS or any(value in totals and value in self.inlined for value in op.operands)
            for value in op.results:
                self.weights[value] = weight
                if total:
                    totals.add(value)
                if self.free(value):
                    self.inlined.add(value)
                elif op in self.needed and value not in forced and value in self._once:
                    once = value not in self._repeated or self._index_work(value, weight)
                    if once and self._fits(op, value, weight) and not (total and self._waits(op, value)):
                        self.inlined.add(value)
        self.read_at: dict[Value, list[int]] = self._read_at()

    def _fits(self, op: Op, value: Value, weight: int) -> bool:
        """Whether a value that is read once needs no name."""
        if op.code in CONTROL or op.code in _STATEMENTS:
            return False
        return self._read_at_once(op) if op.code is Code.LOAD else self._small(value, weight)

    def _index_work(self, value: Value, weight: int) -> bool:
        """Whether a value may stand in a loop that does not change it: the compiler moves it out again."""
        op = value.producer
        assert op is not None
        return op.code in ELEMENTWISE and not value.is_float and not value.name and weight <= 2

    def _read_at_once(self, load: Op) -> bool:
        """Whether a load is only converted, right after it: `tl.load(...).to(tl.float32)`."""
        reader = self.readers(load.result)[0]
        if reader.op is None or reader.op.code is not Code.CAST or reader.block is not self.block_of[load.result]:
            return False
        between = self.order[self.order.index(load) + 1 : self.order.index(reader.op)]
        return not any(op.code in EFFECTS or op.code in CONTROL for op in between)

    def _waits(self, op: Op, value: Value) -> bool:
        """Whether a value is read behind a loop or a branch that follows it: a sum there would keep its tile for it."""
        block = self.block_of[value]
        last = max((use.place for use in self.readers(value) if use.block is block), default=-1)
        return any(self.at[op] < self.at[other] < last for other in self._control.get(block, ()))

    def _small(self, value: Value, weight: int) -> bool:
        """Whether a value that is read once may do without a name."""
        if weight > LARGEST:
            return False
        reader = self.readers(value)[0]
        while reader.op is not None and reader.op.results and self.free(reader.op.results[0]):
            reader = self.readers(reader.op.results[0])[0]
        if reader.op is None:
            return True
        names = {result.name for result in reader.op.results}
        if not value.name or value.name in names or inherited(value):
            return True
        if reader.op.code in (Code.ADD, Code.SUB) and all(use.op is None for use in self.readers(reader.op.result)):
            return value.name.startswith("d_")  # a sum goes on by it
        return value.name.startswith("d_") and weight <= 2

    # --- where everything is read

    def _read_at(self) -> dict[Value, list[int]]:
        found: dict[Value, list[int]] = defaultdict(list)
        for op in reversed(self.order):
            for value in op.results:
                for use in self.readers(value):
                    through = use.op.results[0] if use.op is not None and len(use.op.results) == 1 else None
                    found[value] += found[through] if through in self.inlined and through is not None else [use.place]
        for value in list(self.uses):
            if value.producer is not None or value not in self.block_of:
                continue
            for use in self.readers(value):
                through = use.op.results[0] if use.op is not None and len(use.op.results) == 1 else None
                found[value] += found[through] if through in self.inlined and through is not None else [use.place]
        return found


def inherited(value: Value) -> bool:
    """Whether a value has the name of what it is another form of."""
    op = value.producer
    shaped = (Code.TRANS, Code.RESHAPE, Code.BROADCAST, Code.FULL, Code.CAST)
    return op is not None and op.code in shaped and op.operands[0].name == value.name
