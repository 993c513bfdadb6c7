"""`held`: left operands that all trips of a loop of products share stay in registers, where there is room.

A product on Hopper takes its left operand from registers or from shared memory. Triton takes a tile that was loaded
from shared memory, in every trip anew, where the right operands of all programs of a multiprocessor come from, too.
What a product computed lies in registers as a left operand does, so that the tile times the identity, which is the
tile, is one to all trips. A loop with one sum has room for that; one with two, as attention's for keys and values, gets
slower. Short rows gain by the first product's operand alone: with the others', too, fewer programs share a
multiprocessor, whose work hides what is left to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import NARROW, Kernel, Op, Value, is_setting, walk

NAME, REST = "HELD", "HELD_TOO"
"""Constexprs of the left operand of a loop's first product, and of those of the others."""
SHORT, LONGEST = 64, 128
"""Elements of 16 bits in a row: up to the first the other operands are loaded each time, and beyond the second all are,
since sums and operands are more than the registers."""


@dataclass(frozen=True)
class Held:
    """A kernel that may hold left operands."""

    kernel: Kernel
    settings: Mapping[str, str]
    """Its constexprs, and when each holds what it is of."""


def held(kernel: Kernel) -> Held | None:
    """The kernel with products by the identity before its loops; None where no loop that loads by descriptors has a
    left operand from before it that memory holds in 16 bits, or one has several sums."""
    lefts: dict[Op, Value] = {}
    for loop in kernel.ops:
        if loop.code is not Code.FOR or not any(op.code is Code.LOAD_BLOCK for op in walk(loop.blocks[0])):
            continue
        if sum(value.is_float and len(value.shape) == 2 for value in loop.results) != 1:
            return None
        inner = loop.blocks[0].arguments[0].depth
        for op in loop.blocks[0].ops:
            if op.code is Code.DOT and _is_tile(op.operands[0]) and op.operands[0].depth < inner:
                lefts[op] = op.operands[0]
    if not lefts:
        return None
    first = next(iter(lefts.values()))
    names = {left: kernel.free_name(NAME if left is first else REST) for left in lefts.values()}
    asked: dict[str, dict[str, None]] = {}
    for tile, name in names.items():
        width = kernel.extents.get(tile.shape[1], str(tile.shape[1]))
        least = {} if tile is first else {f"{width} > {SHORT}": None}
        asked.setdefault(name, {}).update({**least, f"{width} <= {LONGEST}": None})
    settings = {name: " and ".join(conditions) for name, conditions in asked.items()}
    return Held(_Holder(kernel, lefts, names).copy(), settings)


def _is_tile(value: Value) -> bool:
    """Whether a value is a matrix as it was loaded."""
    op = value.producer
    return op is not None and op.code is Code.LOAD and len(value.shape) == 2 and value.element in NARROW


class _Holder(Copier):
    """Copies a kernel, with another left operand for some products."""

    def __init__(self, source: Kernel, lefts: Mapping[Op, Value], names: Mapping[Value, str]) -> None:
        """`names`: of the constexprs that say whether a tile is held."""
        super().__init__(source)
        self.lefts = lefts
        self.names = names
        self.b.kernel.constants |= dict.fromkeys(names.values(), True)
        self.stays: dict[Value, Value] = {}

    def load(self, op: Op) -> None:
        """Tiles that are held are so at once."""
        super().load(op)
        if op.result not in self.names:
            return
        b, tile = self.b, self[op.result]
        width = tile.shape[1]
        lanes = b.arange(0, width, self.source.extents.get(width))
        b.hint = "identity"
        one = b.cast(b.compare("eq", b.expand(lanes, 1), b.expand(lanes, 0)), tile.element)
        b.hint = f"{tile.name}_held" if tile.name else ""

        def product() -> tuple[Value, ...]:
            return (b.cast(b.dot(tile, one), tile.element),)

        (self.stays[op.result],) = b.branch(b.setting(self.names[op.result]), product, lambda: (tile,))

    def pure(self, op: Op) -> None:
        """Products of what is held."""
        left = self.lefts.get(op)
        if left is None or self.slicing:
            super().pure(op)
            return
        right = self[op.operands[1]]
        self[op.result] = self.b.dot(self.stays[left], right, op.attributes["precision"], op.result.element)


def _is_ours(condition: Value) -> bool:
    """Whether a branch is one of `held`."""
    return is_setting(condition) and _symbol(condition).startswith(NAME)


def _symbol(setting: Value) -> str:
    assert setting.producer is not None
    return str(setting.producer.attributes["symbol"])


def operands_held(kernel: Kernel, width: int) -> int:
    """How many left operands a kernel of `held` holds where its rows have so many elements."""
    if width > LONGEST:
        return 0
    branches = [op for op in kernel.ops if op.code is Code.IF and _is_ours(op.operands[0])]
    if width <= SHORT:
        branches = [op for op in branches if not _symbol(op.operands[0]).startswith(REST)]
    return sum(op.code is Code.DOT for branch in branches for op in branch.blocks[0].ops)
