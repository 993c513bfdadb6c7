"""Products that step through rows in tiles take whole rows, where that leaves programs less to share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import atomics, named_source, run

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.unstepped import Unstepped, unstepped
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

N, M, H = 20, 30, 24
TYPES = {"x_ptr": "*fp32", "w_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32", "m": "i32", "h": "i32"}


@triton.jit
def squares_of_scores(
    x_ptr, w_ptr, o_ptr, n, m, h, HOW: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr
):
    """o = sum over m rows of w of squares of their products with n rows of x, formed a tile of h columns at a time.

    HOW: 1 loads what lies behind a row, 2 counts the columns of a tile anew, 3 takes the largest of each step's sums.
    """
    i, dims = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BH)
    sums = tl.zeros((BN,), tl.float32)
    for start in range(0, m, BM):
        j = start + tl.arange(0, BM)
        s = tl.zeros((BN, BM), tl.float32)
        for begin in range(0, h, BH):
            c = begin + dims
            rows = (i[:, None] < n) & (c[None, :] < (h + 1 if HOW == 1 else h))
            x = tl.load(x_ptr + i[:, None] * h + c[None, :], mask=rows, other=0.0)
            place = (begin // 2 + dims if HOW == 2 else c)[None, :]
            w = tl.load(w_ptr + j[:, None] * h + place, mask=(j[:, None] < m) & (c[None, :] < h), other=0.0)
            if HOW == 3:
                s = tl.maximum(s, tl.dot(x, tl.trans(w), input_precision="ieee"))
            else:
                s = tl.dot(x, tl.trans(w), s, input_precision="ieee")
        sums += tl.sum(s * s, 1)
    tl.store(o_ptr + i, sums, mask=i < n)


def kernel(how: int = 0) -> Kernel:
    return named_source(squares_of_scores, TYPES, HOW=how, BN=16, BM=64, BH=32)


def calls(asked: int = H, *, real: bool = True) -> Calls:
    seen: dict[str, Any] = {"n": N, "m": M, "h": H, "grid0": 2, "triton": triton, "BN": 16, "BM": 64, "BH": 16}
    seen |= {"x_ptr": torch.empty(N, H), "w_ptr": torch.empty(M, H), "o_ptr": torch.empty(N)}
    return Calls((seen,), entries=(Entry({"h": H}, {"h": asked}),) if real else ())


def whole(source: Kernel, asked: int = H, *, real: bool = True) -> Unstepped | None:
    return unstepped(source, Launch.like_forward(1, calls(asked, real=real)))


def test_a_tile_of_whole_rows_needs_no_loop_over_them() -> None:
    # Only a tile that has another name can be as wide as a row: it would start with the forward's number.
    found = whole(kernel())
    assert found is not None
    assert (found.name, found.width) == ("ALL_BH", "max(BH, triton.next_power_of_2(h))")
    assert found.calls.names[0]["ALL_BH"] == 32
    assert sum(op.code is Code.FOR for op in found.kernel.ops) == 1
    assert set(found.kernel.extents.values()) == {"BN", "BM", "ALL_BH"}


def test_rows_of_both_factors_have_owners() -> None:
    # Whoever owns rows of x would form all scores anew for every tile of their gradient: both were added to atomically.
    wanted = Wanted(kernel(), 1, calls(), frozenset(("x_ptr", "w_ptr")), frozenset(("o_ptr",)))
    plan = planned("rows", wanted)
    assert not atomics(plan)
    assert "ALL_BH" in plan.settings
    assert [step.most for step in plan.steps] == [{"BM": 16, "BN": 64}, {"BM": 64, "BN": 16}]
    torch.manual_seed(0)
    x, w, do = (torch.randn(*shape, dtype=torch.float64) for shape in ((N, H), (M, H), (N,)))
    given = {"x_ptr": x, "w_ptr": w, "n": N, "m": M, "h": H}
    found, _ = run(plan, given, {"o_ptr": do}, (2,), HOW=0, BN=16, BM=64, BH=32)
    scores = x @ w.T
    torch.testing.assert_close(found["x_ptr"], 2 * (do[:, None] * scores) @ w)
    torch.testing.assert_close(found["w_ptr"], 2 * (do[:, None] * scores).T @ x)


@pytest.mark.parametrize("how", [1, 2, 3])
def test_loops_that_do_more_than_sum_over_columns_stay(how: int) -> None:
    # A wide tile would multiply what lies behind a row, other columns than the steps had, or sum what steps compared.
    assert whole(kernel(how)) is None


def test_long_rows_and_rows_of_unknown_length_stay_in_steps() -> None:
    # 1,024 columns of sums for 64 rows are all registers of a processor.
    assert whole(kernel(), 512) is not None
    assert whole(kernel(), 1024) is None
    assert whole(kernel(), real=False) is None


def test_a_tile_that_the_kernel_was_unrolled_for_stays() -> None:
    # What was lowered for one size is not what runs with another.
    source = kernel()
    source.fixed = frozenset(("BH",))
    assert whole(source) is None
