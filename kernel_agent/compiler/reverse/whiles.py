"""The adjoint of a WHILE: its trips are counted and what it carries is put on tapes; a FOR goes back over them.

A trip is the test and, where it holds, the body; the test runs once more at the end, and is reversed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_agent.compiler.reverse.captures import taken_from_outside
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.loops import Taped, Trips, reverse_trips
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


@dataclass(frozen=True)
class Counted:
    """How a WHILE ended in the copy with tapes."""

    carries: tuple[Value, ...]
    """What the last test was given."""
    trips: Value
    """How often the body ran, i32."""


def counted(r: Reversal, op: Op, taped: Taped) -> Counted:
    """Copy a WHILE with tapes of its carries, and set its results."""
    b, (test, body) = r.b, op.blocks
    made = [value for value in test.yields[1:] if value not in test.arguments]
    places = [(*test.arguments, None, *made).index(value) for value in test.yields[1:]]
    count = len(test.arguments)

    def ask(inner: list[Value]) -> list[Value]:
        for old, new in zip(test.arguments, inner, strict=False):
            r[old] = new
        r.block(test)
        return [r.whole(test.yields[0]), *inner, *(r.whole(value) for value in made)]

    def go_on(inner: list[Value]) -> list[Value]:
        for name, value in zip(taped.tapes, inner[:count], strict=True):
            b.add_op(Op(Code.TAPE_STORE, (value,), (), {"tape": name}))
        for old, place in zip(body.arguments, places, strict=True):
            r[old] = inner[place]
        return [*r.block(body), b.add(inner[count], b.const(1))]

    found = b.repeat([*(r.whole(value) for value in op.operands), b.const(0)], ask, go_on, tape=taped.trips)
    r.results(op, [found[place] for place in places])
    return Counted(found[:count], found[count])


def reverse_while(r: Reversal, op: Op, cotangents: Cotangents) -> None:
    """The adjoint of a WHILE."""
    test, body = op.blocks
    outgoing = [cotangents.get(result) for result in op.results]
    if all(g is None for g in outgoing) and not any(map(r.sinks, op.blocks)):
        return
    b, ended = r.b, r.counts[op]
    for old, new in zip(test.arguments, ended.carries, strict=True):
        r[old] = new
    r.recompute(test)
    found = r.fresh()
    for value, g in zip(test.yields[1:], outgoing, strict=True):
        found.add(value, g)
    r.reverse(test, found)
    for value, g in taken_from_outside(found, test).items():
        cotangents.add(value, g)
    incoming = {k: g for k, carry in enumerate(test.arguments) if (g := found.get(carry)) is not None}

    def recompute() -> None:
        r.recompute(test)
        for old, passed in zip(body.arguments, test.yields[1:], strict=True):
            r[old] = r[passed]
        r.recompute(body)

    def reverse(inside: Cotangents) -> None:
        r.reverse(body, inside)
        for argument, passed in zip(body.arguments, test.yields[1:], strict=True):
            inside.add(passed, inside.get(argument))
        r.reverse(test, inside)

    trips = Trips(
        taped=r.tapes[op],
        bounds=(b.const(0), ended.trips, b.const(1)),
        index=None,
        carries=test.arguments,
        yields=body.yields,
        starts=op.operands,
        blocks=op.blocks,
        recompute=recompute,
        reverse=reverse,
    )
    reverse_trips(r, trips, incoming, cotangents)
