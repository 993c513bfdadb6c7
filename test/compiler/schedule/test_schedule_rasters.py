"""Windows that begin where a program says: owners of tiles at fixed places sum what they add."""

from __future__ import annotations

import pytest
import torch
import window_forwards
from schedule_plans import Made, agree, atomics, named_source, plans_of, run

D, HEADS, BM = 16, 2, 16


def clamped(*, later: bool = False) -> Made:
    types = {"q_ptr": "*fp32", "k_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32", "w": "i32"}
    kernel = named_source(window_forwards.clamped_windows, types, D=D, BM=BM, BN=32, LATER=later)
    return plans_of(kernel, "q_ptr k_ptr", "o_ptr", 2)


def given(n: int, w: int) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    torch.manual_seed(n)
    q, k = torch.randn(2, HEADS, n, D, dtype=torch.float64)
    return {"q_ptr": q, "k_ptr": k, "n": n, "w": w}, {"o_ptr": torch.randn(HEADS, n, dtype=torch.float64)}


@pytest.mark.parametrize(("n", "w"), [(100, 9), (96, 17), (33, 33), (17, 1), (40, 31), (100, 95)])
def test_an_owner_of_keys_sums_what_all_windows_that_have_them_add(n: int, w: int) -> None:
    # The first and the last keys are in the windows of all queries that were shifted inwards,
    # which long windows have many of.
    found = clamped()
    assert atomics(found["split"]) == []
    arguments, cotangents = given(n, w)
    agree(found, arguments, cotangents, (-(-n // BM), HEADS), D=D, BM=BM, BN=32)


def test_keys_behind_the_last_lane_of_a_window_get_nothing() -> None:
    # A query's own 25 keys may end behind the 32 lanes of its program: a tile at a fixed place has lanes there.
    arguments, cotangents = given(90, 25)
    agree(clamped(), arguments, cotangents, (-(-90 // BM), HEADS), D=D, BM=BM, BN=32)


def test_an_owner_visits_only_programs_whose_windows_may_have_its_keys() -> None:
    arguments, cotangents = given(320, 9)
    _, counts = run(clamped()["split"], arguments, cotangents, (20, HEADS), D=D, BM=BM, BN=32)
    rows = 320 // 32 * HEADS * 5 * BM  # of 10 tiles of keys, each of which 5 programs of queries reach at most
    assert 0 < int(counts[-1].loaded["q_ptr"].sum()) <= rows * D


def test_windows_longer_than_the_keys_are_refused() -> None:
    facts = {fact.expression for fact in clamped()["split"].facts}
    assert "n - w >= 0" in facts


def test_what_lanes_of_a_window_add_for_each_other_stays_atomic() -> None:
    # Of a running sum over the keys of a window a tile that has some of them knows too little.
    assert all("dk" in atomics(plan) for plan in clamped(later=True).values())
