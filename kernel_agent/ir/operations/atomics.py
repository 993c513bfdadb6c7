"""Atomic updates. When the old value is used, or memory is compared and exchanged, order matters: such kernels run
program by program (see `launch`), and here lane by lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.lanes import Lanes
from kernel_agent.ir.memory import CPU, Add, Extreme, Load, Store, Tape
from kernel_agent.ir.meter import Access
from kernel_agent.ir.operations.access import check_width, to_memory
from kernel_agent.ir.operations.pointers import Target, targets
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.rounding import rounded
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, Pointer

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_AND, _OR, _XOR, _ADD, _FADD, _MAX, _MIN, _UMAX, _UMIN, _EXCHANGE = range(1, 11)
OF_DESCRIPTORS = {1: _ADD, 2: _MIN, 3: _MAX, 6: _AND, 7: _OR, 8: _XOR}
"""Kinds of `tt.descriptor_reduce`, for signed integers and floats; wrapping counters are not among them."""
UNSIGNED = {_MIN: _UMIN, _MAX: _UMAX}
EXTREMES = frozenset({_MAX, _MIN, _UMAX, _UMIN})
"""Values of the attribute `atomic_rmw_op` that keep one of two values."""


@rule("tt.atomic_rmw")
def _read_modify_write(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    pointer, value, *rest = operands
    type_ = op.results[0].type
    used = op.results[0].id in machine.module.used
    result = torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype, device=machine.device)
    for target in targets(machine, op, pointer, rest[0] if rest else None, active):
        check_width(machine, op, target.buffer, type_.scalar)
        lanes = _lanes(machine, op, target, value, active)
        values = lanes.select(to_memory(machine, target.buffer, value, type_))
        machine.sanitizer.update(target.buffer, lanes, op)
        kind = op.attributes["atomic_rmw_op"]
        tape = machine.tape(target.buffer)
        if used:
            old = _one_by_one(tape, kind, lanes.index, values)
            if target.buffer.is_float and type_.scalar.kind is Kind.INT:
                raise machine.unsupported(op, "the old value of an atomic extreme of floats cannot be used")
            result = _with_found(result, lanes, old.to(type_.dtype))
        else:
            _update(machine, op, tape, kind, lanes.index, values)
    return [result]


def update_block(
    machine: Machine, op: Op, kind: int, pointer: Pointer, mask: Tensor | None, value: Any, type_: Type, active: Active
) -> None:
    """Update elements atomically with values of `type_`; `kind` is a value of the attribute `atomic_rmw_op`."""
    for target in targets(machine, op, pointer, mask, active):
        check_width(machine, op, target.buffer, type_.scalar)
        lanes = _lanes(machine, op, target, value, active)
        machine.sanitizer.update(target.buffer, lanes, op)
        values = lanes.select(to_memory(machine, target.buffer, value, type_))
        _update(machine, op, machine.tape(target.buffer), kind, lanes.index, values)


def _lanes(machine: Machine, op: Op, target: Target, value: Any, active: Active) -> Lanes:
    valid = machine.sanitizer.in_bounds(
        target.buffer, target.offset, target.mask, op, active, "atomic update", target.view
    )
    shape = value.shape if isinstance(value, Tensor) else value.pattern.shape
    every_program = torch.empty(active.size, *[1] * (len(shape) - 1), dtype=torch.bool, device="meta")
    lanes = machine.lanes(target.buffer, target.offset, valid, active, target.view)
    lanes = lanes.broadcast(every_program, torch.empty(shape, device="meta"))
    if machine.meter is not None:
        machine.meter.access(Access.ATOMIC, op, target.buffer, lanes)
    return lanes


def _with_found(result: Tensor, lanes: Lanes, old: Tensor) -> Tensor:
    """The result with the values (n,) that these lanes found; other lanes may have gone to other buffers."""
    found = lanes.spread(old)
    return found if lanes.valid is None else torch.where(lanes.valid, found, result)


def _update(machine: Machine, op: Op, tape: Tape, kind: int, index: Tensor, values: Tensor) -> None:
    """Apply all lanes at once; the old values are not asked for."""
    records = tape.records(values)
    floats = tape.buffer.is_float
    if kind in (_ADD, _FADD):
        if records:
            tape.token = Add.apply(tape.token, values, tape, index)
        elif tape.faithful and floats:
            _add_in_turn(tape, index, values)
        else:
            tape.open_for_writing(index).index_add_(0, index, values)
    elif kind in (_MAX, _MIN) or (floats and kind in (_UMAX, _UMIN)):
        # Triton updates floats as integers: positive ones signed, negative ones unsigned and therefore reversed.
        largest = kind in (_MAX, _UMIN) if floats and op.operands[1].type.scalar.kind is Kind.INT else kind == _MAX
        if records:
            tape.token = Extreme.apply(tape.token, values, tape, index, largest)
        else:
            tape.open_for_writing(index).scatter_reduce_(0, index, values, "amax" if largest else "amin")
    elif kind == _EXCHANGE:
        owner = tape.owners(index)
        if records:
            tape.token = Store.apply(tape.token, values, tape, index, owner)
        else:
            tape.put(index, values, owner)
    elif kind in (_AND, _OR, _XOR, _UMAX, _UMIN):
        _one_by_one(tape, kind, index, values)
    else:
        raise machine.unsupported(op, f"atomic operation {kind} is not supported")


def _add_in_turn(tape: Tape, index: Tensor, values: Tensor) -> None:
    """Additions to one element round one after the other, in the order of the lanes."""
    order = index.argsort(stable=True)
    ascending = index[order]
    turn = torch.arange(index.numel(), device=index.device) - torch.searchsorted(ascending, ascending)
    for lanes in order[turn.argsort(stable=True)].split(turn.bincount().tolist()):
        _at_once(tape, _FADD, index[lanes], values[lanes])


def _one_by_one(tape: Tape, kind: int, index: Tensor, values: Tensor) -> Tensor:
    """Apply lanes in order and return the value each one found, shape (n,)."""
    if tape.padded:
        inside = index < tape.buffer.size
        index, values = index[inside], values[inside]
    if index.unique().numel() == index.numel():
        return _at_once(tape, kind, index, values)
    olds = [_at_once(tape, kind, index[k : k + 1], values[k : k + 1]) for k in range(index.numel())]
    return torch.cat(olds)


def _at_once(tape: Tape, kind: int, index: Tensor, values: Tensor) -> Tensor:
    """Read, compute, write elements that are all different."""
    if tape.records(values):
        old, tape.token = Load.apply(tape.token, tape, index, None)
    else:
        old = tape.contents.index_select(0, index)
    new = _combined(kind, old, values)
    if tape.faithful and tape.buffer.is_float:
        new = rounded(new, tape.buffer.declared)
    if tape.records(new):
        tape.token = Store.apply(tape.token, new, tape, index, None)
    else:
        tape.put(index, new, None)
    return old


def _combined(kind: int, old: Tensor, value: Tensor) -> Tensor:
    if kind in (_ADD, _FADD):
        return old + value
    if kind in (_MAX, _MIN):
        return torch.maximum(old, value) if kind == _MAX else torch.minimum(old, value)
    if kind in (_UMAX, _UMIN):
        flip = torch.iinfo(old.dtype).min
        larger = (old ^ flip) > (value ^ flip)
        return torch.where(larger, old, value) if kind == _UMAX else torch.where(larger, value, old)
    if kind == _EXCHANGE:
        return value
    return {_AND: torch.bitwise_and, _OR: torch.bitwise_or, _XOR: torch.bitwise_xor}[kind](old, value)


@rule("tt.atomic_cas")
def _compare_and_swap(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    pointer, expected, value = operands
    type_ = op.results[0].type
    result = torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype, device=machine.device)
    for target in targets(machine, op, pointer, None, active):
        check_width(machine, op, target.buffer, type_.scalar)
        if target.buffer.is_float != (type_.scalar.kind is Kind.FLOAT):
            raise machine.unsupported(op, "comparing and exchanging the bits of floats is not supported")
        lanes = _lanes(machine, op, target, value, active)
        machine.sanitizer.update(target.buffer, lanes, op)
        tape = machine.tape(target.buffer)
        contents = tape.open_for_writing(lanes.index)
        found = []
        for place, wanted, new in zip(
            lanes.index.tolist(), lanes.select(expected).tolist(), lanes.select(value).tolist(), strict=True
        ):
            old = contents[place].item()
            found.append(old)
            if old == wanted:
                contents[place] = new
            machine.sanitizer.exchanged(target.buffer, lanes, op, place, succeeded=old == wanted)
        result = _with_found(result, lanes, torch.tensor(found, dtype=type_.dtype, device=CPU).to(machine.device))
    return [result]
