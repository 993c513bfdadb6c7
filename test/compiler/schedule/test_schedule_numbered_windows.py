"""Windows whose stride and dilation are numbers of the call are gathered as those of constexprs are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import agree, atomics, named_source

from kernel_agent.compiler.plan import NESTED
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.stub.lines import HELPERS

TYPES = {"X": "*fp32", "Weight": "*fp32", "Y": "*fp32"}
SIZES = ("CI", "H", "W", "HO", "WO", "stride", "pad", "apart")


@triton.jit
def numbered(
    X, Weight, Y, CI, H, W, HO, WO, stride, pad, apart, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    plane = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in range(CI):
        for i in range(K):
            for j in range(K):
                h = o // WO * stride - pad + i * apart
                w = o % WO * stride - pad + j * apart
                there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o < HO * WO)
                x = tl.load(X + (plane * CI + c) * H * W + h * W + w, mask=there, other=0.0)
                total += x * tl.load(Weight + (c * K + i) * K + j)
    tl.store(Y + plane * HO * WO + o, total, mask=o < HO * WO)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("taps", "stride", "pad", "apart"), [(3, 1, 1, 1), (3, 2, 1, 1), (4, 3, 1, 1), (3, 2, 2, 2)])
def test_rows_and_columns_are_told_by_the_conditions_that_ask_about_them(
    taps: int, stride: int, pad: int, apart: int
) -> None:
    # The address has stride * W for a row and H * W for a channel: neither says which is a step of windows. Taken for
    # what elements are apart, a stride of 2 left every gradient of a pooling to 50 million atomic additions.
    kernel = named_source(numbered, {**TYPES, **dict.fromkeys(SIZES, "i32")}, K=taps, BLOCK=4)
    height, width = 6, 7
    high, wide = ((size + 2 * pad - apart * (taps - 1) - 1) // stride + 1 for size in (height, width))
    given = {"X": drawn(2, 2, height, width), "Weight": drawn(2, taps, taps), "CI": 2, "H": height, "W": width}
    given |= {"HO": high, "WO": wide, "stride": stride, "pad": pad, "apart": apart}
    grid = 2, triton.cdiv(high * wide, 4)
    numbers: dict[str, Any] = {name: one for name, one in given.items() if isinstance(one, int)}
    exec(HELPERS[NESTED], numbers)
    calls = Calls(({**numbers, "grid0": grid[0], "grid1": grid[1], "K": taps, "BLOCK": 4},))
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    made = {plan.schedule: plan for plan in plans(kernel, adjoint, 2, calls=calls)}
    assert not atomics(made["owned"])
    assert "stride >= 1" in {fact.expression for fact in made["owned"].facts}
    agree(made, given, {"Y": drawn(2, high, wide)}, grid, K=taps, BLOCK=4)
