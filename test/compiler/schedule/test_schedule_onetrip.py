"""Loops over a row that a tile takes whole make one trip, as a constexpr says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from schedule_kernels import made
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.onetrip import one_trip
from kernel_agent.compiler.schedule.revisit import revisited
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

LANES = 8


def normalized(*, first: int = 0, width: int = LANES) -> Kernel:
    """Each row of Y = that row of X over its sum, from a column on."""

    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        start, lanes = b.mul(b.program_id(0), n), b.arange(0, width, "LANES")
        bounds = (b.const(first), n, b.const(width, "i32", "LANES"))

        def tile(index: Value) -> tuple[Value, Value, Value]:
            cols = b.add(index, lanes)
            at, mask = b.add(start, cols), b.compare("lt", cols, n)
            return at, mask, b.load(x, at, mask, b.const(0.0, "f32"))

        (total,) = b.loop(bounds, [b.const(0.0, "f32")], lambda i, sums: [b.add(sums[0], b.sum(tile(i)[2], 0))])

        def stored(index: Value, _: list[Value]) -> list[Value]:
            at, mask, value = tile(index)
            b.store(y, at, b.div(value, total), mask)
            return []

        b.loop(bounds, [], stored)

    return revisited(made("X:*f32 Y:*f32 n", build, LANES=width))


def shortened(kernel: Kernel) -> Any:
    return one_trip(kernel, Launch.like_forward(1, None), "ONCE")


def test_a_row_of_one_tile_is_one_trip() -> None:
    found = shortened(normalized())
    assert found is not None
    verify(found.kernel)
    assert found.condition == "n > 0 and n <= LANES"
    ends = [op.operands[1].producer for op in found.kernel.ops if op.code is Code.FOR]
    assert all(end is not None and end.code is Code.IF for end in ends)


@pytest.mark.parametrize("n", [5, 8, 19])
def test_rows_of_any_length_give_the_same(n: int) -> None:
    # Masks ask for the end of the row, whatever the loops go to: were they cut, too, the last tile of 19 would be lost.
    found, x = shortened(normalized()), torch.rand(3, n, dtype=torch.float64) + 1
    y = torch.full_like(x, torch.nan)
    evaluate(found.kernel, (3,), {"X": x, "Y": y, "n": n})
    torch.testing.assert_close(y, x / x.sum(1, keepdim=True))


def test_loops_that_begin_behind_the_first_column_stay() -> None:
    # A tile as long as the row does not reach its end from there.
    assert shortened(normalized(first=1)) is None


@pytest.mark.parametrize(("width", "once", "loads"), [(8, True, 1), (8, False, 2), (16384, True, 1), (32768, True, 2)])
def test_a_row_of_one_tile_is_loaded_once_where_registers_keep_it(
    width: int, once: bool, loads: int, tmp_path: Path
) -> None:
    # Triton takes two loads for one only where they agree in everything, eviction policies among it: with those of two
    # trips, a softmax of short rows asked for all of them twice. One of 32,768 columns that asked once was spilled: on
    # an H200 it took 487 us where 378 do.
    source = triton_source(shortened(normalized(width=width)).kernel)
    path = tmp_path / "kernel.py"
    path.write_text(source.module_text)
    function = runpy.run_path(str(path))[source.name]
    types = {"X": "*fp32", "Y": "*fp32", "n": "i32", "LANES": "constexpr", "ONCE": "constexpr"}
    made = ASTSource(function, types, {"LANES": width, "ONCE": once})
    compiled = triton.compile(made, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["ttgir"].count("tt.load") == loads
