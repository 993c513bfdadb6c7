"""Atomic loads and stores (Triton 3.9), with which programs wait for each other. Programs run one by one, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_agent.ir.operations.atomics import Update, read_at, update_at
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


@rule("tt.atomic_load")
def _load(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    pointer, *mask = operands
    return [read_at(machine, op, pointer, mask[0] if mask else None, op.results[0].type, active)]


@rule("tt.atomic_store")
def _store(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    pointer, value, *mask = operands
    element = op.operands[1].type.scalar
    update_at(machine, op, pointer, value, mask[0] if mask else None, element, Update.EXCHANGE, active)
    return []


@rule("tt.atomic_poll")
def _poll(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    """Whether the expected value is there; what no program before wrote does not come while one waits."""
    pointer, expected, *limit = operands
    type_ = op.operands[1].type
    arrived = read_at(machine, op, pointer, None, type_, active) == expected
    if not limit and not bool(arrived.all()):
        raise machine.unsupported(
            op,
            "the program waits for a value that no program before it writes",
            remedy="Programs run in the order of their ids: let later ones wait for earlier ones.",
        )
    return [arrived]
