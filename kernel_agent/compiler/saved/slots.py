"""`slots_of`: what each trip of a loop put into a lane of its own of a tile, which the forward stored behind the loop.

The largest k numbers of a row are found one after the other, each without those before it. What trip i found stands in
lane i of the tile that the loop ends with: with that in memory, no trip of the adjoint has to know what was left. Where
the source unrolls the trips, a choice for each lane takes the place of the loop, and a row of a tile that of the tile
(see `columns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kernel_agent.compiler.saved.columns import column_claims, columns_of, rest_outside
from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim, open_claims
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.sites import loop_forms, mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant, unspread


@dataclass(frozen=True)
class Slot:
    """A lane of a tile that one trip sets."""

    value: Value
    """What it sets it to: a scalar, or a number for each row."""
    tile: Value
    """What the loop ends with."""
    lanes: Value
    """The numbers of the lanes, of which the trip's is the index."""
    index: Value
    axis: int = 0
    """Of the lanes."""
    facts: tuple[str, ...] = ()
    """Python over names of the launch: every trip has a lane."""


def slots_of(kernel: Kernel, stores: Iterable[tuple[Value, Op]], calls: Calls | None) -> Iterator[Slot]:
    """The slots of tiles that are stored; with each tile its store. `calls`: launches that were seen."""
    forms: Forms | None = None
    lanes: Lanes | None = None
    for tile, store in stores:
        loop = tile.producer
        if loop is not None and loop.code is Code.SELECT:
            forms, lanes = forms or Forms(kernel, Launch.like_forward(3)), lanes or Lanes(kernel)
            yield from _unrolled(forms, lanes, tile, store, calls or Calls())
            continue
        if loop is None or loop.code is not Code.FOR or loop.attributes["reverse"] or len(tile.shape) != 1:
            continue
        forms = forms or Forms(kernel, Launch.like_forward(3))
        found = _slot(loop, tile)
        facts = None if found is None else _facts(forms, found, loop, store, calls or Calls())
        if found is not None and facts is not None:
            yield Slot(found.value, tile, found.lanes, found.index, facts=facts)


def _unrolled(forms: Forms, lanes: Lanes, tile: Value, store: Op, calls: Calls) -> Iterator[Slot]:
    """The slots of a tile that choices set."""
    found = columns_of(forms, tile)
    block = next((block for block in _blocks(lanes.kernel.body) if store in block.ops), None)
    if found is None or block is None:
        return
    for one in found.set:
        claims = column_claims(forms, lanes, found, one, store.mask)
        if one.value is None or claims is None or one.value.producer not in block.ops:
            continue
        facts = tuple(claim.text() for claim in claims)
        if not facts or calls.show(facts):
            yield Slot(one.value, tile, one.lanes, one.index, found.axis, facts)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for op in block.ops:
        for inner in op.blocks:
            yield from _blocks(inner)


def _slot(loop: Op, tile: Value) -> Slot | None:
    """What a loop sets in the lane of the trip's index."""
    (block,) = loop.blocks
    place, index = loop.results.index(tile), block.arguments[0]
    choice = block.yields[place].producer
    if choice is None or choice.code is not Code.SELECT or choice.operands[2] is not block.arguments[1 + place]:
        return None
    test, value = choice.operands[0].producer, unspread(choice.operands[1])
    if test is None or test.code is not Code.CMP or test.attributes["predicate"] != "eq" or value.shape:
        return None
    for lanes, other in (test.operands, test.operands[::-1]):
        maker = lanes.producer
        if unspread(other) is index and maker is not None and maker.code is Code.ARANGE and lanes.shape == tile.shape:
            return Slot(value, tile, lanes, index)
    return None


def _facts(forms: Forms, slot: Slot, loop: Op, store: Op, calls: Calls) -> tuple[str, ...] | None:
    """What has to hold for every trip to have a lane, and for that to be stored; None where it is not known."""
    if not _all_within(forms, slot, loop, store.mask):
        return None
    lanes, first = forms.of(slot.lanes), forms.of(slot.index) - Form(base=forms.of(slot.lanes).base)
    ((lane, _),) = lanes.terms
    stop = forms.of(loop.operands[1]).invariant
    if lane.extent is None or stop is None or not first.not_negative:
        return None
    claims = open_claims([Claim(lanes.base + lane.extent, stop)])
    if claims is None:
        return None
    facts = tuple(claim.text() for claim in claims)
    return facts if not facts or calls.show(facts) else None


def _all_within(forms: Forms, slot: Slot, loop: Op, mask: Value | None) -> bool:
    """Whether a mask holds for the lanes of all trips."""
    known, apart = loop_forms(forms, loop), forms.of(slot.index) - forms.of(slot.lanes)
    parts = [] if mask is None else mask_forms(forms, mask)
    return all(part is not None and part + apart in known for part in parts)


def is_start_outside(kernel: Kernel, tile: Value, mask: Value, start: float, reader: Value | None = None) -> bool:
    """Whether a tile is what a loop starts with, this number, wherever a mask does not hold: trips set other lanes.
    `reader`: see `vanishes_outside`."""
    loop = tile.producer
    if loop is not None and loop.code is Code.SELECT and reader is not None:
        forms = Forms(kernel, Launch.like_forward(3))
        found = columns_of(forms, tile)
        return (
            found is not None
            and constant(unspread(found.rest)) == start
            and rest_outside(forms, Lanes(kernel), found, mask, reader)
        )
    if loop is None or loop.code is not Code.FOR or len(tile.shape) != 1:
        return False
    slot = _slot(loop, tile)
    begin = constant(unspread(loop.operands[3 + loop.results.index(tile)]))
    return slot is not None and begin == start and _all_within(Forms(kernel, Launch.like_forward(3)), slot, loop, mask)


def picked(copier: Copier, slot: Slot, tile: Value) -> Value:
    """What a trip set its lane to, from the tile that the loop ended with."""
    b = copier.b
    own = b.compare("eq", copier[slot.lanes], copier[slot.index])
    found = b.sum(b.select(own, tile, b.zero(tile)), slot.axis)
    return b.expand(found, slot.axis) if len(slot.value.shape) == len(slot.tile.shape) else found
