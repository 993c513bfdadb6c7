"""The largest few numbers of rows, found by unrolled trips, are not searched again where their indices are stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from saved_checks import Backward, Forward, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.prepare import prepared

ROWS, N, K, SLOTS = 3, 13, 3, 4


@triton.jit
def largest_few(
    x_ptr, score_ptr, y_ptr, index_ptr, rows, n, KIND: tl.constexpr, FIRST: tl.constexpr, AGAIN: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    x = tl.load(x_ptr + row * n + col, mask=(row < rows) & (col < n), other=0.0)
    left = tl.where(col < n, x, -float("inf"))
    score = x if KIND == "softmax" else tl.sigmoid(x)
    kept = tl.full((BLOCK_M, SLOTS), -float("inf") if KIND == "softmax" else 0.0, tl.float32)
    index = tl.zeros((BLOCK_M, SLOTS), tl.int32)
    for step in tl.static_range(K):
        best = tl.argmax(left, 1)[:, None]
        kept = tl.where(slot == step + FIRST, tl.sum(tl.where(col == best, score, 0.0), 1)[:, None], kept)
        index = tl.where(slot == step + FIRST, best, index)
        left = tl.where(col == best, -float("inf"), left)
    if AGAIN:
        index = tl.where(slot == 0, best, index)
    if KIND == "softmax":
        e = tl.exp(kept - tl.max(kept, 1)[:, None])
        y = e / tl.sum(e, 1)[:, None]
    elif KIND == "rows":
        y = kept / tl.sum(kept, 1)[:, None]
    else:
        y = kept / tl.sum(tl.sum(kept, 1), 0)
    mask = (row < rows) & (slot < K)
    tl.store(index_ptr + row * SLOTS + slot, index, mask=mask)
    tl.store(score_ptr + row * SLOTS + slot, kept, mask=mask)
    tl.store(y_ptr + row * SLOTS + slot, y, mask=mask)


def _largest_few(kind: str, first: int = 0, again: bool = False) -> Forward:
    types = {**dict.fromkeys(("x_ptr", "score_ptr", "y_ptr"), "*fp32"), "index_ptr": "*i32", "rows": "i32", "n": "i32"}
    kernel = kernel_from(largest_few, types, KIND=kind, FIRST=first, AGAIN=again, K=K, SLOTS=SLOTS, BLOCK_M=2, BLOCK=16)
    stored = {name: torch.zeros(ROWS, SLOTS, dtype=torch.float64) for name in ("score_ptr", "y_ptr")}
    index = torch.zeros(ROWS, SLOTS, dtype=torch.int64)
    given = {"x_ptr": seeded(ROWS, N), **stored, "index_ptr": index, "rows": ROWS, "n": N}
    return ran(kernel, (2,), given, ["x_ptr"], ["y_ptr"])


def _backward_of(forward: Forward) -> Backward:
    """With what the forward stored; it is the gradient of the forward as it is."""
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    return backward


def test_indices_of_unrolled_trips_are_columns_of_what_they_stored() -> None:
    # Each search takes the row, and what the ones before it left of that.
    backward = _backward_of(_largest_few("softmax"))
    assert backward.loads("x_ptr") == 0
    assert backward.loads("index_ptr") == ROWS * K


def test_a_function_of_what_an_index_picks_follows_from_its_stored_value() -> None:
    # The sigmoid of a whole row would need the row, though one lane of it has a derivative.
    backward = _backward_of(_largest_few("rows"))
    assert backward.loads("x_ptr") == 0
    assert backward.loads("score_ptr") == ROWS * K


def test_a_column_that_is_not_stored_is_searched_again() -> None:
    # One lane further on, the last of the three lies in lane 3, which is masked.
    assert _backward_of(_largest_few("softmax", first=1)).loads("x_ptr") > 0


def test_a_column_that_is_set_again_holds_what_came_last() -> None:
    # Lane 0 has the index of the last trip then: with it for the first one's, the gradient would be another.
    assert _backward_of(_largest_few("softmax", again=True)).loads("x_ptr") > 0


def test_rows_beyond_the_last_that_count_are_not_read_back() -> None:
    # Their scores are sigmoid(0) each in the sum of all, and nothing in memory.
    assert _backward_of(_largest_few("all")).loads("score_ptr") == 0
