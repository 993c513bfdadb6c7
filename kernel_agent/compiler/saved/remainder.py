"""`with_last_trips`: what is left behind whole tiles, as the last trip of the loop over them.

`for start in range(0, whole, B)` and then `if whole < S`, where whole is `S // B * B`, is a loop over tiles without a
mask and one step with it. Where both do the same but for masks that hold in whole tiles, they are one loop from 0 to
S that does the step. Else the step is a loop of its own from whole to S, which has at most one trip. Either way it is
a turn of an online softmax, and adds to the elements that its index tells: owners can be cut from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, depends, has_effects
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath, is_constant

_SPREADS = (Code.EXPAND, Code.BROADCAST, Code.FULL)


@dataclass(frozen=True)
class Remainder:
    """A branch that runs where a number is not a whole multiple of a step."""

    whole: Value
    """The largest multiple that is not more, which the branch starts at."""
    end: Value
    step: Value
    loop: Op
    """Over whole steps."""
    same: bool
    """The branch does what the loop does, but for masks that hold there."""


def with_last_trips(kernel: Kernel) -> Kernel:
    """The kernel with trips of loops for such branches; the same where it has none."""
    loops = {op.operands[1]: op for op in kernel.ops if op.code is Code.FOR and not op.attributes.get("reverse")}
    uses = Uses.of(kernel)
    found = {op: rest for op in kernel.ops if (rest := _remainder(op, loops, kernel, uses)) is not None}
    return prune(_LastTrips(kernel, found).copy()) if found else kernel


def _remainder(op: Op, loops: Mapping[Value, Op], kernel: Kernel, uses: Uses) -> Remainder | None:
    """A branch without another side behind a loop to the same number; None where it is none."""
    if op.code is not Code.IF or op.blocks[1].ops:
        return None
    test = op.operands[0].producer
    if test is None or test.code is not Code.CMP or test.attributes["predicate"] not in ("lt", "gt"):
        return None
    whole, end = test.operands if test.attributes["predicate"] == "lt" else test.operands[::-1]
    maker, loop = whole.producer, loops.get(whole)
    if loop is None or maker is None or maker.code is not Code.MUL or test.attributes.get("unsigned"):
        return None
    for count, step in (maker.operands, maker.operands[::-1]):
        divided = count.producer
        if divided is not None and divided.code is Code.FLOORDIV and divided.operands == (end, step):
            alike = loop.operands[2] is step and _Alike(loop, op, whole, end).proved(uses, kernel)
            return Remainder(whole, end, step, loop, alike)
    return None


class _Alike:
    """Whether a branch does what a trip of a loop does, but for masks of lanes that are below the end."""

    def __init__(self, loop: Op, branch: Op, whole: Value, end: Value) -> None:
        self.loop, self.branch, self.whole, self.end = loop, branch, whole, end
        index, *carries = loop.blocks[0].arguments
        self._pairs = {(index, whole), *zip(carries, loop.results, strict=True)}

    def proved(self, uses: Uses, kernel: Kernel) -> bool:
        """Both must end in the same values, and nothing else may ask what the loop ended in."""
        loop, (then, other) = self.loop, self.branch.blocks
        if any(has_effects(op) for block in (*loop.blocks, then) for op in block.ops):
            return False
        if tuple(other.yields) != loop.results or not is_constant(loop.operands[0], 0):
            return False
        if any(
            reader not in then.ops for result in loop.results for reader in uses[result] if reader is not self.branch
        ):
            return False
        yielding = [block for op in kernel.ops for block in op.blocks if not set(loop.results).isdisjoint(block.yields)]
        if any(block is not then and block is not other for block in yielding):
            return False
        return all(map(self._match, loop.blocks[0].yields, then.yields))

    def _match(self, trip: Value, step: Value) -> bool:
        """Whether a value of the loop is that of the branch, with the index for the number of whole steps."""
        if (trip, step) in self._pairs:
            return True
        one, other = trip.producer, step.producer
        if trip is step:
            return one is None or not depends(step, {self.whole})
        if other is None:
            return False
        if other.code is Code.SELECT and self._holds(other.operands[0]) and self._match(trip, other.operands[1]):
            return True
        if other.code is Code.AND and any(
            self._holds(mask) and self._match(trip, rest) for mask, rest in (other.operands, other.operands[::-1])
        ):
            return True
        if one is None or one.code is not other.code or one.blocks or other.blocks or trip.shape != step.shape:
            return False
        if one.code is Code.LOAD:
            found = self._loads(one, other)
        else:
            found = one.attributes == other.attributes and len(one.operands) == len(other.operands)
            found = found and all(map(self._match, one.operands, other.operands))
        if found:
            self._pairs.add((trip, step))
        return found

    def _loads(self, one: Op, other: Op) -> bool:
        """Of loads: what masked lanes hold matters where there is a mask in whole tiles."""
        if one.base is not other.base or not self._match(one.offset, other.offset):
            return False
        if one.mask is None:
            return other.mask is None or self._holds(other.mask)
        if other.mask is None or not self._match(one.mask, other.mask):
            return False
        return one.other is other.other or (
            one.other is not None and other.other is not None and self._match(one.other, other.other)
        )

    def _holds(self, mask: Value) -> bool:
        """Whether a mask says no more of a whole tile than that its lanes are below the end."""
        op = beneath(mask, _SPREADS).producer
        if (
            op is None
            or op.code is not Code.CMP
            or op.attributes["predicate"] != "lt"
            or op.operands[1] is not self.end
        ):
            return False
        lanes = beneath(op.operands[0], _SPREADS).producer
        if lanes is None or lanes.code is not Code.ADD or self.whole not in lanes.operands:
            return False
        (row,) = (value.producer for value in lanes.operands if value is not self.whole)
        step = self.loop.operands[2].producer
        return (
            row is not None
            and row.code is Code.ARANGE
            and step is not None
            and row.attributes["start"] == 0
            and row.attributes["end"] == step.attributes.get("value")
            and row.attributes.get("symbol") == step.attributes.get("symbol")
        )


class _LastTrips(Copier):
    """Writes loops for branches."""

    def __init__(self, source: Kernel, found: Mapping[Op, Remainder]) -> None:
        super().__init__(source)
        self.found = found
        self.joined = {rest.loop for rest in found.values() if rest.same}

    def loop(self, op: Op) -> None:
        """A loop over whole tiles comes where its last trip is."""
        if op not in self.joined:
            super().loop(op)

    def branch(self, op: Op) -> None:
        """A branch that is a last trip: what its other side yields is what the loop carries."""
        rest = self.found.get(op)
        if rest is None:
            super().branch(op)
            return
        (then, other), b = op.blocks, self.b
        first, starts = (rest.loop.operands[0], rest.loop.operands[3:]) if rest.same else (rest.whole, other.yields)
        carries = [b.whole(self[old], result.shape) for old, result in zip(starts, op.results, strict=True)]

        def body(index: Value, inner: list[Value]) -> list[Value]:
            trip = _AtIndex(self, rest.whole)
            trip[rest.whole] = index
            for old, new in zip(other.yields, inner, strict=True):
                trip[old] = new
            return trip.block(then)

        bounds = (self[first], self[rest.end], self[rest.step])
        index, *inside = rest.loop.blocks[0].arguments
        names = [value.name for value in inside] if rest.same else [result.name for result in op.results]
        self.results(op, b.loop(bounds, carries, body, index_name=index.name, names=names))


class _AtIndex(Copier):
    """Copies for one trip: index arithmetic of the number that the loop starts at is made of the index."""

    def __init__(self, around: Copier, whole: Value) -> None:
        super().__init__(around.source, around.b)
        self.around = around
        self._moves: dict[Value, bool] = {whole: True}

    def find(self, old: Value) -> Value | None:
        """The copy made for this trip, or that around of what does not move with the index."""
        return super().find(old) or (None if self._moved(old) else self.around.find(old))

    def _moved(self, value: Value) -> bool:
        found = self._moves.get(value)
        if found is None:
            op = value.producer
            made = op is not None and not op.blocks and op.code not in EFFECTS and op.code is not Code.LOAD
            found = not value.is_float and made and op is not None and any(map(self._moved, op.operands))
            self._moves[value] = found
        return found
