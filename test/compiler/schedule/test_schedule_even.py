"""Masks of rows ask nothing where a launch says that the rows are whole tiles."""

from __future__ import annotations

import torch
from schedule_kernels import made

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.even import evened
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

TILE = 4


def copied_rows(step: int = TILE) -> Kernel:
    """Y = X, by tiles of rows that begin at every `step`-th one."""

    def build(b: Builder, x: Value, y: Value, m: Value, tiles: Value) -> None:
        lanes = b.arange(0, TILE, "BLOCK_M")

        def body(tile: Value, _: list[Value]) -> list[Value]:
            rows = b.add(b.mul(tile, b.const(step, "i32", "BLOCK_M" if step == TILE else "STEP")), lanes)
            mask = b.compare("lt", rows, m)
            b.store(y, rows, b.load(x, rows, mask, b.const(0.0, "f32")), mask)
            return []

        b.loop((b.const(0), tiles, b.const(1)), [], body, index_name="tile", certain=True, num_stages="STAGES")

    return made("X:*f32 Y:*f32 M tiles", build, BLOCK_M=TILE, STAGES=1, STEP=step)


def test_a_launch_says_whether_rows_are_whole_tiles() -> None:
    found = evened(copied_rows(), "STAGES", "grid0", "EVEN")
    assert found is not None
    verify(found.kernel)
    # The last row of the last tile must be inside: of any grid, not only of one that is rounded up from M.
    assert found.condition == "grid0 * BLOCK_M <= M"
    assert "mask = (x_offs < M) | EVEN\n" in triton_source(found.kernel).text


def test_masks_still_ask_where_a_launch_does_not_say_so() -> None:
    found = evened(copied_rows(), "STAGES", "grid0", "EVEN")
    assert found is not None
    later = prune(found.kernel)
    assert any(op.code is Code.CMP for op in later.ops), "no later pass may take either value for granted"
    x, y = torch.randn(6, dtype=torch.float64), torch.full((8,), torch.nan, dtype=torch.float64)
    evaluate(later, (1,), {"X": x, "Y": y, "M": 6, "tiles": 2}, open_lanes=float("nan"))
    torch.testing.assert_close(y[:6], x)
    assert y[6:].isnan().all()


def test_rows_that_do_not_follow_each_other_keep_their_masks() -> None:
    # With other steps than the tile is high, the last row is another one than the condition speaks of.
    assert evened(copied_rows(step=8), "STAGES", "grid0", "EVEN") is None
    assert evened(copied_rows(), "OTHERS", "grid0", "EVEN") is None
