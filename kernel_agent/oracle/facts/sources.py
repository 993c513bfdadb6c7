"""Where values of a kernel come from: the parameter of a pointer, the loads behind an address, the axis of a tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kernel_agent.ir.cost.address_slice import ACCESSES, Dependences, places_of
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.types import Kind


@dataclass(frozen=True)
class Lane:
    """One axis of the tile of one load."""

    op: Op
    axis: int


class Sources:
    """Producers of all values of one kernel."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.producer: dict[int, Op] = {result.id: op for op in module.all_ops for result in op.results}
        self.owner: dict[int, tuple[Op, int]] = {}
        """Argument of a block of an operation -> that operation, and which argument it is."""
        for op in module.all_ops:
            for region in op.regions:
                for block in region[:1]:
                    self.owner.update({value.id: (op, place) for place, value in enumerate(block.arguments)})
        self.parameters = {value.id: value for value in module.entry.blocks[0].arguments}
        self._flow = Dependences(module).sources

    @cached_property
    def loops(self) -> dict[int, tuple[Op, ...]]:
        """Identity of an operation -> the loops it stands in, outermost first."""
        found: dict[int, tuple[Op, ...]] = {}

        def visit(blocks: Iterable[Block], around: tuple[Op, ...]) -> None:
            for block in blocks:
                for op in block.ops:
                    found[id(op)] = around
                    inner = (*around, op) if op.name in ("scf.for", "scf.while") else around
                    for region in op.regions:
                        visit(region, inner)

        for function in self.module.functions.values():
            visit(function.blocks, ())
        return found

    def roots(self, value: Value) -> tuple[Value, ...]:
        """Pointer parameters of the kernel that a pointer may come from, in their order."""
        reached = self._behind([value.id], stop=frozenset())
        pointers = (Kind.POINTER, Kind.DESCRIPTOR)
        return tuple(p for p in self.parameters.values() if p.id in reached and p.type.scalar.kind in pointers)

    def deciding(self, op: Op) -> tuple[Op, ...]:
        """Loads whose values decide where an access goes, in textual order."""
        loads = {op.results[0].id: op for op in self.module.all_ops if op.name in ACCESSES and op.results}
        reached = self._behind([value.id for value in places_of(op)], stop=frozenset(loads))
        return tuple(load for value, load in loads.items() if value in reached and load is not op)

    def _behind(self, start: Iterable[int], stop: frozenset[int]) -> set[int]:
        reached: set[int] = set()
        waiting = list(start)
        while waiting:
            value = waiting.pop()
            if value not in reached:
                reached.add(value)
                if value not in stop:
                    waiting.extend(self._flow[value])
        return reached

    def lanes(self, value: Value, axis: int) -> tuple[Lane, ...]:
        """Loads that an axis of a tile comes from, through everything that keeps axes apart."""
        found: dict[tuple[int, int], Lane] = {}
        seen: set[tuple[int, int]] = set()
        waiting = [(value, axis)]
        while waiting:
            here, at = waiting.pop()
            if (here.id, at) in seen or len(here.type.tile) <= at or here.type.tile[at] == 1:
                continue
            seen.add((here.id, at))
            op = self.producer.get(here.id)
            if op is None:
                waiting += [(source, at) for source in self._carried(here)]
            elif op.name in ACCESSES:
                found.setdefault((id(op), at), Lane(op, at))
            else:
                waiting += list(self._behind_axis(op, here, at))
        order = {id(op): place for place, op in enumerate(self.module.all_ops)}
        return tuple(sorted(found.values(), key=lambda lane: (order[id(lane.op)], lane.axis)))

    def _behind_axis(self, op: Op, value: Value, axis: int) -> Iterator[tuple[Value, int]]:
        rank = len(value.type.tile)
        if op.name == "tt.expand_dims":
            inserted = int(op.attributes["axis"])
            if axis != inserted:
                yield op.operands[0], axis - (axis > inserted)
        elif op.name == "tt.trans":
            yield op.operands[0], int(op.attributes["order"][axis])
        elif op.name in ("tt.dot", "tt.dot_scaled"):
            if axis != rank - 1:
                yield op.operands[0], axis
            if axis != rank - 2:
                yield op.operands[1], axis
            yield op.operands[2], axis
        elif op.name == "tt.reduce":
            for operand in op.operands:
                yield operand, axis + (axis >= int(op.attributes["axis"]))
        elif op.name in ("scf.for", "scf.while", "scf.if"):
            place = next(k for k, result in enumerate(op.results) if result.id == value.id)
            yield from ((source, axis) for source in self._passed(op, place))
        elif op.name not in ("tt.splat", "tt.reshape", "tt.gather", "tt.histogram", "tt.make_range"):
            for operand in op.operands:
                if len(operand.type.tile) == rank:
                    yield operand, axis

    def _carried(self, value: Value) -> list[Value]:
        """What a block argument holds: where a loop starts with it, and what it passes on."""
        if value.id not in self.owner:
            return []
        op, place = self.owner[value.id]
        if op.name == "scf.for" and place > 0:
            return [op.operands[2 + place], last(op.regions[0][0]).operands[place - 1]]
        if op.name == "scf.while" and op.regions[0] and value in op.regions[0][0].arguments:
            return [op.operands[place], last(op.regions[1][0]).operands[place]]
        if op.name == "scf.while":
            return [last(op.regions[0][0]).operands[place + 1]]
        return []

    @staticmethod
    def _passed(op: Op, place: int) -> list[Value]:
        """What a result of a loop or branch is."""
        if op.name == "scf.for":
            return [op.operands[3 + place], last(op.regions[0][0]).operands[place]]
        if op.name == "scf.while":
            return [last(op.regions[0][0]).operands[place + 1]]
        return [last(region[0]).operands[place] for region in op.regions if region]


def last(block: Block) -> Op:
    """The operation that ends a block."""
    return block.ops[-1]
