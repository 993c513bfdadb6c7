"""The adjoint of a loop: one over the same trips, last one first.

Cotangents of what the forward carried are carried backwards; where a trip passes one on unchanged, as for a plain sum,
it is the same in all trips and is not carried, so that trips do not depend on each other. Cotangents of values from
outside are summed up in carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernel_agent.compiler.reverse.captures import taken_from_outside
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.reverse.undo import Steps, before, undoable
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value, surely_runs

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


@dataclass(frozen=True)
class Taped:
    """A loop of the forward that was copied with tapes."""

    trips: str
    """Name of its trips."""
    tapes: tuple[str, ...]
    """Of its carries at the start of a trip."""


@dataclass(frozen=True)
class Trips:
    """The trips of a loop of the forward, as its adjoint sees them. Values are the forward's, bounds the adjoint's."""

    taped: Taped
    bounds: tuple[Value, Value, Value]
    index: Value | None
    """None for a loop without."""
    carries: Sequence[Value]
    """At the start of a trip."""
    yields: Sequence[Value]
    """What is carried at its end."""
    starts: Sequence[Value]
    """What is carried at first."""
    blocks: tuple[Block, ...]
    recompute: Callable[[], None]
    """Copy a trip whose index and carries are set."""
    reverse: Callable[[Cotangents], None]
    """The adjoint of a trip, after cotangents of `yields` were set."""
    backwards: bool = True
    """Whether the adjoint takes the last trip first, as it does for a loop that goes forward."""
    undone: Mapping[int, Steps] = field(default_factory=dict)
    """Carries that are found again from what a trip made of them, by place."""
    ends: Sequence[Value] = ()
    """What is carried after the last trip."""


@dataclass
class _Trip:
    """The body of a reverse loop, built on assumptions about carries."""

    block: Block
    given: dict[int, Value]
    """Carry of the forward -> its cotangent at the end of the trip, an argument of the block."""
    found: dict[int, Value]
    """Carry of the forward -> its cotangent at the start of the trip, where there is one."""
    outside: dict[Value, Value]
    """Value from outside -> the trip's part of its cotangent."""


def reverse_for(r: Reversal, op: Op, cotangents: Cotangents) -> None:
    """The adjoint of a FOR."""
    incoming = {k: g for k, result in enumerate(op.results) if (g := cotangents.get(result)) is not None}
    (block,) = op.blocks
    if not incoming and not r.sinks(block):
        return
    trips = Trips(
        taped=r.tapes[op],
        bounds=(r[op.operands[0]], r[op.operands[1]], r[op.operands[2]]),
        index=block.arguments[0],
        carries=block.arguments[1:],
        yields=block.yields,
        starts=op.operands[3:],
        blocks=op.blocks,
        recompute=lambda: r.recompute(block),
        reverse=lambda found: r.reverse(block, found),
        backwards=not op.attributes["reverse"],
        undone=undoable(op) if r.undoes else {},
        ends=op.results,
    )
    reverse_trips(r, trips, incoming, cotangents)


def reverse_trips(r: Reversal, trips: Trips, incoming: dict[int, Value], cotangents: Cotangents) -> None:
    """Build the reverse loop, and pass cotangents on to initial carries and values from outside.

    `incoming`: cotangents of what is carried after the last trip, by place.
    """
    incoming = {k: r.lanes.settled(g) for k, g in incoming.items()}
    active, still = set(incoming), set[int]()
    while True:  # what is carried, and what stays, is known when a trip shows nothing new
        trip = _trip(r, trips, incoming, active, still)
        now_active = active | set(trip.found)
        now_still = still | {k for k, given in trip.given.items() if trip.found.get(k) is given and k in incoming}
        if (now_active, now_still) == (active, still):
            break
        active, still = now_active, now_still
    _finish(r, trips, cotangents, incoming, trip, still)


def _trip(r: Reversal, trips: Trips, incoming: dict[int, Value], active: set[int], still: set[int]) -> _Trip:
    b, carries = r.b, trips.carries
    index = Value(trips.bounds[0].element, (), trips.index.name if trips.index else "trip")
    given = {k: _cotangent_of(carries[k]) for k in sorted(active - still)}
    after = {k: Value(carries[k].element, carries[k].shape, carries[k].name) for k in trips.undone}
    block = Block([index, *given.values(), *after.values()])
    r.lanes.trusted.update(given.values())
    with b.inside(block, certain=surely_runs(*trips.bounds)):
        if trips.index is not None:
            r[trips.index] = index
        for k, (name, carry) in enumerate(zip(trips.taped.tapes, carries, strict=True)):
            if k in after:
                r[carry] = before(r, trips.undone[k], after[k])
                continue
            load = Op(Code.TAPE_LOAD, (), [Value(carry.element, carry.shape, carry.name)], {"tape": name})
            r[carry] = b.add_op(load).result
        trips.recompute()
        found = r.fresh()
        for k in sorted(active):
            found.add(trips.yields[k], given[k] if k in given else incoming[k])
        trips.reverse(found)
        ends = {k: r.lanes.settled(g) for k, carry in enumerate(carries) if (g := found.get(carry)) is not None}
        outside = {value: r.lanes.settled(g) for value, g in taken_from_outside(found, *trips.blocks).items()}
        block.yields = [
            b.whole(ends[k] if k in ends else b.zero(argument), argument.shape) for k, argument in given.items()
        ]
        block.yields += [r[carries[k]] for k in after]
        for value, g in outside.items():
            total = Value(g.element, g.shape, f"d_{value.name}" if value.name else "")
            total.depth = b.depth
            block.arguments.append(total)
            block.yields.append(b.add(total, g))
    return _Trip(block, given, ends, outside)


def _finish(
    r: Reversal, trips: Trips, cotangents: Cotangents, incoming: dict[int, Value], trip: _Trip, still: set[int]
) -> None:
    b = r.b
    initial = [
        b.whole(incoming[k] if k in incoming else b.zero(argument), argument.shape)
        for k, argument in trip.given.items()
    ]
    initial += [r.whole(trips.ends[k]) for k in trips.undone]
    initial += [b.whole(b.zero(g), g.shape) for g in trip.outside.values()]
    results = [Value(argument.element, argument.shape, argument.name) for argument in trip.block.arguments[1:]]
    attributes = {"reverse": trips.backwards, "tape": trips.taped.trips}
    b.add_op(Op(Code.FOR, (*trips.bounds, *initial), results, attributes, [trip.block]))
    r.lanes.trusted.update(results)
    for k, result in zip(trip.given, results, strict=False):
        cotangents.add(trips.starts[k], result)
    for k in sorted(still):
        cotangents.add(trips.starts[k], incoming[k])
    for value, result in zip(trip.outside, results[len(trip.given) + len(trips.undone) :], strict=True):
        cotangents.add(value, result)


def _cotangent_of(carry: Value) -> Value:
    return Value(adjoint_element(carry.element), carry.shape, f"d_{carry.name}" if carry.name else "")
