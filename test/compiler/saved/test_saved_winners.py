"""What a stored index says of a largest number is not searched again, where the index tells the place."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.outputs import use_saved
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.saved.winners import use_winners
from kernel_agent.compiler.schedule.calls import Calls

ROWS, N = 3, 37


@triton.jit
def first_of_lanes(
    x_ptr, top_ptr, index_ptr, n, SPARE: tl.constexpr, START: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), START, tl.float32)
    held = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for start in range(0, n, BLOCK):
        col = start + lane
        x = tl.load(x_ptr + row * n + col, mask=col < n, other=-float("inf"))
        better = x > best
        best = tl.where(better, x, best)
        held = tl.where(better, lane if KIND == "lane" else start if KIND == "trip" else col, held)
    index = tl.min(tl.where(best == tl.max(best, 0), held, n if SPARE < 0 else SPARE), 0)
    tl.store(top_ptr + row, tl.sum(tl.where(held == index, best, 0.0), 0))
    tl.store(index_ptr + row, index)


@triton.jit
def pooled(x_ptr, y_ptr, index_ptr, n, outputs, apart, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    out = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    held = tl.zeros((BLOCK,), tl.int32)
    for tap in range(K):
        place = out * 2 + tap * apart
        x = tl.load(x_ptr + row * n + place, mask=out < outputs, other=-float("inf"))
        better = x > best
        best = tl.where(better, x, best)
        held = tl.where(better, place, held)
    tl.store(y_ptr + row * outputs + out, best, mask=out < outputs)
    tl.store(index_ptr + row * outputs + out, held, mask=out < outputs)


@triton.jit
def range_of_row(x_ptr, y_ptr, index_ptr, rows, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    highest = -float("inf")
    lowest = float("inf")
    top = 0
    bottom = 0
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + col, mask=col < n, other=-float("inf"))
        value, lane = tl.max(x, 0, return_indices=True)
        top = tl.where(value > highest, start + lane, top)
        highest = tl.maximum(highest, value)
        value, lane = tl.min(tl.where(col < n, x, float("inf")), 0, return_indices=True)
        bottom = tl.where(value < lowest, start + lane, bottom)
        lowest = tl.minimum(lowest, value)
    tl.store(y_ptr + row, highest - 2 * lowest)
    tl.store(index_ptr + row, top)
    tl.store(index_ptr + rows + row, bottom)


@triton.jit
def picked_again(x_ptr, y_ptr, index_ptr, rows, n, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK)
    mask = row < rows
    x = tl.load(x_ptr + row[:, None] * n + col[None, :], mask=mask[:, None] & (col < n)[None, :], other=-float("inf"))
    index = tl.argmax(x, 1)
    number = tl.load(x_ptr + row * n + index, mask=mask & (index < n) if PART == "index" else mask, other=0.0)
    tl.store(y_ptr + row, number, mask=mask)
    tl.store(index_ptr + row, index, mask=mask)


@triton.jit
def largest_few(
    x_ptr, p_ptr, index_ptr, n, FIRST: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    x = tl.load(x_ptr + row * n + col, mask=col < n, other=-float("inf"))
    index = tl.zeros((SLOTS,), tl.int32)
    logit = tl.full((SLOTS,), -float("inf"), tl.float32)
    left = x
    for step in range(K):
        best = tl.argmax(left, 0)
        logit = tl.where(slot == step + FIRST, tl.sum(tl.where(col == best, x, 0.0), 0), logit)
        index = tl.where(slot == step + FIRST, best, index)
        left = tl.where(col == best, -float("inf"), left)
    e = tl.exp(logit - tl.max(logit, 0))
    at = row * SLOTS + slot
    tl.store(index_ptr + at, index, mask=slot < K)
    tl.store(p_ptr + at, e / tl.sum(e, 0), mask=slot < K)


def _first_of_lanes(spare: int = -1, start: float = -float("inf"), kind: str = "column") -> Forward:
    types = {"x_ptr": "*fp32", "top_ptr": "*fp32", "index_ptr": "*i32", "n": "i32"}
    kernel = kernel_from(first_of_lanes, types, SPARE=spare, START=start, KIND=kind, BLOCK=16)
    index = torch.zeros(ROWS, dtype=torch.int64)
    given = {"x_ptr": seeded(ROWS, N), "top_ptr": empty(ROWS), "index_ptr": index, "n": N}
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["top_ptr"])


def _pooled(apart: int) -> Forward:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "index_ptr": "*i32", "n": "i32", "outputs": "i32", "apart": "i32"}
    index = torch.zeros(ROWS, 13, dtype=torch.int64)
    given = {"x_ptr": seeded(ROWS, N), "y_ptr": empty(ROWS, 13), "index_ptr": index, "n": N, "outputs": 13}
    kernel = kernel_from(pooled, types, K=3, BLOCK=16)
    return ran(kernel, (ROWS,), given | {"apart": apart}, ["x_ptr"], ["y_ptr"])


def _range_of_row() -> Forward:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "index_ptr": "*i32", "rows": "i32", "n": "i32"}
    index = torch.zeros(2, ROWS, dtype=torch.int64)
    given = {"x_ptr": seeded(ROWS, N), "y_ptr": empty(ROWS), "index_ptr": index, "rows": ROWS, "n": N}
    return ran(kernel_from(range_of_row, types, BLOCK=16), (ROWS,), given, ["x_ptr"], ["y_ptr"])


def _largest_few(first: int = 0) -> Forward:
    types = {"x_ptr": "*fp32", "p_ptr": "*fp32", "index_ptr": "*i32", "n": "i32"}
    kernel = kernel_from(largest_few, types, FIRST=first, K=3, SLOTS=4, BLOCK=64)
    index = torch.zeros(ROWS, 4, dtype=torch.int64)
    p = torch.zeros(ROWS, 4, dtype=torch.float64)
    given = {"x_ptr": seeded(ROWS, N), "p_ptr": p, "index_ptr": index, "n": N}
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["p_ptr"])


def _picked_again(part: str) -> Forward:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "index_ptr": "*i32", "rows": "i32", "n": "i32"}
    kernel = kernel_from(picked_again, types, PART=part, BLOCK_M=2, BLOCK=64)
    index = torch.zeros(ROWS, dtype=torch.int64)
    given = {"x_ptr": seeded(ROWS, N), "y_ptr": empty(ROWS), "index_ptr": index, "rows": ROWS, "n": N}
    return ran(kernel, (2,), given, ["x_ptr"], ["y_ptr"])


@pytest.mark.parametrize("forward", [_first_of_lanes(), _range_of_row()], ids=["lanes", "trips"])
def test_a_largest_number_gets_its_gradient_by_its_stored_index(forward: Forward) -> None:
    # Searched again, every comparison would lie on a tape, and the row would be read.
    plain = forward.backward(forward.kernel)
    calls = Calls(({name: given for name, given in forward.arguments.items() if isinstance(given, int)},))
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written), calls=calls).kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0
    assert backward.loads("x_ptr") == 0


def test_indices_in_planes_of_one_tensor_are_read_back_as_far_as_the_planes_lie_apart() -> None:
    # Of no rows the second plane would begin where the first does; nobody may rely on that unseen.
    kernel = use_winners(_range_of_row().kernel).kernel
    assert "index_ptr" not in use_saved(kernel).read
    saved = use_saved(kernel, calls=Calls(({"rows": ROWS, "grid0": ROWS},)))
    assert "index_ptr" in saved.read
    assert saved.facts == ("rows >= 1",)
    assert "index_ptr" not in use_saved(kernel, calls=Calls(({"rows": 0, "grid0": ROWS},))).read


@pytest.mark.parametrize("kind", ["lane", "trip"])
def test_an_index_that_names_several_places_is_no_place(kind: str) -> None:
    # The lane alone is the same in all trips, the trip alone in all lanes: each would get the gradient of one.
    forward = _first_of_lanes(kind=kind)
    same_gradients(forward.backward(use_winners(forward.kernel).kernel), forward.backward(forward.kernel))


def test_an_index_that_may_stand_for_no_lane_is_no_place() -> None:
    # Where the least index is 5 though no lane has the best number there, column 5 must get nothing.
    forward = _first_of_lanes(spare=5)
    same_gradients(forward.backward(use_winners(forward.kernel).kernel), forward.backward(forward.kernel))


def test_a_search_that_starts_with_a_number_keeps_its_comparisons() -> None:
    # Of a row below that number none is the winner, whatever the index says.
    forward = _first_of_lanes(start=0.25)
    assert use_winners(forward.kernel).kernel is forward.kernel


def test_an_index_in_the_mask_of_a_load_is_not_read_back_where_its_store_was_masked() -> None:
    # Lanes without a row have no index in memory, and their masks would be made of whatever stands for it.
    assert "index_ptr" not in use_saved(_picked_again("index").kernel).read
    forward = _picked_again("rows")
    saved = use_saved(forward.kernel)
    assert "index_ptr" in saved.read
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_the_largest_few_numbers_are_found_by_their_stored_indices() -> None:
    # Searched again, each trip needs what the ones before it left of the row: a tape of whole rows.
    forward = _largest_few()
    plain = forward.backward(forward.kernel)
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0
    assert backward.loads("x_ptr") == 0


def test_a_number_that_no_lane_of_its_tile_holds_is_searched_again() -> None:
    # One lane further on the last of the three is not stored: lane 3 is masked.
    forward = _largest_few(first=1)
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loads("x_ptr") > 0


def test_taps_of_a_dilated_window_are_told_apart_if_the_dilation_is_not_0() -> None:
    # Every call has another dilation, so that the index alone does not say it: a tape of all comparisons was kept.
    forward = _pooled(4)
    saved = prepared(forward.kernel, frozenset(forward.written), calls=Calls(({"apart": 4},)))
    assert "apart >= 1" in saved.facts
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0
    assert backward.loads("x_ptr") == 0


def test_taps_that_were_seen_in_one_place_are_compared_again() -> None:
    # With a dilation of 0 all taps have one index, and each would get the gradient of the first.
    forward = _pooled(0)
    calls = Calls(({"apart": 0},))
    assert use_winners(forward.kernel, calls).kernel is forward.kernel
    assert use_winners(forward.kernel).kernel is forward.kernel
