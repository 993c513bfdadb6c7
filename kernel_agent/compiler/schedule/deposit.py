"""`deposited`: kernels of several gradients that load by descriptors store by them, too, where rows are short.

A store by pointers needs an address for every element that a thread holds, and a mask. They are those of a load before
the loop, or are made of what that loop does not change, so that they stay in registers all the while. Without them
three programs of attention's keys and values have room on a processor, where two had: while one computes, others
multiply. Where rows are longer, sums fill the registers anyway, and making a descriptor takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.describe import Described, Matrices, Tile, TileDescriber, asked_of, tile_of
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.ssa.code import CONTROL, EFFECTS, PURE, Code
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import NARROW, Block, Kernel, Op, Value

NAME = "DEPOSITS"
WIDTH = 64
"""Elements of 16 bits in the longest row."""
REGISTERS = 168
"""Of a thread, so that three programs of four warps have room on a processor with 65,536."""


@dataclass(frozen=True)
class Deposited:
    """A kernel that may store by descriptors."""

    described: Described
    """With the name of a constexpr of its own."""
    condition: str
    """When that may be true, where descriptors are."""


def deposited(kernel: Kernel, launch: Launch, tensors: Mapping[str, str]) -> Deposited | None:
    """The kernel with descriptors for the gradients that it stores behind its loops; None where it stores fewer than
    two so.

    `tensors`: by gradient, the argument whose gradient it is: memory for
    it begins, as that of the argument does, where descriptors may, and lies as that lies.
    """
    forms = Forms(kernel, launch)
    tiles: dict[Op, Tile] = {}
    matrices: dict[Matrices, None] = {}
    for op in kernel.body.ops:
        tensor = tensors.get(op.base.name) if op.code is Code.STORE else None
        if tensor is None or op.base.pointee not in NARROW:
            continue
        tile = tile_of(op)
        # What is not stored to must stay as it is: limits are known, or nothing asks.
        if tile is None or tile.limits[0] is None or (tile.limits[1] is None and tile.col):
            continue
        asked = asked_of(forms, tile)
        if asked is not None:
            tiles[op] = tile
            matrices[replace(asked, tensor=tensor)] = None
    widths = {tile.shape[1] for tile in tiles.values()}
    names = {kernel.extents.get(width, "") for width in widths}
    if len(tiles) < 2 or (max(widths) > WIDTH and "" in names):
        return None
    name = kernel.free_name(NAME)
    condition = " and ".join(f"{width} <= {WIDTH}" for width in sorted(names - {""}))
    return Deposited(Described(_Depositor(kernel, tiles, name).copy(), name, tuple(matrices)), condition)


class _Depositor(TileDescriber):
    """Copies a kernel, with a branch around stores that follow each other."""

    def __init__(self, source: Kernel, tiles: Mapping[Op, Tile], name: str) -> None:
        super().__init__(source, tiles, name)
        self.late: set[Op] = set()
        """What one store alone reads: each side of its branch computes it."""
        uses = Uses.of(source)
        for op in reversed(source.body.ops):
            readers = [reader for value in op.results for reader in uses[value]]
            tile = op.code in PURE and any(value.shape for value in op.results)
            if tile and not uses.yielded & set(op.results) and readers and len(set(readers)) == 1:
                self.late |= {op} if readers[0] in self.late or readers[0] in tiles else set()

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """Stores where the last of them is that nothing comes between which may ask for their order; their descriptors
        before the first loop or branch, where what they are made of is known by then."""
        waiting: list[Op] = []
        for op in block.ops:
            if op in self.tiles:
                waiting.append(op)
            if op in self.tiles or op in self.late:
                continue
            if op.code in CONTROL or op.code in EFFECTS or op.code is Code.LOAD:
                self._store(waiting)
                waiting = []
            if op.code in CONTROL and block is self.source.body:
                for access, tile in self.tiles.items():
                    if all(value is None or value in self for value in (*tile.start, *tile.limits, tile.stride)):
                        self.descriptor_of(access)
            self.op(op)
        self._store(waiting)
        return self.all(block.yields if kept is None else [block.yields[place] for place in kept])

    def _store(self, stores: Sequence[Op]) -> None:
        if not stores:
            return
        b = self.b
        descriptors = [self.descriptor_of(op) for op in stores]
        corners = [self.corner(op) for op in stores]

        def by_descriptor() -> Sequence[Value]:
            for op, made, corner in zip(stores, descriptors, corners, strict=True):
                b.store_block(made, self.whole(op.stored), corner)
            return ()

        def by_pointers() -> Sequence[Value]:
            for op in stores:
                self.op(op)
            return ()

        b.branch(b.setting(self.name), by_descriptor, by_pointers)
