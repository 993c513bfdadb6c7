"""Programs that would leave a gradient out store its zeros, where a launch says that these places are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.filled import filled, whole_without_ways
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

BLOCK, ROWS, COLS = 4, 3, 10


class Elements:
    """A tensor of which a plan asks how many elements it has."""

    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count


def rows(*, leaves: bool = False, moved: bool = False, bounded: bool = False) -> Kernel:
    """Each program stores a row of sines, tile by tile, unless `Label` says -1. `leaves`: it ends then; `moved`: what
    it loads on its way says where the row is; `bounded`: only programs below a number store."""

    def build(b: Builder, x: Value, label: Value, place: Value, dx: Value, stride: Value, n: Value) -> None:
        row = b.program_id(0, "row")
        ignored = b.compare("eq", b.load(label, row), b.const(-1))

        def stored() -> list[Value]:
            first = b.mul(b.load(place, row) if moved else row, stride)

            def tile(index: Value, _: list[Value]) -> list[Value]:
                cols = b.add(index, b.arange(0, BLOCK, "BLOCK"))
                mask = b.compare("lt", cols, n)
                x_tile = b.load(x, b.add(b.mul(row, stride), cols), mask, b.const(0.0, "f32"))
                b.store(dx, b.add(first, cols), b.unary(Code.SIN, x_tile), mask)
                return []

            b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [], tile)
            return []

        if leaves:
            b.add_op(Op(Code.LEAVE_IF, (ignored,), ()))
            stored()
        elif bounded:
            b.branch(b.compare("lt", row, b.const(2)), stored, list)
        else:
            b.branch(ignored, list, stored)

    return made("X:*f32 Label:*i32 Place:*i32 dX:*f32 stride n", build, BLOCK=BLOCK)


def call(count: int = ROWS * COLS, stride: int = COLS) -> dict[str, Any]:
    return {"X": Elements(count), "stride": stride, "n": COLS, "BLOCK": BLOCK, "grid0": ROWS}


def launch(*calls: dict[str, Any]) -> Launch:
    return Launch.like_forward(1, Calls(calls))


class Set(Copier):
    """Settings as a launch has them."""

    def __init__(self, source: Kernel, value: bool) -> None:
        super().__init__(source)
        self.value = value

    def pure(self, op: Op) -> None:
        if op.attributes.get("open"):
            self[op.result] = self.b.const(self.value, "i1")
        else:
            super().pure(op)


@pytest.mark.parametrize("leaves", [False, True], ids=["a branch", "an early end"])
@pytest.mark.parametrize("fills", [False, True])
def test_a_row_that_is_left_out_gets_zeros_if_the_launch_says_so(leaves: bool, fills: bool) -> None:
    # All of the gradient was filled with zeros before, and most of it written twice.
    found = filled(rows(leaves=leaves), "dX", launch(call()), "FILL_DX")
    assert found is not None
    x, dx = torch.randn(ROWS, COLS).double(), torch.full((ROWS, COLS), 7.0).double()
    label = torch.tensor([4, -1, 5], dtype=torch.int32)
    given = {"X": x.view(-1), "Label": label, "dX": dx.view(-1), "Place": label, "stride": COLS, "n": COLS}
    evaluate(Set(found, fills).copy(), (ROWS,), given)
    expected = x.sin()
    expected[1] = 0.0 if fills else 7.0
    torch.testing.assert_close(dx, expected)


def test_zeros_go_nowhere_but_to_elements_of_the_tensor() -> None:
    # In a padded tensor a row that no program reads may lie beyond the end: the launch is asked.
    found = whole_without_ways(rows(), "X", "dX", launch(call()))
    assert found is not None
    held = Calls((call(),)).show((found.condition,))
    padded, short = (Calls((one,)).show((found.condition,)) for one in (call(stride=12), call(count=20)))
    assert (held, padded, short) == (True, False, False)


@pytest.mark.parametrize(
    ("kernel", "seen"),
    [
        pytest.param(rows(moved=True), call(), id="memory names the row"),
        pytest.param(rows(bounded=True), call(), id="other programs have no row"),
        pytest.param(rows(), call(count=40), id="there are more rows"),
    ],
)
def test_what_is_not_known_to_be_a_row_of_the_tensor_is_left_alone(kernel: Kernel, seen: dict[str, Any]) -> None:
    # What a program would load to learn where its row is, it may not load: the label that it left for may be no place.
    assert whole_without_ways(kernel, "X", "dX", launch(seen)) is None
