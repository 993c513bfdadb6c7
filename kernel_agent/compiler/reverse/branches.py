"""The adjoint of an IF: one on the same condition, whose sides recompute and reverse those of the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_agent.compiler.reverse.captures import taken_from_outside
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value, broadcast_shape

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


def reverse_if(r: Reversal, op: Op, cotangents: Cotangents) -> None:
    """Build the reverse branches, and pass cotangents on to values from outside."""
    incoming = [cotangents.get(result) for result in op.results]
    if all(g is None for g in incoming) and not any(r.sinks(block) for block in op.blocks):
        return
    b = r.b
    incoming = [None if g is None else r.lanes.settled(g) for g in incoming]
    sides: list[tuple[Block, dict[Value, Value]]] = []
    for source in op.blocks:
        block = Block()
        with b.inside(block, guarded=True):
            r.recompute(source)
            found = r.fresh()
            for value, g in zip(source.yields, incoming, strict=True):
                found.add(value, g)
            r.reverse(source, found)
            sides.append((block, {v: r.lanes.settled(g) for v, g in taken_from_outside(found, source).items()}))
    outside = list(dict.fromkeys(value for _, parts in sides for value in parts))
    shapes = {value: broadcast_shape([parts[value].shape for _, parts in sides if value in parts]) for value in outside}
    for block, parts in sides:
        with b.inside(block, guarded=True):
            for value in outside:
                g = parts.get(value, b.const(0.0, adjoint_element(value.element)))
                block.yields.append(b.whole(g, shapes[value]))
    results = [Value(adjoint_element(v.element), shapes[v], f"d_{v.name}" if v.name else "") for v in outside]
    b.add_op(Op(Code.IF, (r[op.operands[0]],), results, {}, [block for block, _ in sides]))
    r.lanes.trusted.update(results)
    for value, result in zip(outside, results, strict=True):
        cotangents.add(value, result)
