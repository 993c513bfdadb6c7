"""`staged`: the tiles that a loop of products has under way, where so many as the forward had may not fit.

A forward loads tiles for the steps of its loop, of a few columns each. A backward that owns these columns walks along
another axis, in steps as wide as what the forward owned, and needs shared memory for each of `num_stages` such steps.
With elements of 32 bits that may be more than there is, and the launch fails: the number of stages follows from the
bytes of one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, walk

ROOM = 200 << 10
"""Bytes of shared memory for stages. A program of Hopper has 227 KiB, some of which other tiles take."""
WIDEST = 4
"""Bytes of an element that products take."""


@dataclass(frozen=True)
class Stage:
    """What one trip of a loop of products loads."""

    operand: str
    """Argument of the kernel whose elements are loaded: their bytes matter."""
    tiles: tuple[tuple[int, int], ...]
    """Extents of all that is loaded."""

    def has(self, extent: int) -> bool:
        """Whether a tile that is loaded has an extent."""
        return any(extent in tile for tile in self.tiles)

    def elements(self, names: Mapping[int, str]) -> str:
        """An expression of how many elements these are. `names`: of extents, which may be expressions."""
        texts = {
            extent: name if name.isidentifier() or name.isdecimal() else f"({name})" for extent, name in names.items()
        }
        return " + ".join(" * ".join(texts.get(extent, str(extent)) for extent in tile) for tile in self.tiles)


def staged(kernel: Kernel, stages: int, readable: Collection[str]) -> Stage | None:
    """The largest stage of a kernel, if `stages` of them have no room where elements are wide; None where they have.

    `readable`: arguments whose bytes per element the backward can ask for.
    """
    found: list[tuple[int, Stage]] = []
    for loop in kernel.ops:
        if loop.code is not Code.FOR or not any(op.code is Code.DOT for op in loop.blocks[0].ops):
            continue
        loads = [op for op in walk(loop.blocks[0]) if op.code is Code.LOAD and len(op.result.shape) == 2]
        tiles = tuple((op.result.shape[0], op.result.shape[1]) for op in loads)
        operand = next((op.base.name for op in loads if op.base.name in readable), "")
        if operand:
            found.append((sum(map(math.prod, tiles)), Stage(operand, tiles)))
    if not found:
        return None
    elements, largest = max(found, key=lambda one: one[0])
    return largest if stages > 1 and stages * elements * WIDEST > ROOM else None
