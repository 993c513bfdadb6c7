"""`evened`: loops over blocks of rows that ask no mask where a launch has whole blocks alone.

An owner of sums walks over blocks of rows and asks of every row whether it is there. Only the last block can have rows
that are not; where blocks divide the rows, none has. A constexpr says so: with it the masks are constants, and the
loads are those of a kernel that was written for such sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_agent.compiler.schedule.describe import index_terms
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.switched import Switched
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, unspread, walk

NAME = "WHOLE"


def evened(kernel: Kernel, launch: Launch, name: str) -> Switched | None:
    """The kernel whose loops of products ask of no row whether it is there if the constexpr `name` is true. None where
    none asks."""
    forms = Forms(kernel, launch)
    found: dict[Op, str] = {}
    for loop in kernel.ops:
        if loop.code is Code.FOR and any(op.code is Code.DOT for op in loop.blocks[0].ops):
            found |= {op: text for op in _asked(loop) if (text := _condition(forms, loop, op))}
    return Switched.of(kernel, found, name)


def _asked(loop: Op) -> Iterator[Op]:
    """Comparisons that masks of loads are made of."""
    seen: set[Op] = set()
    pending = [op.mask for op in walk(loop.blocks[0]) if op.code is Code.LOAD and op.mask is not None]
    while pending:
        op = pending.pop().producer
        if op is None or op in seen:
            continue
        seen.add(op)
        if op.code is Code.CMP:
            yield op
        elif op.code in (Code.AND, Code.EXPAND, Code.BROADCAST):
            pending += op.operands


def _condition(forms: Forms, loop: Op, op: Op) -> str:
    """When all lanes of `index * BLOCK + arange(BLOCK) < limit` hold in all trips; empty where that cannot be said."""
    if op.attributes["predicate"] not in ("lt", "gt") or op.attributes.get("unsigned"):
        return ""
    index, limit = op.operands if op.attributes["predicate"] == "lt" else op.operands[::-1]
    terms = index_terms(index)
    counts = [one.index for one in terms if one.index.shape]
    starts = [one.index for one in terms if not one.index.shape]
    if len(counts) != 1 or len(starts) != 1 or any(one.factors for one in terms):
        return ""
    (count,), (start,) = counts, starts
    if count.producer is None or count.producer.code is not Code.ARANGE or count.producer.attributes["start"]:
        return ""
    # Blocks are counted from 0 or more, and a last one is known: its end is the end of all.
    size = forms.of(count).coefficients
    extent = next((atom.extent for atom in size), None)
    trip = forms.of(start) - forms.of(loop.blocks[0].arguments[0]).times(extent) if extent is not None else None
    end = forms.of(unspread(limit)).invariant
    if extent is None or trip is None or trip.terms or trip.base.terms or end is None or not end.printable:
        return ""
    for last in _at_most(loop.operands[1]):
        blocks = forms.of(last).invariant
        if blocks is not None and blocks.printable:
            return f"{(blocks * extent).text()} <= {end.text()}"
    return ""


def _at_most(value: Value) -> Iterator[Value]:
    """Numbers that a value is not above, what changes least first."""
    op = value.producer
    if op is not None and op.code is Code.MIN:
        for operand in op.operands[::-1]:
            yield from _at_most(operand)
    else:
        yield value
