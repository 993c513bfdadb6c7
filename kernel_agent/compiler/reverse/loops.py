"""The adjoint of a FOR: a loop over the same trips, last one first.

Cotangents of what the forward carried are carried backwards; where a trip passes one on unchanged, as for a plain sum,
it is the same in all trips and is not carried, so that trips do not depend on each other. Cotangents of values from
outside are summed up in carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_agent.compiler.reverse.captures import taken_from_outside
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value, constant

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


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
    """Build the reverse loop, and pass cotangents on to initial carries and values from outside."""
    incoming = {k: g for k, result in enumerate(op.results) if (g := cotangents.get(result)) is not None}
    if not incoming and not r.sinks(op.blocks[0]):
        return
    incoming = {k: r.lanes.settled(g) for k, g in incoming.items()}
    active, still = set(incoming), set[int]()
    while True:  # what is carried, and what stays, is known when a trip shows nothing new
        trip = _trip(r, op, incoming, active, still)
        now_active = active | set(trip.found)
        now_still = still | {k for k, given in trip.given.items() if trip.found.get(k) is given and k in incoming}
        if (now_active, now_still) == (active, still):
            break
        active, still = now_active, now_still
    _finish(r, op, cotangents, incoming, trip, still)


def _trip(r: Reversal, op: Op, incoming: dict[int, Value], active: set[int], still: set[int]) -> _Trip:
    b, (source,) = r.b, op.blocks
    first, *carries = source.arguments
    index = Value(first.element, (), first.name)
    given = {k: _cotangent_of(carries[k]) for k in sorted(active - still)}
    block = Block([index, *given.values()])
    r.lanes.trusted.update(given.values())
    with b.inside(block, certain=_runs(r, op)):
        r[first] = index
        for name, carry in zip(r.tapes[op][1], carries, strict=True):
            load = Op(Code.TAPE_LOAD, (), [Value(carry.element, carry.shape, carry.name)], {"tape": name})
            r[carry] = b.add_op(load).result
        r.recompute(source)
        found = r.fresh()
        for k in sorted(active):
            found.add(source.yields[k], given[k] if k in given else incoming[k])
        r.reverse(source, found)
        ends = {k: r.lanes.settled(g) for k, carry in enumerate(carries) if (g := found.get(carry)) is not None}
        outside = {value: r.lanes.settled(g) for value, g in taken_from_outside(found, source).items()}
        block.yields = [
            b.whole(ends[k] if k in ends else b.zero(argument), argument.shape) for k, argument in given.items()
        ]
        for value, g in outside.items():
            total = Value(g.element, g.shape, f"d_{value.name}" if value.name else "")
            total.depth = b.depth
            block.arguments.append(total)
            block.yields.append(b.add(total, g))
    return _Trip(block, given, ends, outside)


def _finish(
    r: Reversal, op: Op, cotangents: Cotangents, incoming: dict[int, Value], trip: _Trip, still: set[int]
) -> None:
    b = r.b
    initial = [
        b.whole(incoming[k] if k in incoming else b.zero(argument), argument.shape)
        for k, argument in trip.given.items()
    ]
    initial += [b.whole(b.zero(g), g.shape) for g in trip.outside.values()]
    bounds = [r[operand] for operand in op.operands[:3]]
    results = [Value(argument.element, argument.shape, argument.name) for argument in trip.block.arguments[1:]]
    attributes = {"reverse": not op.attributes["reverse"], "tape": r.tapes[op][0]}
    b.add_op(Op(Code.FOR, (*bounds, *initial), results, attributes, [trip.block]))
    r.lanes.trusted.update(results)
    starts = op.operands[3:]
    for k, result in zip(trip.given, results, strict=False):
        cotangents.add(starts[k], result)
    for k in sorted(still):
        cotangents.add(starts[k], incoming[k])
    for value, result in zip(trip.outside, results[len(trip.given) :], strict=True):
        cotangents.add(value, result)


def _cotangent_of(carry: Value) -> Value:
    return Value(adjoint_element(carry.element), carry.shape, f"d_{carry.name}" if carry.name else "")


def _runs(r: Reversal, op: Op) -> bool:
    start, stop, step = (constant(r[operand]) for operand in op.operands[:3])
    return start is not None and stop is not None and step is not None and step > 0 and start < stop
