"""The source variables that an address is made of, with their values at one lane, for the words of a finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import POINTWISE, RULES
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, RuntimeValue, on_device

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

Lane = tuple[int, ...]

_LAYOUT = frozenset({"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape"})
_PURE = _LAYOUT | {"tt.get_program_id", "tt.get_num_programs", "tt.make_range"}


@dataclass(frozen=True)
class Source:
    """A named part of an address at one lane."""

    value: Value
    lane: Lane | None
    """Where the lane of the access finds it in its own tile; None when a change of layout hides that."""

    def text(self, number: int | None) -> str:
        """`row_start=2000`, `cols[37]=101`, or without the number where nothing holds it any more."""
        name = self.value.variable
        place = f"[{', '.join(map(str, self.lane))}]" if self.lane else ""
        return f"{name}{place}" + ("" if number is None else f"={number}")


def sources(module: Module, op: Op, lane: Lane) -> tuple[Source, ...]:
    """The named integers nearest to the pointer of an access (its first operand), in the order of the source."""
    found: dict[int, Source] = {}
    seen: set[int] = set()
    waiting: list[tuple[Value, Lane | None]] = [(value, lane) for value in _address_operands(op)]
    while waiting:
        value, at = waiting.pop(0)
        if value.id in seen:
            continue
        seen.add(value.id)
        if value.type.scalar.kind is Kind.INT and is_variable(module, value):
            rank = len(value.type.tile)
            found[value.id] = Source(value, at if at is not None and len(at) == rank else None)
            continue
        waiting += [(operand, at) for operand in _carried(module).get(value.id, ())]
        maker = makers(module).get(value.id)
        if maker is not None and maker.name not in ("tt.load", "tt.call"):
            waiting += [(operand, lane_before(maker, operand, at)) for operand in maker.operands]
    return tuple(found[key] for key in sorted(found))


def is_variable(module: Module, value: Value) -> bool:
    """Whether a value is what the source calls by its name: Triton names every part of an assignment after its target.

    >>> # row = pid * BLOCK + lanes     the product is named row, too, but only the sum is row
    """
    if not value.variable:
        return False
    maker = makers(module).get(value.id)
    if maker is None:
        return True
    own = module.place(maker)
    for reader in _readers(module).get(value.id, ()):
        place = module.place(reader)
        if own and place and own.line == place.line and any(r.variable == value.variable for r in reader.results):
            return False
    return True


def number_at(machine: Machine, source: Source, active: Active, row: int) -> int | None:
    """Value of a source for one program, where it is still known or can be computed again."""
    value = _evaluate(machine, source.value, active, 0)
    if not isinstance(value, Tensor) or value.is_floating_point():
        return None
    if source.lane is None and value[0].numel() > 1:
        return None
    lane = source.lane or (0,) * (value.dim() - 1)
    inside = [at if n > 1 else 0 for at, n in zip(lane, value.shape[1:], strict=False)]
    place = (row if value.size(0) > 1 else 0, *inside)
    if len(place) != value.dim() or any(at >= n for at, n in zip(place, value.shape, strict=True)):
        return None
    return int(value[place])


def _address_operands(op: Op) -> list[Value]:
    if op.name in ("tt.descriptor_store", "tt.descriptor_reduce"):
        return [op.operands[0], *op.operands[2:]]
    if op.name in ("tt.descriptor_gather", "tt.descriptor_scatter"):
        return op.operands[:3]
    return op.operands if op.name == "tt.descriptor_load" else op.operands[:1]


def _evaluate(machine: Machine, value: Value, active: Active, depth: int) -> RuntimeValue | None:
    if value.id in machine.arguments:
        return machine.arguments[value.id]
    known = machine.environment.get(value.id)
    if known is not None:
        return machine.read(value.id, active) if _encloses(known[0], active) else None
    maker = makers(machine.module).get(value.id)
    if maker is None or depth > 40 or not (maker.name in _PURE or maker.name.startswith("arith.")):
        return None
    operands: list[Any] = [_evaluate(machine, operand, active, depth + 1) for operand in maker.operands]
    if any(not isinstance(operand, Tensor) for operand in operands):
        return None
    operands = [on_device(operand, machine.device) for operand in operands]
    function = POINTWISE.get(maker.name)
    if function is not None:
        return function(maker, *operands)
    return RULES[maker.name](machine, maker, operands, active)[0] if maker.name in RULES else None


def _encloses(outer: Active, inner: Active) -> bool:
    current: Active | None = inner
    while current is not None:
        if current is outer:
            return True
        current = current.parent
    return False


def lane_before(op: Op, operand: Value, lane: Lane | None) -> Lane | None:
    """Where the operand of a layout operation holds what its result holds at a lane."""
    before, after = operand.type.tile, op.results[0].type.tile if op.results else ()
    if lane is None or not before:
        return None if lane is None else ()
    if op.name == "tt.expand_dims":
        axis = int(op.attributes["axis"])
        return lane[:axis] + lane[axis + 1 :]
    if op.name == "tt.broadcast":
        return tuple(at if n > 1 else 0 for at, n in zip(lane, before, strict=True))
    if op.name == "tt.trans":
        order = [int(axis) for axis in op.attributes["order"]]
        found = [0] * len(order)
        for place, axis in enumerate(order):
            found[axis] = lane[place]
        return tuple(found)
    if op.name == "tt.reshape":
        flat = 0
        for at, n in zip(lane, after, strict=True):
            flat = flat * n + at
        return tuple(int(part) for part in torch.unravel_index(torch.tensor(flat, device="cpu"), before))
    return lane if before == after else None


@lru_cache(maxsize=64)
def makers(module: Module) -> dict[int, Op]:
    """Operation that makes each value."""
    return {result.id: op for op in module.all_ops for result in op.results}


@lru_cache(maxsize=64)
def _readers(module: Module) -> dict[int, list[Op]]:
    """Operations that read each value."""
    found: dict[int, list[Op]] = {}
    for op in module.all_ops:
        for operand in op.operands:
            found.setdefault(operand.id, []).append(op)
    return found


@lru_cache(maxsize=64)
def _carried(module: Module) -> dict[int, list[Value]]:
    """What loops and conditions may put into a value: initial operands and what regions yield."""
    found: dict[int, list[Value]] = {}
    for op in module.all_ops:
        for target, source in _passed(op):
            found.setdefault(target.id, []).append(source)
    return found


def _passed(op: Op) -> Iterator[tuple[Value, Value]]:
    """(value, what it may come from) for the values that pass through a structured operation."""
    blocks: list[Block] = [region[0] for region in op.regions if region]
    ends = [block.ops[-1].operands for block in blocks if block.ops]
    if op.name == "scf.for":
        for k, (argument, start) in enumerate(zip(blocks[0].arguments[1:], op.operands[3:], strict=True)):
            yield argument, start
            yield argument, ends[0][k]
            yield op.results[k], ends[0][k]
            yield op.results[k], start
    elif op.name == "scf.while":
        for k, argument in enumerate(blocks[0].arguments):
            yield argument, op.operands[k]
            yield argument, ends[1][k]
        for k, argument in enumerate(blocks[1].arguments):
            yield argument, ends[0][1 + k]
            yield op.results[k], ends[0][1 + k]
    elif op.name == "scf.if":
        for end in ends:
            yield from zip(op.results, end, strict=True)
