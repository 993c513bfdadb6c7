"""Loops over rows load ahead, with warps and programs that suit the size of a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import ROWS, add_to, made, rows_adjoint

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.pace import pace
from kernel_agent.compiler.schedule.rows import persistent
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Kernel, Value


def pace_of(kernel: Kernel) -> dict[str, str] | None:
    found = pace(Forms(kernel, Launch.like_forward(1)), 0)
    return None if found is None else dict(found.settings)


def numbers(settings: dict[str, str], **names: object) -> dict[str, int]:
    scope = dict(names)
    for name, text in settings.items():
        scope[name] = eval(text, scope)
    return {name: scope[name] for name in settings}


@pytest.mark.parametrize(
    ("block", "dtype", "expected"),
    [
        (1024, torch.float32, (4, 4, 3)),
        (4096, torch.bfloat16, (4, 2, 3)),
        (4096, torch.float32, (8, 1, 3)),
        (8192, torch.float32, (16, 1, 3)),
        (8192, torch.float64, (8, 1, 2)),  # three rows in flight would not fit shared memory
        (16384, torch.bfloat16, (16, 1, 1)),  # and of these one row fills the registers
        (16384, torch.float32, (8, 1, 1)),
    ],
)
def test_longer_rows_get_more_warps_until_they_need_registers_and_fewer_are_in_flight(
    block: int, dtype: torch.dtype, expected: tuple[int, int, int]
) -> None:
    settings = pace_of(made(ROWS, rows_adjoint, BLOCK=8))
    assert settings is not None
    x = torch.empty(1, dtype=dtype)
    found = numbers(settings, BLOCK=block, X=x, dY=x)
    assert (found["num_warps"], found["per_sm"], found["STAGES"]) == expected


@pytest.mark.parametrize("widths", [2, 4, 6, 8, 10, 12, 16, 24])
def test_warps_are_a_power_of_two_whatever_is_loaded_of_a_row(widths: int) -> None:
    # Three tensors of two bytes gave six warps for 4,096 columns, which Triton refuses to compile.
    settings = pace_of(made(ROWS, rows_adjoint, BLOCK=8))
    assert settings is not None
    for block in (1024, 2048, 4096, 8192, 16384):
        warps = eval(settings["num_warps"], {"row_bytes": block * widths, "BLOCK": block})
        assert warps in (4, 8, 16)


def test_what_all_rows_share_is_not_counted_as_in_flight() -> None:
    # W is loaded before the loop: only X and dY take room for each trip.
    settings = pace_of(made(ROWS, rows_adjoint, BLOCK=8))
    assert settings is not None
    assert settings["row_bytes"] == "BLOCK * (dY.element_size() + X.element_size())"


def test_rows_in_flight_are_a_constexpr_of_the_loop() -> None:
    found = persistent(made(ROWS, rows_adjoint, BLOCK=8), {"X": "dX", "W": "dW"}, Launch.like_forward(1), 0)
    source = triton_source(found.kernel)
    assert "in tl.range(pid, num_rows, tl.num_programs(0), num_stages=STAGES):" in source.text
    assert "STAGES" in source.constexprs


def test_a_loop_over_rows_that_holds_a_loop_is_not_pipelined() -> None:
    def build(b: Builder, x: Value, w: Value, dx: Value, dw: Value, n: Value) -> None:
        row, lane = b.program_id(0), b.arange(0, 8, "BLOCK")

        def body(off: Value, carries: Sequence[Value]) -> Sequence[Value]:
            at = b.add(b.add(b.mul(row, n), off), lane)
            add_to(b, dx, at, b.load(x, at))
            return []

        b.loop((b.const(0), n, b.const(8, "i32", "BLOCK")), [], body)
        add_to(b, dw, lane, b.load(w, b.add(row, lane)))

    settings = pace_of(made("X:*f32 W:*f32 dX:*f32 dW:*f32 N", build, BLOCK=8))
    assert settings is not None
    assert list(settings) == ["num_warps", "per_sm"]


def test_kernels_that_load_no_rows_are_launched_as_the_forward() -> None:
    def build(b: Builder, w: Value, dw: Value) -> None:
        lane = b.arange(0, 8, "BLOCK")
        add_to(b, dw, lane, b.load(w, lane))

    assert pace_of(made("W:*f32 dW:*f32", build, BLOCK=8)) is None


@pytest.mark.parametrize(
    ("block", "dtype", "expected"),
    [
        (4096, torch.bfloat16, (4, 3, False)),
        (8192, torch.bfloat16, (8, 3, False)),
        (8192, torch.float32, (8, 3, True)),
        (8192, torch.float64, (8, 2, True)),  # the weights are on their way, too, and shared memory holds no more
        (16384, torch.bfloat16, (8, 1, True)),
    ],
)
def test_rows_beside_sums_that_fill_the_registers_have_few_warps_and_load_the_weights(
    block: int, dtype: torch.dtype, expected: tuple[int, int, bool]
) -> None:
    found = pace(Forms(made(ROWS, rows_adjoint, BLOCK=8), Launch.like_forward(1)), 0)
    assert found is not None
    x = torch.empty(1, dtype=dtype)
    settings = numbers(dict(found.settings) | found.crowded(("W",), "FETCH"), BLOCK=block, X=x, dY=x, W=x)
    assert (settings["num_warps"], settings["STAGES"], settings["FETCH"]) == expected


@pytest.mark.parametrize(
    ("block", "dtype", "expected"),
    [
        (8192, torch.bfloat16, (8, 3, False, False)),
        (16384, torch.bfloat16, (32, 3, True, False)),
        (16384, torch.float32, (8, 1, False, True)),  # shared memory does not hold two such rows of each
        (32768, torch.bfloat16, (8, 1, False, True)),
    ],
)
def test_long_rows_of_few_tensors_fly_ahead_with_the_weights(
    block: int, dtype: torch.dtype, expected: tuple[int, int, bool, bool]
) -> None:
    # On an H200, rows of 15,872 took 236 us where they were loaded again, and 208 so.
    found = pace(Forms(made(ROWS, rows_adjoint, BLOCK=8), Launch.like_forward(1)), 0)
    assert found is not None
    x = torch.empty(1, dtype=dtype)
    settings = numbers(found.streamed(("W",), "FETCH", "RELOAD"), BLOCK=block, X=x, dY=x, W=x)
    assert (settings["num_warps"], settings["STAGES"], settings["FETCH"], settings["RELOAD"]) == expected
