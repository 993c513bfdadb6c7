"""Loops that load tiles by descriptors load numbers of the tiles' rows so, too, where no row is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_plans import run
from test_schedule_describe import D, attention

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.describe import NAME as DESCRIPTORS
from kernel_agent.compiler.schedule.strips import NAME
from kernel_agent.compiler.schedule.whole import NAME as WHOLE
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel


def say(kernel: Kernel, value: bool) -> None:
    """What the constexpr is when the kernel is evaluated."""
    for op in kernel.ops:
        if op.code is Code.CONST and op.attributes.get("symbol") == NAME:
            op.attributes["value"] = value


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_both_ways_to_load_what_rows_keep_give_the_same_gradients(causal: bool) -> None:
    # 64 rows are two whole blocks: a strip that began at another row, or head, would change all gradients.
    plan = attention(causal)["split"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, D, dtype=torch.float64) for rows in (64, 72, 72))
    scores = 0.25 * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(64, 72, dtype=torch.bool).triu(9), float("-inf"))
    given: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": 64, "m": 72, "scale": 0.25}
    given |= {"o_ptr": scores.softmax(-1) @ v, "lse_ptr": scores.logsumexp(-1)}
    cotangent = torch.randn(2, 64, D, dtype=torch.float64)
    found = []
    for by_descriptors in (True, False):
        for step in plan.steps:
            say(step.kernel, by_descriptors)
        found.append(run(plan, given, {"o_ptr": cotangent}, (2, 2))[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])


def test_strips_are_loaded_by_their_first_row() -> None:
    text = triton_source(attention(False)["split"].steps[-1].kernel).text
    made_once, loop = text.split("    for ")
    assert "lse_strips = tl.make_tensor_descriptor(lse_ptr + " in made_once
    assert f"        if {NAME}:\n" in loop
    assert loop.count("_strips.load([row_start])") == 2


def test_a_launch_must_have_whole_blocks_and_begin_each_strip_at_16_bytes() -> None:
    # A descriptor gives 0 for rows beyond the last, where the load gives inf; hardware refuses other addresses.
    condition = attention(False)["split"].settings[NAME]
    assert condition == f"{DESCRIPTORS} and {WHOLE} and (n) % 4 == 0 and lse_ptr.data_ptr() % 16 == 0"


def test_the_kernel_that_computes_delta_has_no_strips() -> None:
    # What is loaded before the loop is loaded once, and delta is written there.
    first = attention(False)["split"].steps[0].kernel
    assert NAME not in first.constants
