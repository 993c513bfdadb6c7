"""Kernels that load by tensor descriptors store their gradients so, too, where those are tiles of a matrix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from schedule_kernels import block_of, made, matrix

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.deposit import NAME, deposited
from kernel_agent.compiler.schedule.describe import FITS, fits
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.twins import without_twins
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

ARGUMENTS = "K:*f16 dK:*f16 dV:*{} keys cols stride unit start scale:f32"
B, KEYS, COLS, WIDTH = 16, 40, 13, 16


def summed(
    b: Builder,
    k: Value,
    dk: Value,
    dv: Value,
    keys: Value,
    cols: Value,
    stride: Value,
    unit: Value,
    start: Value,
    scale: Value,
    *,
    asking: bool = True,
    skewed: bool = False,
    alike: bool = False,
) -> None:
    """dK = scale * sum of k', dV = sum of k' over 3 trips, for tiles of 16 rows; with `alike`, dV is what dK is."""
    own, dims = block_of(b, b.program_id(0, "block"), B, "B"), b.arange(0, B, "B", name="dims")
    inside = b.compare("lt", b.expand(b.add(own, dims) if skewed else own, 1), keys)
    mask = b.logical_and(inside, b.compare("lt", b.expand(dims, 0), cols)) if asking else None
    offsets = b.add(start, matrix(b, own, stride, dims, unit))
    tile = b.cast(b.load(k, offsets, mask, b.const(0.0, "f16") if asking else None), "f32")
    bounds = (b.const(0), b.const(3), b.const(1))
    zero = b.whole(b.const(0.0, "f32"), (B, B))
    (total,) = b.loop(bounds, [zero], lambda _, carries: [b.add(carries[0], tile)], names=["total"])
    product = b.mul(total, scale)
    b.store(dk, offsets, product, mask)
    b.store(dv, offsets, product if alike else total, mask)


def kernel(element: str = "f16", **choices: Any) -> Kernel:
    return made(ARGUMENTS.format(element), functools.partial(summed, **choices), B=B)


def stored(one: Kernel, tensors: dict[str, str] | None = None) -> Any:
    found = deposited(one, Launch.like_forward(1), {"dK": "K", "dV": "V"} if tensors is None else tensors)
    return found and found.described


def blocks_of(one: Kernel) -> list[str]:
    """Gradients that are stored to by descriptors."""
    return [op.base.name for op in one.ops if op.code is Code.STORE_BLOCK]


def test_both_ways_to_store_write_the_same_elements_and_no_others() -> None:
    # 40 rows are two tiles and a half, of 16 columns 13 belong to the matrix: a 7 must be left everywhere else.
    found = stored(kernel())
    assert found is not None
    verify(found.kernel)
    assert blocks_of(found.kernel) == ["dK", "dV"]
    torch.manual_seed(0)
    k = torch.randn(64, WIDTH, dtype=torch.float64)
    numbers = {"keys": KEYS, "cols": COLS, "stride": WIDTH, "unit": 1, "start": 2 * WIDTH, "scale": 0.5}
    results = []
    for by_descriptors in (True, False):
        for op in found.kernel.ops:
            if op.code is Code.CONST and op.attributes.get("symbol") == NAME:
                op.attributes["value"] = by_descriptors
        written = {name: torch.full((64, WIDTH), 7.0, dtype=torch.float64) for name in ("dK", "dV")}
        evaluate(found.kernel, (3,), {"K": k, **written, **numbers})
        results.append(written)
    expected = torch.full((64, WIDTH), 7.0, dtype=torch.float64)
    expected[2 : 2 + KEYS, :COLS] = 3 * k[2 : 2 + KEYS, :COLS]
    for written in results:
        torch.testing.assert_close(written["dV"], expected)
        torch.testing.assert_close(written["dK"][2 : 2 + KEYS, :COLS], 0.5 * expected[2 : 2 + KEYS, :COLS])


def test_descriptors_are_made_before_the_loop_and_each_side_scales_its_own() -> None:
    # Made behind it they would be waited for; a product before the branch would be a variable without a meaning.
    found = stored(kernel())
    assert found is not None
    text = triton_source(found.kernel).text
    before, behind = text.split("    for ")
    assert before.count("tl.make_tensor_descriptor(") == 2
    by_descriptors, by_pointers = behind.split(f"    if {NAME}:\n")[1].split("    else:\n")
    assert by_descriptors.count(".store([") == 2
    assert by_pointers.count("tl.store(") == 2
    assert by_descriptors.count("total * scale") == by_pointers.count("total * scale") == 1


def test_memory_of_a_gradient_is_asked_for_by_its_tensor() -> None:
    # The gradient's own memory does not exist yet where the backward asks.
    found = stored(kernel(), {"dK": "K", "dV": "K"})
    assert found is not None
    assert fits([found]) == f"{FITS}((K, (unit,), (start, stride)))"


@pytest.mark.parametrize("choices", [{"asking": False}, {"skewed": True}], ids=["no mask", "an edge that is no row"])
def test_a_store_that_does_not_say_how_many_rows_there_are_is_left_to_pointers(choices: dict[str, Any]) -> None:
    # A descriptor cuts at an edge: without a number of rows nobody knows where, and another edge it cannot cut.
    assert stored(kernel(**choices)) is None


def test_a_single_gradient_is_left_to_pointers() -> None:
    # Measured: making one descriptor takes longer than the addresses of one store.
    assert stored(kernel(), {"dK": "K"}) is None


def test_sums_of_32_bits_are_left_to_pointers() -> None:
    assert stored(kernel("f32")) is None


def test_only_launches_with_short_rows_are_asked() -> None:
    # Of rows of 128 elements, accumulators leave no room for a third program.
    found = deposited(kernel(), Launch.like_forward(1), {"dK": "K", "dV": "V"})
    assert found is not None
    assert found.condition == "B <= 64"


def test_a_gradient_that_is_another_one_is_not_stored_by_a_descriptor_either() -> None:
    # Were that side of the branch kept, it would store to memory that is not there.
    found = stored(kernel(alike=True))
    assert found is not None
    assert blocks_of(found.kernel) == ["dK", "dV"]
    single = without_twins([found.kernel], ["dK", "dV"], {"dK", "dV"}, set())
    assert single.same == {"dV": "dK"}
    (left,) = single.kernels
    assert left is not None
    assert {op.base.name for op in left.ops if op.code in (Code.STORE, Code.STORE_BLOCK)} == {"dK"}
