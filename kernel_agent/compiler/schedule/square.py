"""`squared`: loops whose range differs from program to program, as loops over one range with a condition inside.

The loops over keys of causal attention end at the diagonal. Over one range for all programs their trips can be an axis
of a grid; which programs take part in one of them is a condition that is solved there. Trips are counted from 0, or,
where slices of a summed axis are no whole number of tiles, from where each program's slice starts. The result is only
for owners to be cut from: it would be slow itself.

Whole tiles in front of the diagonal need no mask, but owners of their lanes do not know why none lies beyond the end of
the tensor. Where they have no proof, `tight` says so in a mask: tiles that a program's last one ends lie below that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.reverse.extents import Extents
from kernel_agent.compiler.schedule.forms import Forms, Launch, grid_extent
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant, unspread

_NOUGHT = Form()


@dataclass(frozen=True)
class Squared:
    """A kernel that does the same, in loops over the same ranges."""

    kernel: Kernel
    launch: Launch
    """With the ends of the new loops as arguments."""
    facts: tuple[str, ...] = ()
    """Python: what the loops start at are multiples of their steps."""


@dataclass(frozen=True)
class _Plan:
    """Of one loop."""

    step: Polynomial
    end: Polynomial
    """That no program's loop goes beyond."""
    facts: tuple[str, ...] = ()
    origin: Form = _NOUGHT
    """What the squared loop counts from: 0, or where each program's loop starts."""
    spared: Value | None = None
    """A limit of the loop that the squared one ends at."""
    below: Value | None = None
    """What all lanes of a trip's tile are less than, though no mask says so: the end of another loop over the range."""

    @property
    def range(self) -> tuple[Polynomial, Form]:
        """Loops over the same have one end."""
        return self.step, self.origin


def squared(kernel: Kernel, launch: Launch, *, tight: bool = False) -> Squared:
    """The kernel with every loop squared that can be. `tight`: additions of whole tiles are masked by the end of what
    other loops over the same range add to, as theirs are. Raises DoesNotApply where there are none to be."""
    forms = Forms(kernel, launch)
    tapes = (Code.TAPE_LOAD, Code.TAPE_STORE)
    shared = _sharing(forms)
    loops = [op for op in kernel.ops if op.code is Code.FOR and (forms.trip(op).extent is None or op in shared)]
    plans = {op: plan for op in loops if (plan := _plan(forms, op)) is not None}
    if not plans or any(op.code in tapes for op in kernel.ops):
        return Squared(kernel, launch)
    if tight:
        plans = _tightened(forms, plans)
    ends: dict[tuple[Polynomial, Form], Polynomial] = {}
    for plan in plans.values():
        known = ends.setdefault(plan.range, plan.end)
        if known != plan.end:
            text = f"max({known.text()}, {plan.end.text()})"
            ends[plan.range] = Polynomial.symbol(text, positive=known.surely(1) or plan.end.surely(1))
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    arguments: dict[tuple[Polynomial, Form], Value] = {}
    for one in ends:
        name = f"end_{len(arguments)}"
        while name in taken:
            name += "_"
        arguments[one] = Value("i32", (), name)
    found = {op: (plan, arguments[plan.range]) for op, plan in plans.items()}
    made = _Squarer(forms, found, list(arguments.values())).copy()
    scalars = {value.name: ends[one] for one, value in arguments.items()}
    facts = dict.fromkeys(text for plan in plans.values() for text in plan.facts)
    return Squared(made, replace(launch, scalars={**launch.scalars, **scalars}), tuple(facts))


def _tightened(forms: Forms, plans: Mapping[Op, _Plan]) -> dict[Op, _Plan]:
    """The plans with one end for loops over the same range, where one of them has it and others stay below."""
    ends = {op: limit for op, plan in plans.items() if (limit := _fixed_limit(forms, op, plan)) is not None}
    found = dict(plans)
    for op, plan in plans.items():
        for other, limit in ends.items():
            its = plans[other]
            if op in ends or plan.spared is not None or its.range != plan.range:
                continue
            facts = _below(forms, op, plan.step, its.end)
            if facts is not None and not forms.launch.calls.refute(facts):
                found[op] = replace(plan, end=its.end, facts=(*plan.facts, *facts), below=limit)
                break
    if found == plans:
        raise DoesNotApply("no loop of whole tiles has its end from another one")
    return found


def _fixed_limit(forms: Forms, loop: Op, plan: _Plan) -> Value | None:
    """The limit of a loop that is the same for all programs, if that is where the squared one ends."""
    limits = [limit for limit in _smallest(loop.operands[1]) if forms.of(limit).invariant == plan.end]
    return limits[0] if limits and plan.spared is None else None


def _below(forms: Forms, loop: Op, step: Polynomial, end: Polynomial) -> list[str] | None:
    """Facts under which the tiles of a loop, which starts at a multiple of its step, lie below an end: a limit of it is
    such a multiple, too, and for no program beyond the end. None where that is not to be had."""
    for limit in _smallest(loop.operands[1]):
        facts, most = _stepped(forms, limit, step), _rising_limit(forms, limit)
        if facts is not None and most is not None and most.printable:
            return [*facts, f"{most.text()} <= {end.text()}"]
    return None


def _sharing(forms: Forms) -> frozenset[Op]:
    """Loops that add to what another loop, over another range, adds to as well: whole tiles, and what is left."""
    adding: dict[Value, dict[Op, None]] = {}
    for site in sites(forms.kernel.body, frozenset((Code.ATOMIC_ADD,))):
        for loop in site.loops:
            if loop.code is Code.FOR and forms.trip(loop) in forms.of(site.op.offset).sources:
                adding.setdefault(site.op.base, {})[loop] = None
    ranges = {base: {tuple(map(forms.of, loop.operands[:3])) for loop in loops} for base, loops in adding.items()}
    return frozenset(loop for base, loops in adding.items() if len(ranges[base]) > 1 for loop in loops)


def _plan(forms: Forms, loop: Op) -> _Plan | None:
    """How to square a loop; None where it cannot be."""
    return _from_nought(forms, loop) or _from_start(forms, loop)


def _from_start(forms: Forms, loop: Op) -> _Plan | None:
    """Counting from where each program starts, where a number of the launch is how far it goes from there at most: the
    slice of a summed axis that each program of a split product has."""
    start, stop, step = loop.operands[:3]
    by, origin = forms.of(step).invariant, forms.of(start)
    if by is None or not by.surely(1) or not origin.terms:
        return None
    for limit in _smallest(stop):
        length = (forms.of(limit) - origin).invariant
        if length is not None and length.printable and length.terms:
            return _Plan(by, length, origin=origin, spared=limit)
    return None


def _from_nought(forms: Forms, loop: Op) -> _Plan | None:
    """Counting from 0; None where its start is no multiple of the step, or its end has no limit."""
    start, stop, step = loop.operands[:3]
    by = forms.of(step).invariant
    end = _limit(forms, stop)
    if by is None or end is None or not by.surely(1) or not end.printable:
        return None
    facts: list[str] = []
    for first in _smallest(start):
        found = _stepped(forms, first, by)
        if found is None:
            return None
        facts += found
    return None if forms.launch.calls.refute(facts) else _Plan(by, end, tuple(facts))


def _stepped(forms: Forms, start: Value, by: Polynomial) -> list[str] | None:
    """Facts under which a start is a multiple of the step, and not negative; None where it may be anything."""
    form = forms.of(start)
    if any(atom.kind is Kind.OPAQUE for atom, _ in form.terms):
        return [] if _is_natural(forms, start) and _is_multiple(forms, start, by) else None
    facts: list[str] = []
    for number in (form.base, *(number for _, number in form.terms)):
        if not number.printable or (-number).surely(1):
            return None
        if not number.surely(0):
            facts.append(f"{number.text()} >= 0")
    for number in (*(number for _, number in form.terms), form.base):
        if number.quotient(by) is not None:
            continue
        if by.quotient(number) is not None or (number.number is not None and by.number is not None):
            return None  # of programs that take turns: a multiple only if there is one of them
        facts.append(f"({number.text()}) % ({by.text()}) == 0")
    return facts


def _is_natural(forms: Forms, value: Value) -> bool:
    """Whether a number is not negative, whatever memory holds."""
    op = value.producer
    if forms.of(value).not_negative:
        return True
    if op is None or op.attributes.get("unsigned"):
        return False
    if op.code is Code.MAX:
        return any(_is_natural(forms, operand) for operand in op.operands)
    ordered = (Code.ADD, Code.MUL, Code.MIN, Code.FLOORDIV, Code.REM, Code.CAST)
    return op.code in ordered and all(_is_natural(forms, operand) for operand in op.operands)


def _is_multiple(forms: Forms, value: Value, by: Polynomial) -> bool:
    """Whether a number is a multiple of another one, whatever memory holds."""
    op = value.producer
    if forms.of(value).over(by) is not None:
        return True
    if op is None or op.code not in (Code.ADD, Code.SUB, Code.MUL, Code.MIN, Code.MAX):
        return False
    enough = any if op.code is Code.MUL else all
    return enough(_is_multiple(forms, operand, by) for operand in op.operands)


def _limit(forms: Forms, stop: Value) -> Polynomial | None:
    """A number of the launch that a value is not more than; memory that it is read from may tell, at a look at the
    device."""
    found = _rising_limit(forms, stop)
    if found is not None or any(extent != grid_extent(axis) for axis, extent in enumerate(forms.launch.grid)):
        return found
    try:
        most = Extents({op.blocks[0].arguments[0]: op for op in forms.loops.values()}).of(stop).high
    except CannotDerive:
        return None
    return Polynomial.symbol(most)


def _rising_limit(forms: Forms, stop: Value) -> Polynomial | None:
    """The same, of a number that is the smallest of several, or rises with the programs."""
    op = stop.producer
    if op is not None and op.code is Code.MIN and not op.attributes.get("unsigned"):
        limits = [limit for operand in op.operands if (limit := _rising_limit(forms, operand)) is not None]
        fixed = [limit for operand, limit in zip(op.operands, limits, strict=False) if not forms.of(operand).terms]
        return next(iter([*fixed, *limits]), None)
    form = forms.of(stop)
    found = form.base
    for atom, number in form.terms:
        if atom.kind is not Kind.PROGRAM or atom.extent is None or not number.surely(0):
            return None
        found = found + number * (atom.extent - ONE)
    return found


class _Squarer(Copier):
    """Squares loops."""

    def __init__(self, forms: Forms, ends: dict[Op, tuple[_Plan, Value]], arguments: list[Value]) -> None:
        source = forms.kernel
        super().__init__(source, Builder(emptied(source, arguments=[*source.arguments, *arguments])))
        self.b.written = self.written
        self.ends = ends
        stops = {loop.operands[1] for loop in ends}
        less = [op for op in source.ops if op.code is Code.CMP and op.attributes["predicate"] == "lt"]
        self.limiting = {op for op in less if unspread(op.operands[1]) in stops}
        """Comparisons with where a loop ends."""
        self.forms = forms
        self.inside: list[tuple[Op, _Plan]] = []
        """The loops around what is copied that tell what the lanes of their tiles are below."""

    def pure(self, op: Op) -> None:
        """What lies below the end of a loop, the least of several, lies below each: some are those of all programs."""
        limits = _smallest(unspread(op.operands[1])) if op in self.limiting else []
        if len(limits) < 2:
            super().pure(op)
            return
        parts = [self.b.compare("lt", self[op.operands[0]], self[limit]) for limit in limits]
        self[op.result] = functools.reduce(self.b.logical_and, parts)

    def effect(self, op: Op) -> None:
        """Additions of tiles that lie below an end."""
        known = [] if self.slicing or op.code is not Code.ATOMIC_ADD else self._known(op.offset)
        if not known:
            super().effect(op)
            return
        b = self.b
        mask = None if op.mask is None else self[op.mask]
        for index, end in known:
            below = b.compare("lt", self[index], b.cast(self[end], index.element))
            mask = below if mask is None else b.logical_and(mask, below)
        b.store(self[op.base], self.whole(op.offset), self[op.stored], mask, op.code)

    def _known(self, offset: Value) -> list[tuple[Value, Value]]:
        """Indices of an address, along axes of it, and what they are less than."""
        found = []
        for loop, plan in self.inside:
            if plan.below is not None:
                start = self.forms.of(loop.blocks[0].arguments[0])
                parts = _parts(offset)
                index = next((part for part in parts if _is_tile(self.forms.of(part) - start, plan.step)), None)
                found += [(index, plan.below)] if index is not None else []
        return found

    def loop(self, op: Op) -> None:
        """A FOR."""
        if op not in self.ends:
            super().loop(op)
            return
        plan, end = self.ends[op]
        b = self.b
        (block,) = op.blocks
        start, step = self[op.operands[0]], self[op.operands[2]]
        limits = [self[limit] for limit in _smallest(op.operands[1]) if limit is not plan.spared]
        carries = [self.whole(value) for value in op.operands[3:]]

        def body(trip_index: Value, inner: list[Value]) -> list[Value]:
            takes_part = b.const(True, "i1")
            index = b.add(start, trip_index) if plan.spared is not None else trip_index
            if plan.spared is None and not is_constant(start, 0):
                began = [b.compare("le", first, index) for first in _smallest(start)]
                takes_part = functools.reduce(lambda one, other: b.elementwise(Code.OR, (one, other)), began)
            for limit in limits:
                takes_part = b.logical_and(takes_part, b.compare("lt", index, limit))

            def trip() -> list[Value]:
                for old, new in zip(block.arguments, (index, *inner), strict=True):
                    self[old] = new
                self.inside.append((op, plan))
                yields = self.block(block)
                self.inside.pop()
                return yields

            return list(b.branch(takes_part, trip, lambda: inner))

        names = [value.name for value in block.arguments]
        trips = (b.zero(start), b.cast(end, start.element), step)
        attributes = {key: value for key, value in op.attributes.items() if key != "certain"}
        self.results(op, b.loop(trips, carries, body, index_name=names[0], names=names[1:], **attributes))


def _parts(offset: Value) -> Iterator[Value]:
    """What an address is made of, as tiles of its axes."""
    yield offset
    for operand in () if offset.producer is None else offset.producer.operands:
        if len(operand.shape) == len(offset.shape):
            yield from _parts(operand)


def _is_tile(lanes: Form, step: Polynomial) -> bool:
    """Whether a form is that of the lanes along one axis, as many as a step."""
    return not lanes.base.terms and [(atom.kind, atom.extent, by) for atom, by in lanes.terms] == [
        (Kind.LANE, step, ONE)
    ]


def _smallest(stop: Value) -> list[Value]:
    """Values whose minimum is the value."""
    op = stop.producer
    if op is not None and op.code is Code.MIN and not op.attributes.get("unsigned"):
        return [limit for operand in op.operands for limit in _smallest(operand)]
    return [stop]
