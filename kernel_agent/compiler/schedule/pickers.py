"""`pickers`: owners of tiles that trips of a loop pick, each of which goes through the trips that picked its tile.

In such a trip the number of the tile is the owner's own: what depends on nothing else is loaded once, and addresses are
those of a tile that programs have in turn, of which `ownership` proves that each is stored to once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Fact, Listing
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.draft import Draft
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.later import owned_in_the_end
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.owner import without
from kernel_agent.compiler.schedule.owners import unowned
from kernel_agent.compiler.schedule.picklist import Picklist, picklist
from kernel_agent.compiler.schedule.picks import Picks, beside, picks
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.regathered import loaded
from kernel_agent.compiler.schedule.settle import settled
from kernel_agent.compiler.schedule.share import loading, shared, storing
from kernel_agent.compiler.schedule.wraps import unwrapped
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied, hints
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


@dataclass(frozen=True)
class Pickers:
    """A kernel that adds to each tile in one program."""

    kernel: Kernel
    launch: Launch
    listing: Listing
    facts: tuple[str, ...]
    """By which rows that trips add to are the tensors'."""


def picked(tidy: Kernel, gradients: Mapping[str, str], launch: Launch) -> Draft:
    """A launch in which owners of tiles sum the gradients that trips pick tiles of, and one of the forward's programs
    for the others. Raises DoesNotApply where no trips pick tiles, CannotDerive where these cannot have owners."""
    mine, refused = _picked(tidy, gradients, launch)
    if not mine:
        raise CannotDerive("; ".join(refused)) if refused else DoesNotApply("no trips pick tiles of a gradient")
    try:
        draft = _drafted(tidy, mine, gradients, launch)
    except CannotDerive as reason:
        raise CannotDerive("; ".join((*refused, not_picked(mine.values(), reason.message)))) from reason
    draft.remarks += refused
    return draft


def not_picked(names: Iterable[str], reason: str) -> str:
    """What those are told who ask why gradients stay atomic whose tiles are picked."""
    return f"`picked tiles of {', '.join(names)}` is not had: {reason}"


def _drafted(tidy: Kernel, mine: Mapping[str, str], gradients: Mapping[str, str], launch: Launch) -> Draft:
    """The launches. `mine`: the gradients whose tiles have owners. Raises CannotDerive."""
    kept = shared(tidy, launch)
    made = pickers(_only(loading(tidy, kept, len(launch.grid)), mine), mine, launch)
    wanted = loaded(made.kernel)
    kept = [one for one in kept if one.pointer.name in wanted]
    draft = Draft()
    draft.partials += [one.buffer for one in kept]
    draft.facts += [fact for one in kept for fact in one.facts]
    main = without(storing(tidy, kept, len(launch.grid)), set(mine.values()))
    if main is not None:
        rest = {tensor: name for tensor, name in gradients.items() if tensor not in mine}
        draft.add(owned_in_the_end(unwrapped(accumulated(main), launch), rest, launch), rest, launch, {})
    texts = {name: extent.text() for name, extent in made.launch.scalars.items()}
    draft.add(owned_in_the_end(unwrapped(made.kernel, made.launch), mine, made.launch), mine, made.launch, texts)
    draft.listings.append(made.listing)
    reason = "rows of a gradient lie one behind the other"
    draft.facts += [Fact(text, reason, text.partition(".")[0]) for text in made.facts]
    return draft


def _picked(tidy: Kernel, gradients: Mapping[str, str], launch: Launch) -> tuple[dict[str, str], list[str]]:
    """The gradients that trips of one loop pick tiles of, and why others that such trips add to are not among them."""
    found: dict[str, str] = {}
    refused: list[str] = []
    for tensor, name in unowned(accumulated(tidy), gradients, launch).items():
        try:
            picks(_only(tidy, {tensor: name}), {tensor: name}, launch)
        except DoesNotApply:
            continue
        except CannotDerive as reason:
            refused.append(not_picked([name], reason.message))
        else:
            found[tensor] = name
    return found, refused


def _only(kernel: Kernel, gradients: Mapping[str, str]) -> Kernel:
    """The kernel with additions to some gradients alone."""
    others = {op.base.name for op in kernel.ops if op.code is Code.ATOMIC_ADD} - set(gradients.values())
    found = without(kernel, others)
    if found is None:
        raise DoesNotApply("no gradient is added to")
    return found


def pickers(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> Pickers:
    """Owners of the tiles of the gradients, where a kernel adds to nothing else. Raises CannotDerive where what
    they add depends on earlier trips."""
    found = picks(kernel, gradients, launch)
    listed = picklist(found, next(iter(gradients.values())))
    copier = _Picker(found, listed)
    made = prune(copier.made())
    if all(op.code is not Code.DOT for op in made.ops):
        raise CannotDerive("its trips sum no products: to list them would take longer than to add what they have")
    grid = (found.count, *(launch.grid[axis] for axis in found.kept))
    around = replace(launch, grid=grid, scalars={**launch.scalars, **copier.scalars})
    return Pickers(merged(prune(settled(made, around))), around, listed.listing, found.facts)


class _Picker(Copier):
    """Copies what additions need, with the number of a tile as the owner's, and programs and trips as a list says."""

    def __init__(self, found: Picks, listed: Picklist) -> None:
        source = found.forms.kernel
        self.found = found
        self.listed = listed
        asked = {op.attributes["axis"] for op in source.ops if op.code is Code.NUM_PROGRAMS}
        self.counts = {
            axis: Value("i32", (), source.free_name(f"num_programs_{axis}")) for axis in sorted({*asked, *found.summed})
        }
        self.rows = Value("i32", (), source.free_name("num_rows"))
        self.inside: Value | None = None
        """Which rows of the tile a trip has, where they are a span."""
        own = [] if found.span is None else [self.rows]
        arguments = [*source.arguments, listed.order, listed.begins, listed.most, *self.counts.values(), *own]
        target = emptied(source, name=f"{source.name}_{listed.listing.gradient}", arguments=arguments)
        super().__init__(source, Builder(target, frozenset(site.op.base for site in found.added)))

    @property
    def scalars(self) -> dict[str, Polynomial]:
        """Arguments that the forward did not have."""
        grid = self.found.forms.launch.grid
        told = {value.name: grid[axis] for axis, value in self.counts.items()}
        told = told if self.found.span is None else {**told, self.rows.name: self.found.rows}
        return {**told, self.listed.most.name: Polynomial.symbol(self.listed.most.name)}

    def made(self) -> Kernel:
        """The kernel."""
        b, found = self.b, self.found
        own = b.program_id(0, "tile")
        self[found.known] = self._known(own)
        row = b.const(0, "i64")
        for place in range(len(found.kept)):
            count = b.num_programs(1 + place)
            row = b.add(b.mul(row, b.cast(count, "i64")), b.cast(b.program_id(1 + place), "i64"))
        row = b.add(b.mul(row, b.cast(b.num_programs(0), "i64")), b.cast(own, "i64"))
        first = b.load(self.listed.begins, row, name="first")
        last = b.load(self.listed.begins, b.add(row, b.const(1, "i64")), name="last")
        places = [self._place(site.op) for site in found.added]
        zeros = [b.whole(b.const(0.0, site.op.stored.element), site.op.offset.shape) for site in found.added]

        def trips() -> tuple[Value, ...]:
            bounds = (first, last, b.const(1))
            return b.loop(bounds, zeros, self._trip, index_name="turn", names=self._names(), certain=True)

        sums = b.branch(b.compare("lt", first, last), trips, lambda: zeros)
        for site, (offset, mask), total in zip(found.added, places, sums, strict=True):
            b.store(self[site.op.base], offset, total, mask, Code.ATOMIC_ADD)
        return b.kernel

    def _known(self, own: Value) -> Value:
        """The number of a tile, or its rows."""
        b, span = self.b, self.found.span
        if span is None:
            return b.cast(own, self.found.number.element)
        (size,) = span.indices.shape
        symbol = self.source.extents.get(size)
        return b.add(b.cast(b.mul(own, b.extent(size)), span.indices.element), b.arange(0, size, symbol))

    def _spread(self, there: Value, axis: int, rank: int) -> Value:
        """A condition on rows, as one on tiles that have them along an axis."""
        for other in range(rank):
            there = there if other == axis else self.b.expand(there, other)
        return there

    def load(self, op: Op) -> None:
        """Of rows that a trip does not have nothing is loaded: there may be no memory."""
        span = self.found.span
        axes = frozenset() if span is None else span.lanes.axes.get(op.offset, frozenset())
        if not axes:
            super().load(op)
            return
        if len(axes) != 1 or self.inside is None:
            raise CannotDerive("what rows add is read from memory by pairs of them")
        b, (axis,), element = self.b, axes, op.result.element
        there = self._spread(self.inside, axis, len(op.offset.shape))
        mask = there if op.mask is None else b.logical_and(self[op.mask], there)
        other = b.const(0.0 if op.result.is_float else 0, element) if op.other is None else self[op.other]
        self[op.result] = b.load(self[op.base], self.whole(op.offset), mask, other, op.result.name, **hints(op))

    def _names(self) -> list[str]:
        return [f"{site.op.base.name}_sum" for site in self.found.added]

    def _place(self, op: Op) -> tuple[Value, Value | None]:
        """Where the owner adds, and the part of the mask that is its own."""
        if not self._is_own(op.offset):
            raise CannotDerive("an address is read from memory, or comes out of a loop")
        mask: Value | None = None
        if self.found.span is not None:
            there = self.b.compare("lt", self[self.found.known], self.rows)
            mask = self._spread(there, self.found.span.axis(op), len(op.offset.shape))
        for part in self._steady(op):
            mask = self[part] if mask is None else self.b.logical_and(mask, self[part])
        return self.whole(op.offset), mask

    def _steady(self, op: Op) -> list[Value]:
        """Parts of a mask that are the same in all trips that pick the tile."""
        return [] if op.mask is None else [part for part in conjuncts(op.mask) if self._is_own(part)]

    def _is_own(self, value: Value) -> bool:
        """Whether all that a value is computed of is known to an owner before its trips, and needs no memory."""
        for part in beside(self.found.known, value):
            op = part.producer
            if op is None and part.id in self.found.forms.loops:
                return False
            if op is not None and (op.blocks or op.code in (Code.LOAD, Code.TAPE_LOAD)):
                return False
            if op is not None and op.code is Code.PROGRAM_ID and op.attributes["axis"] not in self.found.kept:
                return False
        return True

    def _trip(self, turn: Value, sums: list[Value]) -> Sequence[Value]:
        """What one addition adds to the sums."""
        b = self.b
        self._set(b.load(self.listed.order, turn, name="addition"))
        found = []
        for site, total in zip(self.found.added, sums, strict=True):
            part, steady = self[site.op.stored], self._steady(site.op)
            if self.found.span is not None and self.inside is not None:
                there = self._spread(self.inside, self.found.span.axis(site.op), len(site.op.offset.shape))
                part = b.select(there, part, b.zero(part))
            for one in [] if site.op.mask is None else conjuncts(site.op.mask):
                part = part if one in steady else b.select(self[one], part, b.zero(part))
            found.append(b.add(total, part))
        return found

    def _set(self, number: Value) -> None:
        """Programs and the trip of an addition by its number."""
        b, loop, span = self.b, self.found.loop, self.found.span
        if span is not None:
            number = b.elementwise(Code.FLOORDIV, (number, b.const(self.found.met, "i64")))
        trip, number = self._digit(number, self.listed.most)
        for axis in reversed(self.found.summed):
            own, number = self._digit(number, self.counts[axis])
            for op in self.source.ops:
                if op.code is Code.PROGRAM_ID and op.attributes["axis"] == axis:
                    self[op.result] = b.cast(own, op.result.element)
        start, _, step = self.bounds(loop)
        self[loop.blocks[0].arguments[0]] = b.add(start, b.mul(b.cast(trip, start.element), step))
        if span is not None:
            first, rows = self[span.start], self[span.indices]
            end = b.add(first, b.extent(span.indices.shape[0]))
            self.inside = b.logical_and(b.compare("ge", rows, first), b.compare("lt", rows, end))

    def _digit(self, number: Value, extent: Value) -> tuple[Value, Value]:
        """The last digit of a number, and those in front of it."""
        b, size = self.b, self.b.cast(extent, "i64")
        return b.elementwise(Code.REM, (number, size)), b.elementwise(Code.FLOORDIV, (number, size))

    def pure(self, op: Op) -> None:
        """Programs and their numbers."""
        axis = op.attributes.get("axis")
        if op.code is Code.PROGRAM_ID:
            if axis not in self.found.kept:
                raise CannotDerive("which program adds to a tile is only known in its turn")
            self[op.result] = self.b.program_id(1 + self.found.kept.index(axis))
        elif op.code is Code.NUM_PROGRAMS:
            self[op.result] = self.counts[axis]
        else:
            super().pure(op)
