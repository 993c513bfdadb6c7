"""Which values of a kernel decide where it goes and what it touches: addresses, masks, loop bounds and conditions.

Everything else, usually all arithmetic on floats, can be left out by whoever asks only for traffic and trip counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.program import Block, Function, Module, Op, Value, walk

ACCESSES = {
    "tt.load": Access.READ,
    "tt.descriptor_load": Access.READ,
    "tt.descriptor_gather": Access.READ,
    "tt.store": Access.WRITE,
    "tt.descriptor_store": Access.WRITE,
    "tt.descriptor_scatter": Access.WRITE,
    "tt.descriptor_reduce": Access.ATOMIC,
    "tt.atomic_rmw": Access.ATOMIC,
    "tt.atomic_cas": Access.ATOMIC,
}
"""Operations that touch memory, as far as they are known here."""


@dataclass(frozen=True)
class AddressSlice:
    """The part of a kernel that addresses and branches depend on."""

    needed: frozenset[int]
    """Ids of values to compute."""
    data: tuple[Op, ...]
    """Memory operations whose result is among them: addresses depend on data."""


def address_slice(module: Module) -> AddressSlice:
    """Find the slice of a kernel."""
    graph = Dependences(module)
    needed: set[int] = set()
    waiting = list(graph.roots)
    while waiting:
        value = waiting.pop()
        if value not in needed:
            needed.add(value)
            waiting.extend(graph.sources[value])
    data = [op for op in module.all_ops if op.name in ACCESSES and any(r.id in needed for r in op.results)]
    return AddressSlice(frozenset(needed), tuple(data))


def mask_of(op: Op) -> Value | None:
    """The mask operand of an access by pointers."""
    if op.name == "tt.load":
        segments = op.attributes.get("operandSegmentSizes", (1, len(op.operands) > 1, len(op.operands) > 2))
        return op.operands[1] if segments[1] else None
    if op.name in ("tt.store", "tt.atomic_rmw"):
        return op.operands[2] if len(op.operands) > 2 else None
    return None


def places_of(op: Op) -> list[Value]:
    """Operands of an access that say where it goes; its mask is not among them."""
    if op.name in ("tt.descriptor_load", "tt.descriptor_gather", "tt.descriptor_scatter"):
        return list(op.operands[:3] if op.name == "tt.descriptor_scatter" else op.operands)
    if op.name in ("tt.descriptor_store", "tt.descriptor_reduce"):
        return [op.operands[0], *op.operands[2:]]
    return [op.operands[0]]


class Dependences:
    """Which values each value is made of, and which values matter."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.sources: dict[int, set[int]] = defaultdict(set)
        self.roots: set[int] = set()
        for function in module.functions.values():
            blocks = {block.label: block for block in function.blocks}
            for op in walk(function.blocks):
                self._add(op, blocks)

    def _add(self, op: Op, blocks: dict[str, Block]) -> None:
        if op.name in ACCESSES:
            mask = mask_of(op)
            self.roots.update(value.id for value in places_of(op))
            self.roots.update([] if mask is None else [mask.id])
        if op.name == "scf.for":
            self._for(op)
        elif op.name == "scf.if":
            self.roots.add(op.operands[0].id)
            for region in op.regions:
                if region:
                    self._flow(_last(region).operands, op.results)
        elif op.name == "scf.while":
            self._while(op)
        elif op.name == "tt.call":
            self._call(op)
        elif op.name == "cf.br":
            self._flow(op.operands, blocks[op.successors[0]].arguments)
        elif op.name == "cf.cond_br":
            split = 1 + op.attributes["operandSegmentSizes"][1]
            self.roots.add(op.operands[0].id)
            self._flow(op.operands[1:split], blocks[op.successors[0]].arguments)
            self._flow(op.operands[split:], blocks[op.successors[1]].arguments)
        else:
            inner = [value.id for region in op.regions for nested in walk(region) for value in nested.results]
            for result in op.results:
                self.sources[result.id].update([*(value.id for value in op.operands), *inner])

    def _for(self, op: Op) -> None:
        low, _, step = op.operands[:3]
        body = op.regions[0][0]
        self.roots.update(value.id for value in op.operands[:3])
        self._flow([low], body.arguments[:1])
        self._flow([step], body.arguments[:1])
        for source in (op.operands[3:], _last(op.regions[0]).operands):
            self._flow(source, op.results)
            self._flow(source, body.arguments[1:])

    def _while(self, op: Op) -> None:
        before, after = op.regions[0][0], op.regions[1][0]
        condition, *passed = _last(op.regions[0]).operands
        self.roots.add(condition.id)
        self._flow(op.operands, before.arguments)
        self._flow(_last(op.regions[1]).operands, before.arguments)
        self._flow(passed, after.arguments)
        self._flow(passed, op.results)

    def _call(self, op: Op) -> None:
        callee = self.module.callee(op)
        self._flow(op.operands, callee.blocks[0].arguments)
        for returned in _returns(callee):
            self._flow(returned.operands, op.results)

    def _flow(self, sources: Iterable[Value], targets: Iterable[Value]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.sources[target.id].add(source.id)


def _last(region: list[Block]) -> Op:
    return region[0].ops[-1]


def _returns(function: Function) -> list[Op]:
    return [op for op in walk(function.blocks) if op.name == "tt.return"]
