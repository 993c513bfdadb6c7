"""Products step through rows by other tiles of the same rows, where one owner then does the parts of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import atomics, named_source, run

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.owner import Turn, Turns
from kernel_agent.compiler.schedule.restepped import Restepped, restepped
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

M, D = 20, 90
TYPES = {"x_ptr": "*fp32", "a_ptr": "*fp32", "o_ptr": "*fp32", "m": "i32", "d": "i32"}


@triton.jit
def forms_of_rows(x_ptr, a_ptr, o_ptr, m, d, HOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """o = x A x' of every row of x.

    HOW: 1 steps by one tile, 2 takes the first tile of a row half as often, 3 divides rows by their sums beforehand.
    """
    STEP: tl.constexpr = BN if HOW == 1 else BK
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    sums = tl.zeros((BM,), tl.float32)
    total = tl.full((BM,), 1.0, tl.float32)
    if HOW == 3:
        for start in range(0, d, STEP):
            k = start + tl.arange(0, STEP)
            x = tl.load(x_ptr + rows[:, None] * d + k[None, :], mask=(rows[:, None] < m) & (k[None, :] < d), other=0.0)
            total += tl.sum(x * x, 1)
    for column in range(0, d, BN):
        n = column + tl.arange(0, BN)
        product = tl.zeros((BM, BN), tl.float32)
        for start in range(0, d, STEP):
            k = start + tl.arange(0, STEP)
            x = tl.load(x_ptr + rows[:, None] * d + k[None, :], mask=(rows[:, None] < m) & (k[None, :] < d), other=0.0)
            if HOW == 2:
                x *= tl.where(start == 0, 0.5, 1.0)
            a = tl.load(a_ptr + k[:, None] * d + n[None, :], mask=(k[:, None] < d) & (n[None, :] < d), other=0.0)
            product = tl.dot(x, a, product, input_precision="ieee")
        x = tl.load(x_ptr + rows[:, None] * d + n[None, :], mask=(rows[:, None] < m) & (n[None, :] < d), other=0.0)
        sums += tl.sum(product * x, 1)
    tl.store(o_ptr + rows, sums / total, mask=rows < m)


def kernel(how: int = 0) -> Kernel:
    return named_source(forms_of_rows, TYPES, HOW=how, BM=16, BN=64, BK=32)


def calls() -> Calls:
    seen: dict[str, Any] = {"m": M, "d": D, "grid0": 2, "triton": triton, "BM": 16, "BN": 64, "BK": 32}
    return Calls(({**seen, "x_ptr": torch.empty(M, D), "a_ptr": torch.empty(D, D), "o_ptr": torch.empty(M)},))


def stepped(source: Kernel) -> Restepped | None:
    return restepped(source, Launch.like_forward(1, calls()))


def best(how: int = 0) -> BackwardPlan:
    return planned("rows", Wanted(kernel(how), 1, calls(), frozenset(("x_ptr", "a_ptr")), frozenset(("o_ptr",))))


def test_products_step_by_the_tile_beside_theirs() -> None:
    # Of the two orders only one is right: the other tile is an axis of the product, which is no sum.
    found = stepped(kernel())
    assert found is not None
    assert (found.tile, found.name) == ("BK", "BN")
    assert set(found.kernel.extents.values()) == {"BM", "BN"}
    assert {op.operands[0].shape[-1] for op in found.kernel.ops if op.code is Code.DOT} == {64}


@pytest.mark.parametrize("how", [0, 1])
def test_an_owner_of_a_tile_does_what_trips_of_both_loops_add_to_it(how: int) -> None:
    # A tile's program has the trip of the outer loop as its number for one part, and goes through all of them for the
    # other: with one number for both it multiplied a tile of the diagonal again and again. Loops within each other
    # that make the same trips are two axes for A: as one they left all but its diagonal without a gradient.
    plan = best(how)
    assert not atomics(plan)
    torch.manual_seed(0)
    x, a, do = (torch.randn(*shape, dtype=torch.float64) for shape in ((M, D), (D, D), (M,)))
    given = {"x_ptr": x, "a_ptr": a, "m": M, "d": D}
    found, counts = run(plan, given, {"o_ptr": do}, (2,), HOW=how, BM=16, BN=64, BK=32)
    torch.testing.assert_close(found["x_ptr"], do[:, None] * (x @ (a + a.T)))
    torch.testing.assert_close(found["a_ptr"], x.T @ (do[:, None] * x))
    assert all(count.owned(name) for count, name in zip(counts, ("da", "dx"), strict=True))


def test_products_that_know_their_step_keep_it() -> None:
    # The first step of 64 columns would be halved, of which the forward halved 32.
    assert stepped(kernel(2)) is None
    assert "dx" in atomics(best(2))


def test_owners_of_trips_do_not_compute_again_what_a_program_computed_once() -> None:
    # The sum of a row, for all tiles of the row, would be computed by the owner of each.
    for how, apart in ((1, True), (3, False)):
        adjoint = differentiate(kernel(how), read=frozenset(("x_ptr",)), written=frozenset(("o_ptr",)))
        turns = Turns(Forms(adjoint.kernel, Launch.like_forward(1, calls())))
        found = [turns.of(site, crossing=True) for site in sites(adjoint.kernel.body, frozenset((Code.ATOMIC_ADD,)))]
        assert found
        assert all(isinstance(turn, Turn) == apart for turn in found)
    assert "dx" in atomics(best(3))


def test_a_tile_that_the_kernel_was_unrolled_for_stays() -> None:
    # What was lowered for one size is not what runs with another.
    source = kernel()
    source.fixed = frozenset(("BK",))
    assert stepped(source) is None
