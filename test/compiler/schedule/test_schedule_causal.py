"""Loops that end at the diagonal: owners visit the programs on and beyond it, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import schedule_forwards
import torch
import triton
from schedule_plans import Made, agree, atomics, from_source, plans_of, run

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.mirror import reversed_axes
from kernel_agent.compiler.schedule.schedules import plans

D = 16


def causal(bm: int, bn: int, *, whole: bool = False) -> Made:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*fp32")
    function = schedule_forwards.causal_sum
    kernel = from_source(function, {**pointers, "n": "i32"}, D=D, BM=bm, BN=bn, WHOLE=whole)
    return plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2)


def inputs(n: int) -> tuple[dict[str, Any], torch.Tensor]:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, n, D, dtype=torch.float64) for _ in range(4))
    return {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": n}, do


def truth(given: dict[str, Any], do: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in ("q_ptr", "k_ptr", "v_ptr")}
    q, k, v = leaves.values()
    ((q @ k.mT).tril() @ v).backward(do)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(("bm", "bn"), [(16, 16), (32, 16)])
@pytest.mark.parametrize("n", [64, 72, 8])
def test_owners_of_keys_sum_over_the_rows_from_the_diagonal_on(bm: int, bn: int, n: int) -> None:
    found = causal(bm, bn)
    assert list(found) == ["split", "owned", "plain"]
    assert atomics(found["split"]) == []
    given, do = inputs(n)
    programs = (-(-n // bm), 2)
    agree(found, given, {"o_ptr": do}, programs)
    gradients, counts = run(found["split"], given, {"o_ptr": do}, programs)
    for name, expected in truth(given, do).items():
        torch.testing.assert_close(gradients[name], expected, msg=lambda text, name=name: f"{name}: {text}")
    assert counts[1].owned("dk")
    assert counts[1].owned("dv")


def test_rows_before_the_diagonal_are_not_visited() -> None:
    given, do = inputs(64)
    _, counts = run(causal(16, 16)["split"], given, {"o_ptr": do}, (4, 2))
    # Row blocks 0..3 are read by the 1..4 owners of keys up to their diagonal.
    reads = counts[1].loaded["do"][0, ::16, 0].tolist()
    assert reads == [1, 2, 3, 4]


def test_keys_that_no_row_reads_are_not_touched() -> None:
    # One block of 32 rows of 64: the forward reads half the keys. The other half is not even there, so that a load or
    # a store of it, if only of zeros, is out of bounds.
    q, k, v, do = (torch.randn(1, 32, D, dtype=torch.float64) for _ in range(4))
    agree(causal(32, 16, whole=True), {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": 64}, {"o_ptr": do}, (1, 1))


def test_steps_that_miss_the_diagonal_stay_atomic() -> None:
    # Trips of 32 keys that start at multiples of 16 are no tiles of one lattice: two owners would have the same keys.
    found = causal(16, 32)
    assert set(atomics(found[next(iter(found))])) == {"dk", "dv"}
    given, do = inputs(64)
    agree(found, given, {"o_ptr": do}, (4, 2))


def own_rows_first(ahead: int) -> Made:
    types = {**dict.fromkeys(("q_ptr", "k_ptr", "o_ptr"), "*fp32"), "n": "i32"}
    kernel = from_source(schedule_forwards.own_rows_first, types, D=D, BM=16, AHEAD=ahead)
    return plans_of(kernel, "q_ptr k_ptr", "o_ptr", 2)


@pytest.mark.parametrize("n", [64, 40, 16])
def test_owners_of_keys_do_the_tile_of_a_programs_own_rows_once(n: int) -> None:
    # The tile of the program and those of its trips are added to the same keys by two places: each alone has an owner,
    # and both are one. The last program's own keys are no trip of any program.
    found = own_rows_first(0)
    assert atomics(found["split"]) == []
    torch.manual_seed(0)
    q, k, do = (torch.randn(2, n, D, dtype=torch.float64) for _ in range(3))
    programs = (-(-n // 16), 2)
    agree(found, {"q_ptr": q, "k_ptr": k, "n": n}, {"o_ptr": do}, programs)
    _, counts = run(found["split"], {"q_ptr": q, "k_ptr": k, "n": n}, {"o_ptr": do}, programs)
    assert counts[1].owned("dk")


def test_rows_of_the_next_program_are_not_its_own() -> None:
    # Two programs add to each of these keys in what is no loop: the owner of a key has another number than the program.
    found = own_rows_first(1)
    assert "dk" in atomics(next(iter(found.values())))
    q, k, do = (torch.randn(2, 40, D, dtype=torch.float64) for _ in range(3))
    agree(found, {"q_ptr": q, "k_ptr": k, "n": 40}, {"o_ptr": do}, (3, 2))


def test_rows_with_the_most_keys_start_first() -> None:
    # Programs start in the order of their numbers: rows at the end have the longest loops. Owners of keys have theirs
    # at the beginning, and to turn these would make the last owners the longest.
    rows, keys = (step.kernel for step in causal(16, 16)["split"].steps)
    assert reversed_axes(rows) == {0}
    assert not reversed_axes(keys)
    given, do = inputs(72)
    found, _ = run(causal(16, 16)["split"], given, {"o_ptr": do}, (5, 2))
    torch.testing.assert_close(found["q_ptr"], truth(given, do)["q_ptr"])


def triangle(ahead: int, *seen: int) -> Made:
    """Plans of tril(A) B with rows of so many columns in the calls that were seen."""
    types = {**dict.fromkeys(("a_ptr", "b_ptr", "y_ptr"), "*fp32"), "n": "i32"}
    kernel = from_source(schedule_forwards.triangle_product, types, D=D, BM=16, BK=16, AHEAD=ahead)
    calls = Calls(tuple({"n": n, "grid0": -(-n // 16), "grid1": 2, "triton": triton} for n in seen))
    adjoint = differentiate(kernel, read=frozenset(("a_ptr", "b_ptr")), written=frozenset(("y_ptr",)))
    return {plan.schedule: plan for plan in plans(kernel, adjoint, 2, calls=calls)}


@pytest.mark.parametrize("n", [64, 40, 8])
def test_whole_tiles_before_the_diagonal_lie_within_the_rows_though_no_mask_says_so(n: int) -> None:
    # As if tiles of a multiple of 16 columns reached into the next matrix, two owners would have the same elements.
    found = triangle(0, 72, 40)
    assert "db" not in atomics(found["split"])
    torch.manual_seed(0)
    a, b, dy = (torch.randn(2, n, columns, dtype=torch.float64) for columns in (n, D, D))
    given = {"a_ptr": a, "b_ptr": b, "n": n}
    gradients, _ = run(found["split"], given, {"y_ptr": dy}, (-(-n // 16), 2))
    torch.testing.assert_close(gradients["a_ptr"], (dy @ b.mT).tril(), msg=lambda text: f"a: {text}")
    torch.testing.assert_close(gradients["b_ptr"], a.tril().mT @ dy, msg=lambda text: f"b: {text}")


@pytest.mark.parametrize("ahead", [8, 16])
def test_tiles_that_may_reach_beyond_the_rows_stay_atomic(ahead: int) -> None:
    # The last tile begins before the limit and ends behind it, or the limit of the last program is behind the rows:
    # a mask of columns would lose what the forward read there.
    found = triangle(ahead, 72, 40)
    assert set(atomics(next(iter(found.values())))) == {"da", "db"}
    torch.manual_seed(0)
    a, b, dy = (torch.randn(2, 48, columns, dtype=torch.float64) for columns in (48, D, D))
    agree(found, {"a_ptr": a, "b_ptr": b, "n": 48}, {"y_ptr": dy}, (3, 2))
