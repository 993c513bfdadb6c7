"""`program_number`, `program_count`: rows of memory that each program of a launch has to itself."""

from __future__ import annotations

from collections.abc import Iterable

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Value


def program_number(b: Builder, axes: Iterable[int]) -> Value:
    """The number of this program among those along some axes, i64; the last of them runs fastest."""
    number: Value | None = None
    for axis in axes:
        own = b.cast(b.program_id(axis), "i64")
        number = own if number is None else b.add(b.mul(number, b.cast(b.num_programs(axis), "i64")), own)
    return b.const(0, "i64") if number is None else number


def program_count(b: Builder, axes: Iterable[int]) -> Value:
    """How many programs there are along some axes, i64."""
    count = b.const(1, "i64")
    for axis in axes:
        count = b.mul(count, b.cast(b.num_programs(axis), "i64"))
    return count
