"""Gradients that are a cotangent, or another gradient, take no stores and no memory of their own."""

from __future__ import annotations

import torch
import triton
from schedule_kernels import block_of, made
from schedule_plans import agree, forward, plans_of

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.schedule.twins import without_twins
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 8


def stores(*kernels: Kernel) -> list[str]:
    return [op.base.name for kernel in kernels for op in kernel.ops if op.code is Code.STORE]


def owned(build: object, arguments: str, read: str) -> dict[str, BackwardPlan]:
    return plans_of(forward(arguments, build, BLOCK=BLOCK), read, "Y", 1)  # type: ignore[arg-type]


def test_the_gradient_of_a_residual_is_the_cotangent() -> None:
    def residual(b: Builder, x: Value, r: Value, y: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        mask = b.compare("lt", at, n)
        b.store(y, at, b.add(b.unary(Code.SIN, b.load(x, at, mask)), b.load(r, at, mask)), mask)

    found = owned(residual, "X:*f32 R:*f32 Y:*f32 n", "X R")
    plan = found["owned"]
    assert plan.gradients == {"X": "dX", "R": "dY"}
    assert [buffer.name for buffer in plan.buffers] == ["dX"]
    # Where R had more elements, those would have no gradient rather than zero.
    assert [fact.expression for fact in plan.facts] == ["R.numel() == n and BLOCK * grid0 >= n"]
    given = {"X": torch.randn(20).double(), "R": torch.randn(20).double(), "n": 20}
    agree(found, given, {"Y": torch.randn(20).double()}, (3,), BLOCK=BLOCK)


def test_summands_share_one_gradient() -> None:
    def summed(b: Builder, x: Value, r: Value, y: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        mask = b.compare("lt", at, n)
        b.store(y, at, b.unary(Code.SIN, b.add(b.load(x, at, mask), b.load(r, at, mask))), mask)

    found = owned(summed, "X:*f32 R:*f32 Y:*f32 n", "X R")
    plan = found["owned"]
    assert plan.gradients == {"X": "dX", "R": "dX"}
    assert stores(*(step.kernel for step in plan.steps)) == ["dX"]
    # A wider R would get a gradient that was rounded as X is.
    assert [fact.expression for fact in plan.facts] == ["R.dtype == X.dtype"]
    given = {"X": torch.randn(20).double(), "R": torch.randn(20).double(), "n": 20}
    agree(found, given, {"Y": torch.randn(20).double()}, (3,), BLOCK=BLOCK)


def twin(build: object, covered: set[str] | None = None) -> dict[str, str]:
    kernel = made("dY:*f32 dX:*f32 dR:*f32 n", build)  # type: ignore[arg-type]
    named = {"dX": "X", "dR": "R"}
    return without_twins([kernel], named, {"dX", "dR"} if covered is None else covered, {"dY"}).same


def beside_a_row(turned: bool) -> dict[str, BackwardPlan]:
    """Of y[i, j] = x[i, j] + w[j], or of y[j, i], where x has any strides: BLOCK lanes j, a program for each i."""

    def added(b: Builder, x: Value, w: Value, y: Value, m: Value, n: Value, x_i: Value, x_j: Value) -> None:
        row, cols = b.program_id(0), b.arange(0, BLOCK, "BLOCK")
        mask = b.compare("lt", cols, n)
        value = b.load(x, b.add(b.mul(row, x_i), b.mul(cols, x_j)), mask)
        place = b.add(b.mul(cols, m), row) if turned else b.add(b.mul(row, n), cols)
        b.store(y, place, b.add(value, b.unary(Code.SIN, b.load(w, cols, mask))), mask)

    kernel = forward("X:*f32 W:*f32 Y:*f32 m n x_i x_j", added, BLOCK=BLOCK)
    adjoint = differentiate(kernel, read=frozenset("XW"), written=frozenset("Y"))
    x = torch.empty(BLOCK, 5).t()
    seen = {"X": x, "W": torch.empty(BLOCK), "m": 5, "n": BLOCK, "x_i": x.stride(0), "x_j": x.stride(1)}
    calls = Calls(({**seen, "BLOCK": BLOCK, "grid0": 5, "triton": triton},))
    return {plan.schedule: plan for plan in plans(kernel, adjoint, 1, calls=calls)}


def test_a_gradient_in_another_order_of_memory_is_the_cotangent_under_its_indices() -> None:
    # The kernel is told the strides of x: to store dX would only put the cotangent's elements into the order of x.
    plan = beside_a_row(turned=False)["owned"]
    assert (plan.gradients["X"], plan.by_index) == ("dY", {"X"})
    assert "dX" not in stores(*(step.kernel for step in plan.steps))
    asked = [fact.expression for fact in plan.facts]
    assert "X.shape == (grid0, n,)" in asked  # else rows or columns that no program has would get the cotangent, too
    assert {"X.stride(0) == x_i", "X.stride(1) == x_j"} <= set(asked)


def test_a_transposed_sum_has_its_gradient_stored() -> None:
    # The cotangent has the element of (i, j) under (j, i): its shape alone would make it another gradient.
    plan = beside_a_row(turned=True)["owned"]
    assert not plan.by_index
    assert "dX" in stores(*(step.kernel for step in plan.steps))


def test_an_element_elsewhere_is_no_copy() -> None:
    # A reversed row has the elements of the cotangent, in other places.
    def turned(b: Builder, dy: Value, dx: Value, dr: Value, n: Value) -> None:
        at = b.arange(0, BLOCK)
        value = b.load(dy, b.sub(n, at))
        b.store(dx, at, value)
        b.store(dr, b.add(at, n), value)

    assert twin(turned) == {}


def test_a_part_is_no_copy() -> None:
    # Elements that nothing is stored to have the gradient zero, which the cotangent need not be there.
    def copied(b: Builder, dy: Value, dx: Value, dr: Value, n: Value) -> None:
        at = b.arange(0, BLOCK)
        b.store(dx, at, b.load(dy, at))
        b.store(dr, at, b.unary(Code.EXP, b.load(dy, at)))

    assert twin(copied, covered={"dR"}) == {}
    assert twin(copied, covered={"dX"}) == {"dX": "dY"}


def test_a_store_under_a_condition_is_not_one_without() -> None:
    def branched(b: Builder, dy: Value, dx: Value, dr: Value, n: Value) -> None:
        at = b.arange(0, BLOCK)
        value = b.unary(Code.EXP, b.load(dy, at))
        b.store(dx, at, value)

        def then() -> list[Value]:
            b.store(dr, at, value)
            return []

        b.branch(b.compare("lt", n, b.const(3)), then, list)

    assert twin(branched) == {}


def test_the_last_kernel_keeps_its_last_store() -> None:
    def copies(b: Builder, dy: Value, dx: Value, dr: Value, n: Value) -> None:
        at = b.arange(0, BLOCK)
        for base in (dx, dr):
            b.store(base, at, b.load(dy, at))

    kernel = made("dY:*f32 dX:*f32 dR:*f32 n", copies)
    found = without_twins([kernel], {"dX": "X", "dR": "R"}, {"dX", "dR"}, {"dY"})
    assert found.same == {"dX": "dY"}
    assert stores(*(one for one in found.kernels if one)) == ["dR"]
