"""`replayed`: an adjoint without tapes: what a loop carried at the start of a trip is computed again.

A tile function has no memory to keep it in. For n trips that is n * (n - 1) / 2 trips more.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.tapes import tapes
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant

LARGEST = 256
"""Trips of a loop that may be replayed, where their number is known."""


def replayed(kernel: Kernel) -> Kernel:
    """The same adjoint; nothing changes where it has no tapes.

    Raises CannotDerive for loops of more trips than `LARGEST`, and for those that count down.
    """
    return prune(_Replay(kernel).copy()) if tapes(kernel) else kernel


class _Replay(Copier):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.stored: dict[str, tuple[Op, Value]] = {}
        """Tape -> the loop of the forward that stores it, and what it stores."""
        for op in kernel.ops:
            for block in op.blocks if op.code in (Code.FOR, Code.WHILE) else ():
                for inner in block.ops:
                    if inner.code is Code.TAPE_STORE:
                        self.stored[inner.attributes["tape"]] = (op, inner.operands[0])
        self._index: list[Value] = []
        """Numbers of the trips, or indices, of the loops around."""

    def effect(self, op: Op) -> None:
        """Nothing is kept."""
        if op.code not in (Code.TAPE_STORE, Code.BARRIER):
            super().effect(op)

    def loop(self, op: Op) -> None:
        """A FOR, which starts a trip with what the forward had there."""
        (block,) = op.blocks
        self._index.append(block.arguments[0])
        super().loop(op)
        self._index.pop()

    def repeat(self, op: Op) -> None:
        """A WHILE, in which every carry that its test passes on goes on once."""
        test, go_on = op.blocks
        if not all(value in test.arguments for value in test.yields[1:]):
            super().repeat(op)
            return
        places = [test.arguments.index(value) for value in test.yields[1:]]

        def ask(inner: list[Value]) -> list[Value]:
            for old, new in zip(test.arguments, inner, strict=True):
                self[old] = new
                new.name = old.name or "trips"
            return [self.block(test)[0], *inner]

        def turn(inner: list[Value]) -> list[Value]:
            for old, place in zip(go_on.arguments, places, strict=True):
                self[old] = inner[place]
            self.block(go_on)
            return [self.whole(value) for value in go_on.yields]

        found = self.b.repeat([self.whole(value) for value in op.operands], ask, turn)
        self.results(op, [found[place] for place in places])

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """The operations of a block, after what it takes from tapes."""
        loops = {self.stored[op.attributes["tape"]][0] for op in block.ops if op.code is Code.TAPE_LOAD}
        for forward in loops:
            self._replay(forward, block)
        return super().block(block, kept)

    def pure(self, op: Op) -> None:
        """A TAPE_LOAD has its value by now."""
        if op.code is not Code.TAPE_LOAD:
            super().pure(op)

    def _replay(self, forward: Op, block: Block) -> None:
        """The forward's loop up to the present trip, and what it carries then for what `block` takes from tapes."""
        index = self[self._index[-1]]
        found = self._for(forward, index) if forward.code is Code.FOR else self._while(forward, index)
        for op in block.ops:
            if op.code is Code.TAPE_LOAD and self.stored[op.attributes["tape"]][0] is forward:
                stored = self.stored[op.attributes["tape"]][1]
                self[op.result] = found[stored] if stored in found else self[stored]

    def _for(self, forward: Op, index: Value) -> dict[Value, Value]:
        (block,) = forward.blocks
        if forward.attributes.get("reverse"):
            raise CannotDerive(
                f"a loop that counts down{block.arguments[0].where} carries what its adjoint needs from every trip",
                remedy="Count up, and compute the index: `i = n - 1 - j`.",
            )
        start, stop, step = (constant(value) for value in forward.operands[:3])
        if start is not None and stop is not None and step is not None and (stop - start) / step > LARGEST:
            raise CannotDerive(
                f"the adjoint of a loop of {(stop - start) // step} trips{block.arguments[0].where} needs what it "
                "carried at each of them, and a tile function has no memory to keep that in",
                remedy="Write it as a scan, or derive the backward of the whole kernel: kernel-agent derive.",
            )

        def body(at: Value, inner: list[Value]) -> list[Value]:
            for old, new in zip(block.arguments, (at, *inner), strict=True):
                self[old] = new
            super(_Replay, self).block(_without_tapes(block))
            return [self.whole(value) for value in block.yields]

        bounds = (self[forward.operands[0]], index, self[forward.operands[2]])
        carries = [self.whole(value) for value in forward.operands[3:]]
        names = [value.name for value in block.arguments[1:]]
        results = self.b.loop(bounds, carries, body, index_name="before", names=names, reverse=False, tape=None)
        return dict(zip(block.arguments[1:], results, strict=True))

    def _while(self, forward: Op, trips: Value) -> dict[Value, Value]:
        test, go_on = forward.blocks

        def body(_: Value, inner: list[Value]) -> list[Value]:
            for old, new in zip(test.arguments, inner, strict=True):
                self[old] = new
            super(_Replay, self).block(test)
            for old, passed in zip(go_on.arguments, test.yields[1:], strict=True):
                self[old] = self[passed]
            super(_Replay, self).block(_without_tapes(go_on))
            return [self.whole(value) for value in go_on.yields]

        carries = [self.whole(value) for value in forward.operands]
        bounds = (self.b.const(0), trips, self.b.const(1))
        names = [value.name for value in test.arguments]
        results = self.b.loop(bounds, carries, body, index_name="before", names=names, reverse=False, tape=None)
        passed = dict(zip(test.arguments, results, strict=True))
        return {value: passed[test.yields[1 + place]] for place, value in enumerate(go_on.arguments)
                if test.yields[1 + place] in passed}  # fmt: skip


def _without_tapes(block: Block) -> Block:
    return Block(block.arguments, [op for op in block.ops if op.code is not Code.TAPE_STORE], block.yields)
