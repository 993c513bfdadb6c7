"""Gradients that are a cotangent where memory says so are stored where a constexpr says that they are not."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.lent import lent
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

LANES = 8


def copied(*, moved: int = 0, scaled: bool = False, beside: bool = True, read: bool = False) -> Kernel:
    """dX is dY, and beside that dR its sine. `moved`: elements from where dY has them; `scaled`: dX is twice dY;
    `read`: dR is made of what dX held."""

    def build(b: Builder, dy: Value, dx: Value, dr: Value, n: Value) -> None:
        at = b.arange(0, LANES)
        mask = b.compare("lt", at, n)
        value = b.load(dy, at, mask, b.const(0.0, "f32"))
        before = b.load(dx, at, mask, b.const(0.0, "f32")) if read else value
        b.store(dx, b.add(at, b.const(moved)), b.mul(value, b.const(2.0, "f32")) if scaled else value, mask)
        if beside:
            b.store(dr, at, b.unary(Code.SIN, before), mask)

    return made("dY:*f32 dX:*f32 dR:*f32 n", build)


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


@pytest.mark.parametrize("stored", [True, False])
def test_a_kernel_stores_a_cotangent_that_is_none_of_the_gradient_s(stored: bool) -> None:
    # Where some elements are not stored, they have to be zero: memory of the gradient's own needs the others stored.
    found = lent([copied()], ["dX"], {"dY"})
    assert found.owners == {"dX": ("dY", "STORE_DX")}
    dy, dx, dr = (torch.randn(LANES).double() for _ in range(3))
    before = dx.clone()
    (kernel,) = found.kernels
    evaluate(Set(kernel, stored).copy(), (1,), {"dY": dy, "dX": dx, "dR": dr, "n": 5})
    torch.testing.assert_close(dx, torch.cat((dy[:5], before[5:])) if stored else before)
    torch.testing.assert_close(dr[:5], dy[:5].sin())


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(copied(moved=1), id="elements elsewhere"),
        pytest.param(copied(scaled=True), id="other numbers"),
        pytest.param(copied(beside=False), id="nothing else to launch for"),
        pytest.param(copied(read=True), id="what it held is read"),
    ],
)
def test_what_is_not_a_copy_beside_others_is_stored(kernel: Kernel) -> None:
    # The cotangent stands for the gradient only where each element lies where the gradient's would.
    found = lent([kernel], ["dX"], {"dY"})
    assert not found.owners
    assert found.kernels == [kernel]
