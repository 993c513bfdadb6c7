"""Atomic updates. When the old value is used, or memory is compared and exchanged, order matters: such kernels run
program by program (see `launch`), and here lane by lane."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.memory import Add, Buffer, Extreme, Load, Store, Tape
from kernel_agent.ir.operations.access import fits
from kernel_agent.ir.operations.bits import to_bits
from kernel_agent.ir.operations.integers import ordered
from kernel_agent.ir.operations.pointers import Target, targets
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.operations.reinterpret import from_memory, to_memory
from kernel_agent.ir.program import Op
from kernel_agent.ir.rounding import rounded
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.types import Kind, Type, float_type
from kernel_agent.ir.values import Active, Bits, Pointer, RuntimeValue, mapped

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


class Update(enum.IntEnum):
    """What an atomic does to memory; up to 10 the values of the attribute `atomic_rmw_op`."""

    AND = 1
    OR = 2
    XOR = 3
    ADD = 4
    FADD = 5
    MAX = 6
    MIN = 7
    UMAX = 8
    UMIN = 9
    EXCHANGE = 10
    FLOAT_MAX = 11
    """Of equal floats the one in memory stays."""
    FLOAT_MIN = 12


OF_DESCRIPTORS = {1: Update.ADD, 2: Update.MIN, 3: Update.MAX, 6: Update.AND, 7: Update.OR, 8: Update.XOR}
"""By the value of the attribute `kind` of `tt.descriptor_reduce`."""
EXTREMES = frozenset({Update.MAX, Update.MIN, Update.UMAX, Update.UMIN})
"""Those that keep one of two values."""


@rule("tt.atomic_rmw")
def _read_modify_write(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    pointer, value, *rest = operands
    type_ = op.results[0].type
    used = op.results[0].id in machine.module.used
    result: RuntimeValue = torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype, device=machine.device)
    for target in targets(machine, op, pointer, rest[0] if rest else None, active):
        check_width(machine, op, target, type_.scalar)
        kind = _kind(machine, op, target.buffer, type_.scalar)
        lanes = _lanes(machine, op, target, value, active)
        stored = to_memory(machine, op, target.buffer, value, type_.scalar)
        values = lanes.select(stored)
        if kind in (Update.FLOAT_MAX, Update.FLOAT_MIN):
            _check_sign(machine, op, stored, lanes.valid)
        machine.sanitizer.update(target.buffer, lanes, op)
        tape = machine.tape(target.buffer)
        if used:
            old = _one_by_one(tape, kind, lanes.index, values)
            result = _with_found(machine, op, target.buffer, type_, result, lanes, old)
        else:
            update(machine, op, tape, kind, lanes.index, values)
    return [result]


def update_at(
    machine: Machine,
    op: Op,
    pointer: Pointer,
    value: RuntimeValue,
    mask: Tensor | None,
    element: Type,
    kind: Update,
    active: Active,
) -> None:
    """Update memory at the pointers; nobody asks for the old values."""
    for target in targets(machine, op, pointer, mask, active):
        check_width(machine, op, target, element)
        lanes = _lanes(machine, op, target, value, active)
        values = lanes.select(to_memory(machine, op, target.buffer, value, element))
        machine.sanitizer.update(target.buffer, lanes, op)
        update(machine, op, machine.tape(target.buffer), kind, lanes.index, values)


def read_at(
    machine: Machine, op: Op, pointer: Pointer, mask: Tensor | None, type_: Type, active: Active
) -> RuntimeValue:
    """What memory holds at the pointers, read atomically."""
    result: RuntimeValue = torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype, device=machine.device)
    for target in targets(machine, op, pointer, mask, active):
        check_width(machine, op, target, type_.scalar)
        lanes = _lanes(machine, op, target, result, active)
        machine.sanitizer.update(target.buffer, lanes, op)
        tape = machine.tape(target.buffer)
        result = _with_found(machine, op, target.buffer, type_, result, lanes, _found(tape, lanes.index))
    return result


def _found(tape: Tape, index: Tensor, *values: Tensor) -> Tensor:
    """Elements (n,) of memory, recorded if `values` or what was there before are."""
    if tape.records(*values):
        old, tape.token = Load.apply(tape.token, tape, index, None)
        return old
    return tape.contents.index_select(0, index)


def check_width(machine: Machine, op: Op, target: Target, element: Type) -> None:
    """Atomic updates work on whole elements. Raises `UnsupportedOp` where a buffer holds other ones."""
    if not fits(machine, op, target, element):
        declared = str(target.buffer.declared).removeprefix("torch.")
        message = f"updating {target.buffer.name} ({declared}) as {element.name} atomically is not supported"
        raise machine.unsupported(op, message)


def _kind(machine: Machine, op: Op, buffer: Buffer, element: Type) -> Update:
    """The update to perform. Triton updates float extremes as integers: positive values signed, negative ones
    unsigned and therefore reversed."""
    kind = Update(op.attributes["atomic_rmw_op"])
    if not buffer.is_float or element.kind is not Kind.INT or kind == Update.EXCHANGE:
        return kind
    if kind not in _ON_PATTERNS:
        raise machine.unsupported(op, f"an integer update of the bits of {buffer.name}'s floats is not supported")
    return _ON_PATTERNS[kind]


_ON_PATTERNS = {
    Update.MAX: Update.FLOAT_MAX,
    Update.MIN: Update.FLOAT_MIN,
    Update.UMAX: Update.FLOAT_MIN,
    Update.UMIN: Update.FLOAT_MAX,
}


def _check_sign(machine: Machine, op: Op, values: Tensor, valid: Tensor | None) -> None:
    """Patterns of negative floats have the reverse order when compared signed, as those of positive ones unsigned."""
    wrong = torch.signbit(values.detach()) == (op.attributes["atomic_rmw_op"] in (Update.MAX, Update.MIN))
    if bool((wrong if valid is None else wrong & valid).any()):
        raise machine.unsupported(op, "an extreme of the bits of floats of both signs is not supported")


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


def _with_found(
    machine: Machine, op: Op, buffer: Buffer, type_: Type, result: RuntimeValue, lanes: Lanes, old: Tensor
) -> RuntimeValue:
    """The result with what these lanes found, (n,); other lanes may have gone to other buffers."""
    found = from_memory(machine, op, buffer, old, type_.scalar)
    spread = mapped(found, lanes.spread)
    if lanes.valid is None:
        return spread
    if isinstance(spread, Bits):
        return spread.choose(lanes.valid, result)
    return torch.where(lanes.valid, spread, result)


def update(machine: Machine, op: Op, tape: Tape, kind: Update, index: Tensor, values: Tensor) -> None:
    """Apply all lanes (n,) at once; the old values are not asked for."""
    records = tape.records(values)
    if kind in (Update.ADD, Update.FADD):
        if records:
            tape.token = Add.apply(tape.token, values, tape, index)
        elif tape.faithful and tape.buffer.is_float:
            _add_in_turn(tape, index, values)
        else:
            tape.open_for_writing(index).index_add_(0, index, values)
    elif kind in (Update.MAX, Update.MIN, Update.FLOAT_MAX, Update.FLOAT_MIN):
        largest = kind in (Update.MAX, Update.FLOAT_MAX)
        if records:
            tape.token = Extreme.apply(tape.token, values, tape, index, largest)
        else:
            tape.open_for_writing(index).scatter_reduce_(0, index, values, "amax" if largest else "amin")
    elif kind == Update.EXCHANGE:
        owner = tape.owners(index)
        if records:
            tape.token = Store.apply(tape.token, values, tape, index, owner)
        else:
            tape.put(index, values, owner)
    elif kind in (Update.AND, Update.OR, Update.XOR, Update.UMAX, Update.UMIN):
        _one_by_one(tape, kind, index, values)
    else:
        raise machine.unsupported(op, f"atomic operation {kind} is not supported")


def _add_in_turn(tape: Tape, index: Tensor, values: Tensor) -> None:
    """Additions to one element round one after the other, in the order of the lanes."""
    order = index.argsort(stable=True)
    ascending = index[order]
    turn = torch.arange(index.numel(), device=index.device) - torch.searchsorted(ascending, ascending)
    for lanes in order[turn.argsort(stable=True)].split(turn.bincount().tolist()):
        _at_once(tape, Update.FADD, index[lanes], values[lanes])


def _one_by_one(tape: Tape, kind: Update, index: Tensor, values: Tensor) -> Tensor:
    """Apply lanes in order and return the value each one found, shape (n,)."""
    if tape.padded:
        inside = index < tape.buffer.size
        index, values = index[inside], values[inside]
    if index.unique().numel() == index.numel():
        return _at_once(tape, kind, index, values)
    olds = [_at_once(tape, kind, index[k : k + 1], values[k : k + 1]) for k in range(index.numel())]
    return torch.cat(olds)


def _at_once(tape: Tape, kind: Update, index: Tensor, values: Tensor) -> Tensor:
    """Read, compute, write elements that are all different."""
    old = _found(tape, index, values)
    new = _combined(kind, old, values)
    if tape.faithful and tape.buffer.is_float:
        new = rounded(new, tape.buffer.declared)
    if tape.records(new):
        tape.token = Store.apply(tape.token, new, tape, index, None)
    else:
        tape.put(index, new, None)
    return old


def _combined(kind: Update, old: Tensor, value: Tensor) -> Tensor:
    if kind in (Update.ADD, Update.FADD):
        return old + value
    if kind in (Update.MAX, Update.FLOAT_MAX):
        return torch.where((value > old) | _nan(value), value, old)
    if kind in (Update.MIN, Update.FLOAT_MIN):
        return torch.where((value < old) | _nan(value), value, old)
    if kind in (Update.UMAX, Update.UMIN):
        larger = ordered(old) > ordered(value)
        return torch.where(larger, old, value) if kind == Update.UMAX else torch.where(larger, value, old)
    if kind == Update.EXCHANGE:
        return value
    return {Update.AND: torch.bitwise_and, Update.OR: torch.bitwise_or, Update.XOR: torch.bitwise_xor}[kind](old, value)


def _nan(value: Tensor) -> Tensor:
    return value.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)


@rule("tt.atomic_cas")
def _compare_and_swap(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    """Lane by lane. Floats are compared as the device does, by their bits at the declared width."""
    pointer, expected, value = operands
    type_ = op.results[0].type
    result: RuntimeValue = torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype, device=machine.device)
    for target in targets(machine, op, pointer, None, active):
        buffer = target.buffer
        check_width(machine, op, target, type_.scalar)
        lanes = _lanes(machine, op, target, value, active)
        machine.sanitizer.update(buffer, lanes, op)
        tape = machine.tape(buffer)
        wanted = lanes.select(_pattern(machine, op, expected, type_.scalar))
        new = lanes.select(to_memory(machine, op, buffer, value, type_.scalar))
        found = []
        for k in range(lanes.index.numel()):
            lane = slice(k, k + 1)
            old, done = _swap(machine, op, tape, lanes.index[lane], wanted[lane], new[lane])
            machine.sanitizer.exchanged(buffer, lanes, op, int(lanes.index[k]), succeeded=done)
            found.append(old)
        old = torch.cat(found) if found else tape.contents[:0]
        result = _with_found(machine, op, buffer, type_, result, lanes, old)
    return [result]


def _pattern(machine: Machine, op: Op, value: RuntimeValue, element: Type) -> Tensor:
    if element.kind is Kind.FLOAT:
        value = to_bits(machine, value, element, op)
    return value.pattern if isinstance(value, Bits) else value


def _swap(machine: Machine, op: Op, tape: Tape, index: Tensor, wanted: Tensor, new: Tensor) -> tuple[Tensor, bool]:
    """Compare and exchange one element, all tensors (1,): what was there, and whether it was exchanged."""
    old = _found(tape, index, new)
    pattern = _pattern(machine, op, old, float_type(tape.buffer.declared)) if tape.buffer.is_float else old
    if bool(pattern != wanted):
        return old, False
    if tape.records(new):
        tape.token = Store.apply(tape.token, new, tape, index, None)
    else:
        tape.put(index, new, None)
    return old, True
