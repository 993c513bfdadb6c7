"""Adjoint-like kernels made by hand: what the passes are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def made(arguments: str, build: Callable[..., Any], *, name: str = "kernel", **constants: int) -> Kernel:
    """A kernel of arguments like `dX:*f32 N` (i32 unless they say otherwise); `build(b, *arguments)` fills it."""
    values = [Value(element or "i32", (), given) for given, _, element in (a.partition(":") for a in arguments.split())]
    kernel = Kernel(name, values, extents={value: key for key, value in constants.items()}, constants=dict(constants))
    build(Builder(kernel, frozenset(value for value in values if value.name.startswith("d"))), *values)
    return kernel


def add_to(b: Builder, base: Value, offset: Value, value: Value, mask: Value | None = None) -> None:
    """An atomic addition."""
    b.store(base, offset, value, mask, Code.ATOMIC_ADD)


def block_of(b: Builder, number: Value, extent: int, symbol: str) -> Value:
    """number * extent + arange(extent)."""
    return b.add(b.mul(number, b.const(extent, "i32", symbol)), b.arange(0, extent, symbol))


def matrix(b: Builder, rows: Value, row_stride: Value, cols: Value, col_stride: Value) -> Value:
    """Offsets of a tile."""
    return b.add(b.mul(b.expand(rows, 1), row_stride), b.mul(b.expand(cols, 0), col_stride))


def rows_adjoint(b: Builder, x: Value, w: Value, dy: Value, dx: Value, dw: Value, stride: Value, n: Value) -> None:
    """Of y = x * w by rows, one program each: dx = dy * w, dw = the sum of dy * x over the rows."""
    row, cols = b.program_id(0, "row"), b.arange(0, 8, "BLOCK")
    mask = b.compare("lt", cols, n)
    at = b.add(b.mul(row, stride), cols)
    cotangent, zero = b.load(dy, at, mask, b.const(0.0, "f32")), b.const(0.0, "f32")
    add_to(b, dx, at, b.mul(cotangent, b.load(w, cols, mask, zero)), mask)
    add_to(b, dw, cols, b.mul(cotangent, b.load(x, at, mask, zero)), mask)


ROWS = "X:*f32 W:*f32 dY:*f32 dX:*f32 dW:*f32 stride N"
