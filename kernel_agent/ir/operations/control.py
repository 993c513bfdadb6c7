"""Loops, conditions and calls. Programs that diverge are compacted and joined again, never masked."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.errors import LaunchError
from kernel_agent.ir.memory import CPU
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Block, Op, walk
from kernel_agent.ir.sanitizer.promises import breaks_loop
from kernel_agent.ir.segments import Loop, Stretch
from kernel_agent.ir.values import Active, RuntimeValue, join_rows, on_device, take_rows

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_PATIENCE = 2_000
"""Rounds that a loop may wait for memory to change."""
_STORES = frozenset({"tt.store", "tt.descriptor_store"})

Pieces = list[tuple[Tensor, list[RuntimeValue]]]
"""Values of programs that left a loop: (positions in the loop's programs, values)."""


def _join(pieces: Pieces, size: int) -> list[RuntimeValue]:
    count = len(pieces[0][1])
    return [join_rows([(rows, values[k]) for rows, values in pieces], size) for k in range(count)]


def _all_rows(active: Active) -> Tensor:
    return torch.arange(active.size, device=active.ids.device)


def _together(machine: Machine, values: list[Tensor]) -> list[Tensor]:
    """Values on one device: the host, where all of them are there."""
    if all(value.is_cpu for value in values):
        return values
    return [on_device(value, machine.device) for value in values]


@rule("scf.for")
def _for(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    low, high, step = (value.to(torch.int64) for value in _together(machine, operands[:3]))
    carried: list[RuntimeValue] = list(operands[3:])
    body = op.regions[0][0]
    # the only question to a device: where programs leave is decided by the host
    trips = (high - low + step - 1).div(step, rounding_mode="floor").clamp(min=0).cpu()
    lengths = trips.unique().tolist()
    broken = None if machine.quiet else breaks_loop(op, low, step, trips)
    if broken is not None:
        machine.sanitizer.promise(
            op, "tl.multiple_of is promised of the loop's variable, which is none", broken, active
        )
    current, rows, places = active, _all_rows(active), torch.arange(active.size, device=CPU)
    left: Pieces = []
    loop, k = Loop(machine, op), 0
    while k < lengths[-1]:
        if k >= lengths[0]:
            going = (trips.expand(active.size) if trips.size(0) == 1 else trips)[places] > k
            if not bool(going.all()):
                places = places[going]
                stays, leaves = (
                    part.nonzero().flatten().to(machine.device, non_blocking=True) for part in (going, ~going)
                )
                left.append((rows[leaves], [take_rows(value, leaves) for value in carried]))
                carried = [take_rows(value, stays) for value in carried]
                rows = rows[stays]
                current = active.subset(rows)
        first, each = (low, step) if current is active else (take_rows(low, rows), take_rows(step, rows))
        until = lengths[bisect_right(lengths, k)]  # where the next programs leave
        count = loop.ahead(until - k, lengths[-1] - k)
        carried = loop.run(_iterations(body, first + k * each, each, count), carried, current, count)
        k += count
    loop.end()
    if not left:
        return carried
    return _join([*left, (rows, carried)], active.size) if carried else []


def _iterations(body: Block, first: Tensor, step: Tensor, count: int) -> Stretch:
    def run(machine: Machine, carried: list[RuntimeValue], active: Active) -> list[RuntimeValue]:
        for k in range(count):
            counter = (first + k * step).to(body.arguments[0].type.dtype)
            carried = machine.run_values(body, [counter, *carried], active)
        return carried

    return run


@rule("scf.while")
def _while(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    before = op.regions[0][0]
    current, rows = active, _all_rows(active)
    passed = machine.run_values(before, operands, active)
    left: Pieces = []
    loop = Loop(machine, op)
    while True:
        going = on_device(passed[0], machine.device).expand(current.size)
        if not bool(going.all()):
            stays, leaves = going.nonzero().flatten(), (~going).nonzero().flatten()
            left.append((rows[leaves], [take_rows(value, leaves) for value in passed[1:]]))
            rows = rows[stays]
            if rows.numel() == 0:
                loop.end()
                return _join(left, active.size)
            passed = [take_rows(value, stays) for value in passed]
            current = active.subset(rows)
        count = loop.ahead(sys.maxsize, 1)
        passed = loop.run(_rounds(op, count), passed, current, count)


def _unchanged(earlier: list[RuntimeValue], later: list[RuntimeValue]) -> bool:
    """Whether a round left all that a loop carries as it was."""
    return all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
        for a, b in zip(earlier, later, strict=True)
    )


def _waits_forever(machine: Machine, op: Op, active: Active) -> LaunchError:
    """A program looks again and again at memory that no program before it will change."""
    place = machine.module.place(op)
    name = machine.module.entry.name
    where = f"{name}, {place.file.rpartition('/')[2]}:{place.line}: " if place else f"{name}: "
    program = int(active.ids[0])
    x, y, _ = machine.grid
    return LaunchError(
        f"{where}program {(program % x, program // x % y, program // (x * y))} waits forever: {_PATIENCE} rounds of "
        "this loop changed nothing",
        remedy="Let programs wait only for programs with lower ids: they run in that order, one at a time.",
        kernel=name,
        op=op.name,
        file=place.file if place else "",
        line=place.line if place else None,
    )


def _rounds(op: Op, most: int) -> Stretch:
    """Rounds of a while loop, until a program leaves it; a condition and the values passed with it are carried."""
    before, after = op.regions[0][0], op.regions[1][0]
    only_waits = not any(inner.name in _STORES for region in op.regions for inner in walk(region))

    def run(machine: Machine, passed: list[RuntimeValue], active: Active) -> list[RuntimeValue]:
        for turn in range(most):
            earlier = passed
            passed = machine.run_values(before, machine.run_values(after, passed[1:], active), active)
            if not bool(passed[0].all()):
                break
            if turn > _PATIENCE and only_waits and _unchanged(earlier, passed):
                raise _waits_forever(machine, op, active)
        return passed

    return run


@rule("scf.if")
def _if(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    condition = operands[0]
    then, otherwise = op.regions[0], op.regions[1]
    if bool(condition.all()):
        return machine.run_values(then[0], [], active)
    if not bool(condition.any()):
        return machine.run_values(otherwise[0], [], active) if otherwise else []
    if machine.in_lanes:  # elements of one tile differ: combine functions have no effects, so both sides are computed
        both = zip(machine.run_values(then[0], [], active), machine.run_values(otherwise[0], [], active), strict=True)
        condition, *sides = (on_device(side, machine.device) for side in (condition, *itertools.chain(*both)))
        return [torch.where(condition, *sides[k : k + 2]) for k in range(0, len(sides), 2)]
    pieces: Pieces = []
    for taken, region in ((condition, then), (~condition, otherwise)):
        rows = taken.nonzero().flatten()
        pieces.append((rows, machine.run_values(region[0], [], active.subset(rows)) if region else []))
    return _join(pieces, active.size)


@rule("tt.call")
def _call(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    return machine.run_function(machine.module.callee(op), operands, active)


@rule("tt.assert", "cf.assert")
def _assert(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    held = operands[0]
    if machine.quiet or not bool(held.all()):
        text = str(op.attributes.get("message", op.attributes.get("msg", "")))
        machine.sanitizer.assertion(op, text, ~held, active)
    return []


@rule("llvm.intr.assume")
def _assume(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    held = operands[0]
    if machine.quiet or not bool(held.all()):
        machine.sanitizer.promise(op, "what tl.assume promises is not so", ~held, active)
    return []


@rule(
    *("tt.print", "gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier"),
    *("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents"),
)
def _nothing(_: Machine, __: Op, ___: list[Any], ____: Active) -> list[RuntimeValue]:
    return []
