"""`oriented`: which products a kernel computes transposed, so that no computed tile has to be turned for the next one.

A tile that a product leaves in registers is the left operand of the next product as it is. As the right operand it goes
through shared memory, and turned it does so in a layout of its own. Tiles from memory lie either way for nothing.
Where keys own their gradients, dV = P' dO and dK = dS' Q both ask for turned scores: then the scores are computed as
K Q', and nothing is turned; a sum that comes out turned is turned once behind its loop.

Tiles that elementwise operations and loops tie together lie alike. Those groups are turned that make it cheapest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant

TURNED, RIGHT, TRIPS = 4, 1, 16
"""What it costs to turn a computed tile, to have one as a right operand, and how often a loop does what is in it."""
REDUCES = frozenset((Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN))
"""What works along either axis for the same."""
_SPREADS = frozenset((Code.EXPAND, Code.FULL, Code.BROADCAST))
MOST_GROUPS = 8
"""Whose orientations are tried together; kernels with more are left as they are."""
SWAP = (1, 0)


@dataclass
class Groups:
    """Computed tiles that must lie alike, or the opposite way, by union and find."""

    parents: dict[Value, Value] = field(default_factory=dict)
    odd: dict[Value, bool] = field(default_factory=dict)
    """Whether a value lies the other way than its parent."""

    def add(self, value: Value) -> None:
        """A group of its own."""
        self.parents.setdefault(value, value)
        self.odd.setdefault(value, False)

    def find(self, value: Value) -> tuple[Value, bool]:
        """What stands for the group of a value, and whether the value lies the other way than that."""
        odd = False
        while self.parents[value] is not value:
            odd ^= self.odd[value]
            value = self.parents[value]
        return value, odd

    def join(self, one: Value, other: Value, *, opposite: bool = False) -> bool:
        """Tie two values. False where they already are tied the other way round."""
        (left, left_odd), (right, right_odd) = self.find(one), self.find(other)
        odd = left_odd ^ right_odd ^ opposite
        if left is right:
            return not odd
        self.parents[right] = left
        self.odd[right] = odd
        return True


def oriented(kernel: Kernel) -> Kernel:
    """The kernel with the products turned that are cheaper so."""
    groups = _groups(kernel)
    if groups is None:
        return kernel
    roots = list(dict.fromkeys(groups.find(value)[0] for value in groups.parents))
    if not 0 < len(roots) <= MOST_GROUPS:
        return kernel
    choices = itertools.chain.from_iterable(itertools.combinations(roots, n) for n in range(len(roots) + 1))
    ways = [_turned(groups, frozenset(chosen)) for chosen in choices]
    best = min(ways, key=lambda turned: (_cost(kernel, groups, turned), len(turned)))
    return Turner(kernel, best).copy() if best else kernel


def _turned(groups: Groups, roots: frozenset[Value]) -> frozenset[Value]:
    """The values that are computed transposed where some groups are turned."""
    found = ((value, *groups.find(value)) for value in groups.parents)
    return frozenset(value for value, root, odd in found if (root in roots) is not odd)


def _groups(kernel: Kernel) -> Groups | None:
    """Tiles of two axes that come of products; None where a tile is asked to lie both ways, or is not followed."""
    groups = Groups()
    computed: set[Value] = set()
    while True:
        before = len(computed)
        for op in kernel.ops:
            _note(op, computed)
        if len(computed) == before:
            break
    for value in computed:
        groups.add(value)
    for op in kernel.ops:
        for one, other, opposite in _ties(op):
            if one in computed and other in computed and not groups.join(one, other, opposite=opposite):
                return None
    return groups


def _note(op: Op, computed: set[Value]) -> None:
    """Add results of an operation that come of products, elementwise and through loops and branches."""
    if op.code is Code.DOT and len(op.result.shape) == 2:
        computed.add(op.result)
    elif op.code in ELEMENTWISE or op.code is Code.TRANS:
        if len(op.result.shape) == 2 and any(
            operand in computed and set(operand.shape) == set(op.result.shape) for operand in op.operands
        ):
            computed.add(op.result)
    elif op.code in (Code.FOR, Code.IF):
        for one, other, _ in _ties(op):
            if (one in computed or other in computed) and len(one.shape) == 2:
                computed |= {
                    value for value in (one, other) if value.producer is None or value.producer.code not in _SPREADS
                }


def _ties(op: Op) -> list[tuple[Value, Value, bool]]:
    """Pairs of values that lie alike, or with True the opposite way."""
    if op.code is Code.TRANS and op.attributes["order"] == SWAP:
        return [(op.result, op.operands[0], True)]
    if op.code in ELEMENTWISE:
        return [(op.result, operand, False) for operand in op.operands if operand.shape == op.result.shape]
    if op.code is Code.FOR:
        (block,) = op.blocks
        inner = block.arguments[1:]
        alike = (inner, block.yields, op.operands[3:])
        return [(one, other, False) for values in alike for one, other in zip(op.results, values, strict=True)]
    if op.code is Code.IF:
        return [(one, other, False) for block in op.blocks for one, other in zip(op.results, block.yields, strict=True)]
    return []


def _cost(kernel: Kernel, groups: Groups, turned: frozenset[Value]) -> int:
    """Of all computed tiles that have to be turned, or are right operands."""
    computed = groups.parents.keys()
    cost = 0
    for op, weight in _weighed(kernel.body, 1):
        if op.code is Code.DOT:
            away = op.result in turned
            left, right = op.operands[::-1] if away else op.operands
            if left in computed:
                cost += weight * TURNED * ((left in turned) is not away)
            if right in computed:
                cost += weight * (TURNED if (right in turned) is not away else RIGHT)
        elif op.code not in ELEMENTWISE | REDUCES | {Code.TRANS, Code.FOR, Code.IF}:
            cost += weight * TURNED * sum(operand in turned for operand in op.operands)
    return cost


def _is_loaded(value: Value) -> bool:
    """Whether a tile is made of one from memory: it is turned as a whole rather than made twice."""
    op = value.producer
    if op is None or not value.is_float or 1 in value.shape:
        return False
    return op.code is Code.LOAD or (op.code in ELEMENTWISE and any(_is_loaded(operand) for operand in op.operands))


def _weighed(block: Block, weight: int) -> Iterator[tuple[Op, int]]:
    """All operations, with how often they are done."""
    for op in block.ops:
        yield op, weight
        for inner in op.blocks:
            yield from _weighed(inner, weight * TRIPS if op.code in (Code.FOR, Code.WHILE) else weight)


class Turner(Copier):
    """Computes some values transposed. Their copies are transposed back, which folds away where it is not needed."""

    def __init__(self, source: Kernel, turned: frozenset[Value]) -> None:
        super().__init__(source)
        self.turned = turned

    def over(self, old: Value) -> Value:
        """The transposed copy of a value. Rows and columns, masks and addresses are made the other way at once."""
        b, op = self.b, old.producer
        if op is None or old in self.turned or op.code not in ELEMENTWISE | _SPREADS or _is_loaded(old):
            return b.trans(self[old], SWAP)
        return self._turned(op)

    def pure(self, op: Op) -> None:
        """Products, what is done with them elementwise, and their sums."""
        b = self.b
        if op.code in REDUCES and op.operands[0] in self.turned:
            tile, axis = self.over(op.operands[0]), 1 - op.attributes["axis"]
            rest = {key: value for key, value in op.attributes.items() if key != "axis"}
            self[op.result] = b.sum(tile, axis) if op.code is Code.SUM else b.reduce(op.code, tile, axis, **rest)
        elif len(op.results) == 1 and op.result in self.turned:
            self[op.result] = b.trans(self._turned(op), SWAP)
        else:
            super().pure(op)

    def _turned(self, op: Op) -> Value:
        """The transposed result of an operation."""
        b, shape = self.b, op.result.shape[::-1]
        if op.code is Code.TRANS:
            return self[op.operands[0]]
        if op.code is Code.DOT:
            left, right = op.operands
            return b.dot(self.over(right), self.over(left), op.attributes["precision"], op.result.element)
        if op.code is Code.EXPAND:
            return b.expand(self[op.operands[0]], 1 - op.attributes["axis"])
        inner = [self.over(operand) for operand in op.operands]
        if op.code in _SPREADS:
            return b.whole(inner[0], shape)
        found = b.again(op, inner)
        assert isinstance(found, Value)
        return b.whole(found, shape) if op.result in self.turned else found

    def loop(self, op: Op) -> None:
        """A FOR whose turned carries stay so."""
        (block,) = op.blocks
        b = self.b

        def body(index: Value, inner: list[Value]) -> list[Value]:
            for old, new in zip(block.arguments, (index, *inner), strict=True):
                self[old] = b.trans(new, SWAP) if old in self.turned else new
                new.source_line = old.source_line
            self.block(block)
            return self._laid(block.yields, op.results)

        carries = self._laid(op.operands[3:], op.results)
        start, stop, step = self.all(op.operands[:3])
        names = [value.name for value in block.arguments]
        found = b.loop((start, stop, step), carries, body, index_name=names[0], names=names[1:], **self.attributes(op))
        self._laid_back(op, found)

    def branch(self, op: Op) -> None:
        """An IF whose turned results stay so."""
        condition = self[op.operands[0]]
        if constant(condition) is not None or self.turned.isdisjoint(op.results):
            super().branch(op)
            return

        def side(block: Block) -> list[Value]:
            self.block(block)
            return self._laid(block.yields, op.results)

        then, other = op.blocks
        self._laid_back(op, self.b.branch(condition, lambda: side(then), lambda: side(other)))

    def _laid(self, olds: Sequence[Value], results: Sequence[Value]) -> list[Value]:
        """Copies of values, turned where the results that they become are."""
        found = []
        for old, result in zip(olds, results, strict=True):
            away = result in self.turned
            shape = old.shape[::-1] if away else old.shape
            found.append(self.b.whole(self.over(old) if away else self[old], shape))
        return found

    def _laid_back(self, op: Op, new: Sequence[Value]) -> None:
        for old, value in zip(op.results, new, strict=True):
            self[old] = self.b.trans(value, SWAP) if old in self.turned else value
