"""`Picklist`: launches that write down which tile each trip of a loop picks, where memory counts the trips.

The first counts what every program does: the most of that is the room that each has in the list which the second
writes. A number that is less than 0 picks what is no tile: the backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from kernel_agent.compiler.plan import Buffer, Counting, Fill, Listing, Step
from kernel_agent.compiler.schedule.picks import Picks
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.programs import program_number
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel, Value, constant


@dataclass(frozen=True)
class Picklist:
    """What the owner of a tile finds its additions by."""

    order: Value
    """Numbers of additions by tiles: of programs along axes that are kept, then along the others, then of trips."""
    begins: Value
    """Where in that order each tile begins."""
    most: Value
    """Trips that a program has room for."""
    listing: Listing


def picklist(found: Picks, name: str) -> Picklist:
    """The launches that list the additions to the gradient `name`. Raises CannotDerive where a number, or how many
    trips there are, is not known before what the kernel computes."""
    source, grid = found.forms.kernel, found.forms.launch.grid
    programs = reduce(Polynomial.__mul__, grid, ONE)
    texts = tuple(extent.text() for extent in grid)
    counts, rows = (Value("*i32", (), source.free_name(f"{name}_{end}")) for end in ("trips", "tiles_picked"))
    most = Value("i32", (), source.free_name(f"{name}_most"))
    tiles = Value("i64", (), source.free_name("num_tiles"))
    counted = _written(found, counts, [], lambda copier: _count(copier, found, counts))
    listed = _written(found, rows, [most, tiles], lambda copier: _list(copier, found, rows, most, tiles))
    scalars = {most.name: most.name, tiles.name: found.count.text()}
    counting = Counting(
        Buffer(counts.name, "i32", Fill.ZEROS, shape=(programs.text(),)), Step(counted, texts), most.name
    )
    order, begins = Value("*i64", (), f"{name}_order"), Value("*i32", (), f"{name}_begins")
    room = programs * Polynomial.symbol(most.name) * Polynomial.integer(found.met)
    held = Buffer(rows.name, "i32", Fill.ZEROS, shape=(room.text(),))
    owned = reduce(Polynomial.__mul__, (grid[axis] for axis in found.kept), found.count)
    listing = Listing(
        name, held, Step(listed, texts, scalars), owned.text(), order.name, begins.name, counting=counting
    )
    return Picklist(order, begins, most, listing)


def _written(found: Picks, buffer: Value, own: Sequence[Value], write: Callable[[Copier], None]) -> Kernel:
    """A kernel that writes to a buffer where the loop runs."""
    source = found.forms.kernel
    made = emptied(source, name=f"{source.name}_{buffer.name}", arguments=[*source.arguments, buffer, *own])
    copier = Copier(source, Builder(made, frozenset((buffer,))))

    def within(conditions: Sequence[tuple[Value, bool]]) -> list[Value]:
        if not conditions:
            write(copier)
            return []
        (condition, holds), *rest = conditions
        sides = (lambda: within(rest), list) if holds else (list, lambda: within(rest))
        copier.b.branch(copier[condition], *sides)
        return []

    within(found.conditions)
    kernel = prune(made)
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    return Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))


def _steps(copier: Copier, length: Value, step: Value) -> Value:
    """How many steps a length has."""
    return length if constant(step) == 1 else copier.b.elementwise(Code.FLOORDIV, (length, step))


def _count(copier: Copier, found: Picks, counts: Value) -> None:
    """How many trips the program makes."""
    b = copier.b
    start, stop, step = copier.all(found.loop.operands[:3])
    length = b.elementwise(Code.MAX, (b.sub(stop, start), b.const(0, start.element)))
    trips = _steps(copier, b.add(length, b.sub(step, b.const(1, step.element))), step)
    b.store(counts, program_number(b, (*found.kept, *found.summed)), b.cast(trips, "i32"))


def _list(copier: Copier, found: Picks, rows: Value, most: Value, tiles: Value) -> None:
    """Which tile each trip picks, from 1 on; 0 is none, and -1 what may be anything."""
    b = copier.b
    start, stop, step = copier.all(found.loop.operands[:3])
    room = b.mul(program_number(b, (*found.kept, *found.summed)), b.cast(most, "i64"))
    first = b.add(b.mul(program_number(b, found.kept), tiles), b.const(1, "i64"))
    none, met = b.const(0, "i64"), b.const(found.met, "i64")
    below = b.const(-1, "i64") if found.signed else none

    def body(index: Value, _: list[Value]) -> list[Value]:
        copier[found.loop.blocks[0].arguments[0]] = index
        trip = b.cast(_steps(copier, b.sub(index, start), step), "i64")
        number = b.cast(copier[found.number], "i64")
        before: Value | None = None
        for place, tile in enumerate(_met(copier, found, number)):
            b.hint = "tile"
            there = b.compare("lt", tile, tiles)
            there = there if before is None else b.logical_and(there, b.compare("ne", tile, before))
            row = b.select(there, b.add(first, tile), none)
            row = b.cast(b.select(b.compare("ge", number, none), row, below), "i32")
            b.hint = ""
            b.store(rows, b.add(b.mul(b.add(room, trip), met), b.const(place, "i64")), row)
            before = tile
        return []

    b.loop((start, stop, step), [], body, index_name=found.loop.blocks[0].arguments[0].name)


def _met(copier: Copier, found: Picks, number: Value) -> list[Value]:
    """Numbers of the tiles that a trip meets."""
    if found.span is None:
        return [number]
    b = copier.b
    (rows,) = found.span.indices.shape
    size = b.cast(b.extent(rows), "i64")
    last = b.add(number, b.sub(size, b.const(1, "i64")))
    return [b.elementwise(Code.FLOORDIV, (row, size)) for row in (number, last)]
