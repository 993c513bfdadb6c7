"""`inverted`: a gradient whose rows a list in memory names, as edges of a graph name nodes, summed by owners of rows.

How long the list is, and which part of it a program goes through, memory says as well: no launch could number such
additions by programs and trips. The places of the list number them, since bounds that never fall give each place one
program, and the list itself says which row each adds to: torch sorts it as it lies there, and looks up whose every
8th place is. Whose another one is its owner finds among the bounds of the few programs between two of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import EVERY, Fact, Inverse
from kernel_agent.compiler.schedule.claims import Rising
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.heirs import Heirs, OwnersOfRows, candidates, refuse_crowds
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, moved_atom
from kernel_agent.compiler.schedule.listing import Digit, Numbering
from kernel_agent.compiler.schedule.named import Named
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.segments import Segment, segments
from kernel_agent.compiler.schedule.sites import mask_forms, sites
from kernel_agent.compiler.schedule.starts import Start
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import hints
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, broadcast_shape, constant

_LANEWISE = ELEMENTWISE | {Code.LOAD, Code.CONST, Code.EXPAND, Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.ARANGE}
"""What is the same for a lane of a tile whatever its other lanes are."""
_SPREADS = frozenset((Code.FULL, Code.BROADCAST))


@dataclass(frozen=True)
class Place:
    """A place of a list, which tells the program, the trip and the lane that add to the row that is named there."""

    load: Op
    """Of the row."""
    segment: Segment
    """Of the places of one program."""
    axis: int
    """Of the grid, along which programs have segments one behind the other."""
    loop: Op
    """Over the places of a segment."""
    lanes: int | None
    """Axis of the tile that is added whose lanes are places; None where a trip has one."""

    @property
    def rows(self) -> str:
        """The list, a tensor argument."""
        return self.load.base.name

    def is_in_front(self, forms: Forms, condition: Value, axis: int) -> bool:
        """Whether a condition says that the place lies in front of the end of its segment, and nothing else; `axis`: of
        its lanes there."""
        return mask_forms(forms, condition) == [self.segment.negative.moved(lambda _: axis)]


def inverted(kernel: Kernel, tensor: str, name: str, launch: Launch, *, beside: bool = False) -> Heirs | None:
    """The additions to the gradient `name` of `tensor`, by rows; None where no list of programs' own places names them.
    With `beside`, what is stored at these places is, too: each has one program, whichever that is.

    Raises CannotDerive where they cannot be done place by place, or few programs would have many each.
    """
    for forms, rows in candidates(kernel, name, launch, beside=beside):
        place = _place(forms, rows)
        if place is None or (beside and not _always(forms, rows, place)):
            continue
        texts = {f"{one}.is_contiguous()": one for one in (tensor, place.rows)}
        texts |= dict.fromkeys((*rows.starts.facts, *rows.facts), tensor)
        if not launch.calls.refute(texts):
            bounds = place.segment.bounds
            facts = [Fact(text, f"rows of {name} lie one behind the other", about) for text, about in texts.items()]
            facts.append(Fact(Rising(bounds).text(), f"each place of {place.rows} belongs to one program", bounds))
            return replace(_owners(forms, rows, place, tensor, name), facts=tuple(facts))
    return None


def _owners(forms: Forms, rows: Named, place: Place, tensor: str, name: str) -> Heirs:
    """By rows of a width."""
    count = f"triton.cdiv({tensor}.numel(), {rows.starts.width.text()})"
    refuse_crowds(forms.launch.calls, f"{place.rows}.numel()", count)
    source = forms.kernel
    order = Value("*i64", (), source.free_name(f"{name}_order"))
    begins = Value("*i32", (), source.free_name(f"{name}_begins"))
    programs = Value("*i32", (), source.free_name(f"{name}_programs"))
    owners = _Owners(forms, rows, place, order, begins, programs)
    made = prune(owners.made())
    if sum(op.code is Code.FOR for op in made.ops) > owners.loops:
        raise CannotDerive("what it sums would be computed anew for every row: it comes out of a loop itself")
    grid = [Polynomial.symbol(count, positive=True), *(forms.launch.grid[axis] for axis in owners.axes), *owners.trips]
    launch = replace(forms.launch, grid=tuple(grid), scalars={**forms.launch.scalars, **owners.scalars})
    many = forms.launch.grid[place.axis].text()
    given = (order.name, begins.name, programs.name)
    inverse = Inverse(name, place.rows, place.segment.bounds, many, count, *given)
    return Heirs(made, launch, inverse, ())


def _place(forms: Forms, rows: Named) -> Place | None:
    """Where a list names the row of an addition; None where none does, or its places are not known to have one program
    each that goes through all of them."""
    address = forms.of(rows.site.op.offset)
    starts = [(atom, number) for atom, number in address.terms if rows.starts.has(number)]
    known = {op.result.id: op for op in forms.kernel.ops if op.code is Code.LOAD and op.base not in forms.written}
    load = known.get(starts[0][0].number) if len(starts) == 1 and starts[0][1] == rows.starts.width else None
    if load is None or address.base.terms or rows.site.conditions:
        return None
    lanes = [atom.number for atom in rows.told if atom.kind is Kind.LANE]
    (site,) = (one for one in sites(forms.kernel.body, frozenset((Code.LOAD,))) if one.op is load)
    for segment in segments(forms, site) if not site.conditions else ():
        loop = _loop(forms, site.loops, segment)
        if loop is None or loop not in rows.site.loops or forms.of(load.offset) != segment.place:
            continue
        axes = [atom.number for atom, _ in segment.number.terms if atom.kind is Kind.PROGRAM]
        if len(axes) != 1 or segment.number != Form.of({forms.program(axes[0]): ONE}):
            continue
        found = Place(load, segment, axes[0], loop, lanes[0] if lanes else None)
        told = {forms.program(axes[0]), forms.trip(loop), *(atom for atom, _ in segment.rest.terms)}
        if len(lanes) != len(segment.rest.terms) - 1 or not {_of_list(atom) for atom in rows.told} <= told:
            continue
        inside = [found.is_in_front(forms, part, found.lanes or 0) for part in _parts(rows.site.op)]
        if all(found.is_in_front(forms, part, 0) for part in _parts(load)) and (any(inside) or not lanes):
            return found
    return None


def _always(forms: Forms, rows: Named, place: Place) -> bool:
    """Whether each place adds to a row, and stores what is stored beside that: a row that is none has no owner."""
    asked = all(place.is_in_front(forms, part, place.lanes or 0) for part in rows.asked)
    stores = [op for op in rows.site.block.ops if op.code is Code.STORE]
    axes = [[atom.number for atom in forms.of(op.offset).sources if atom.kind is Kind.LANE] for op in stores]
    return asked and all(
        place.lanes is None or any(place.is_in_front(forms, part, axis) for part in _parts(op) for axis in lanes)
        for op, lanes in zip(stores, axes, strict=True)
    )


def _parts(op: Op) -> list[Value]:
    """Conditions of an access."""
    return [] if op.mask is None else conjuncts(op.mask)


def _loop(forms: Forms, loops: Sequence[Op], segment: Segment) -> Op | None:
    """The loop that goes through a whole segment, each place once, in steps of as many lanes."""
    for loop in loops:
        start, stop, step = (forms.of(value) for value in loop.operands[:3])
        lanes = [atom for atom, _ in segment.rest.terms if atom.kind is Kind.LANE]
        many = lanes[0].extent if lanes else ONE
        counted = Form.of({forms.trip(loop): step.base, **dict.fromkeys(lanes, ONE)})
        whole = start == Form.of({segment.begin: ONE}) and stop == Form.of({segment.end: ONE})
        if loop.code is Code.FOR and whole and len(lanes) < 2 and not step.terms and step.base == many:
            return loop if segment.rest == counted else None
    return None


def _of_list(atom: Atom) -> Atom:
    """An index as seen from the list, which has one axis."""
    return moved_atom(atom, lambda _: 0)


class _Owners(OwnersOfRows):
    """Copies what an addition needs, at a place of the list: where a tile had lanes for places, it is one lane."""

    def __init__(self, forms: Forms, rows: Named, place: Place, order: Value, begins: Value, programs: Value) -> None:
        numbering = Numbering((Digit(place.axis, None, forms.launch.grid[place.axis]),))
        super().__init__(forms, rows, numbering, order, begins, (programs,))
        self.programs = programs
        self.loops += 1
        self.place = place
        self.lanes: dict[Value, int] = {}
        """Values that have one lane of several, with the axis of the tile that has gone, or is 1."""
        self._ranges = _ranges(place.load.offset)
        self._turning = False
        """A place is known: what is copied now is copied for it."""

    def turned(self) -> list[Op]:
        """Loops that are no loops of the owner."""
        return [self.place.loop]

    def before(self) -> None:
        """Where the list of all programs begins."""
        self._first = self.b.cast(self.b.load(self._bounds, self.b.const(0)), "i64")

    @property
    def _bounds(self) -> Value:
        return self.source.argument(self.place.segment.bounds)

    def set(self, number: Value) -> None:
        """The place, and its program."""
        place = self.b.add(self._first, number)
        program = self._program(number, place)
        for op in self.source.ops:
            if op.code is Code.PROGRAM_ID and op.attributes["axis"] == self.place.axis:
                self[op.result] = self.b.cast(program, op.result.element)
            elif op is self.place.load or self._is_place(op):
                self._set(op, self.row if op is self.place.load else place)
            elif op.code is Code.CMP:
                for axis in range(max(1, len(op.result.shape))):
                    if self.place.is_in_front(self.forms, op.result, axis):
                        self._set(op, self.b.const(True, "i1"))
        self._turning = True

    def _program(self, number: Value, place: Value) -> Value:
        """The last program whose places begin at a place or before it, by the two that are known around it."""
        b = self.b
        block = b.elementwise(Code.FLOORDIV, (number, b.const(EVERY, "i64")))
        low, high = (b.load(self.programs, one) for one in (block, b.add(block, b.const(1, "i64"))))
        ahead = b.arange(1, EVERY + 1)
        none = b.const(0, self._bounds.pointee)

        def nearer(first: Value, found: list[Value]) -> list[Value]:
            asked = b.add(first, ahead)
            there = b.compare("le", asked, high)
            begun = b.compare("le", b.cast(b.load(self._bounds, asked, there, none), "i64"), place)
            return [b.add(found[0], b.sum(b.cast(b.logical_and(there, begun), "i32"), 0))]

        (found,) = b.loop((low, high, b.const(EVERY)), [low], nearer, index_name="ahead", names=["program"])
        return found

    def op(self, op: Op) -> None:
        """Lanes that are not places stay, and tiles are spread where they meet those."""
        if not self._turning:
            super().op(op)
        elif op in self._ranges:
            raise CannotDerive("lanes of places are told apart by more than their places")
        elif op.code is Code.SUM:
            self._total(op)
        elif op.code in _SPREADS:
            self[op.result] = self[op.operands[0]]
            self._note(op, op.operands)
        elif op.code in _LANEWISE:
            super().op(op)
            self._note(op, op.operands)
        else:
            raise CannotDerive("what it sums is not computed lane by lane")

    def _set(self, op: Op, known: Value) -> None:
        self[op.result] = known if known.element == "i1" else self.b.cast(known, op.result.element)
        lanes = [atom.number for atom in self.forms.reads(op.result) if atom.kind is Kind.LANE]
        self.lanes |= dict.fromkeys((op.result,), lanes[0]) if lanes else {}

    def _is_place(self, op: Op) -> bool:
        """Whether an operation computes the place, from the lanes of the list and nothing else."""
        if len(op.results) != 1 or op.result.element not in ("i32", "i64"):
            return False
        if op.code in (*_SPREADS, Code.EXPAND, Code.LOAD):
            return False
        form = self.forms.of(op.result).moved(lambda _: 0)
        return form == self.place.segment.place and _ranges(op.result) == self._ranges

    def _note(self, op: Op, operands: Sequence[Value]) -> None:
        """Which axis of a result has one lane. Raises CannotDerive where lanes of several axes meet."""
        axes = {self.lanes[value] for value in operands if value in self.lanes}
        if len(axes) > 1:
            raise CannotDerive("places of a list meet each other")
        for axis in axes:
            self.lanes[op.result] = axis + (op.code is Code.EXPAND and op.attributes["axis"] <= axis)

    def _total(self, op: Op) -> None:
        """A sum over an axis that is whole."""
        (old,), axis = op.operands, op.attributes["axis"]
        new = self[old]
        if len(new.shape) != len(old.shape) or new.shape[axis] != old.shape[axis] or self.lanes.get(old) == axis:
            raise CannotDerive("it sums over places of the list")
        self[op.result] = self.b.sum(new, axis)
        if old in self.lanes:
            self.lanes[op.result] = self.lanes[old] - (axis < self.lanes[old])

    def load(self, op: Op) -> None:
        """A LOAD."""
        asked = {name: self[one] for name, one in (("mask", op.mask), ("other", op.other)) if one is not None}
        if "mask" in asked and constant(asked["mask"]) is True:
            asked = {}
        if op.base in self.written and not op.attributes.get("saved"):
            raise CannotDerive(f"{op.base.name} is read and written by {self.source.name}")
        self[op.result] = self.b.load(self[op.base], self[op.offset], **asked, name=op.result.name, **hints(op))

    def add(self) -> None:
        """What is added at a place. That the place is one of the program's needs no mask."""
        b, op = self.b, self.rows.site.op
        mask = self._mask(op, self.place.lanes)
        start = b.mul(b.cast(self.row, "i64"), b.cast(self.width, "i64"))
        inner = Start(self, self.forms, self.rows.starts).place(op.offset, ONE)
        offset = start if inner is None else b.add(start, b.cast(inner, "i64"))
        shape = tuple(1 if axis == self.place.lanes else extent for axis, extent in enumerate(op.offset.shape))
        value = self._one(op.stored, self.place.lanes)
        for one in (offset, value, *(() if mask is None else (mask,))):
            if broadcast_shape((one.shape, shape)) != shape:
                raise CannotDerive("what it adds has lanes for places of the list")
        b.store(self[op.base], b.whole(offset, shape), value, mask, Code.ATOMIC_ADD)
        for beside in self.rows.site.block.ops:
            if beside.code is Code.STORE:
                self._store(beside)

    def _store(self, op: Op) -> None:
        """What is stored at a place."""
        offset, axis = self[op.offset], self.lanes.get(op.offset)
        if axis is None and self.place.lanes is not None:
            raise CannotDerive("what it stores is not told apart by places of the list")
        mask, value = self._mask(op, axis), self._one(op.stored, axis)
        shape = tuple(1 if at == axis else extent for at, extent in enumerate(op.offset.shape))
        for one in (offset, value, *(() if mask is None else (mask,))):
            if broadcast_shape((one.shape, shape)) != shape:
                raise CannotDerive("what it stores has lanes for places of the list")
        if math.prod(shape) == 1:
            offset, value = self.b.sum_to(offset, ()), self.b.sum_to(value, ())
            mask = None if mask is None else self.b.sum_to(mask, ())
        else:
            offset = self.b.whole(offset, shape)
        self.b.store(self[op.base], offset, value, mask)

    def _mask(self, op: Op, axis: int | None) -> Value | None:
        """Of an access whose tile has the lanes of places along an axis."""
        found: Value | None = None
        for part in _parts(op):
            if not self.place.is_in_front(self.forms, part, axis or 0):
                one = self._one(part, axis)
                found = one if found is None else self.b.logical_and(found, one)
        return found

    def _one(self, value: Value, axis: int | None) -> Value:
        """What a value is at the place. Raises CannotDerive where lanes of places are those of another axis."""
        found = self[value]
        if self.lanes.get(value, axis) != axis:
            raise CannotDerive("lanes of places are those of another axis")
        return found


def _ranges(value: Value) -> frozenset[Op]:
    """The lanes that an integer is computed from."""
    op = value.producer
    if op is None or op.code is Code.LOAD:
        return frozenset()
    if op.code is Code.ARANGE:
        return frozenset((op,))
    return frozenset(one for operand in op.operands for one in _ranges(operand))
